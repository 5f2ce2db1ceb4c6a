"""Collectives in shared memory: a plan, and what carries it out."""
