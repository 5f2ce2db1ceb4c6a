"""Collectives in shared memory: a plan, and its executor."""
