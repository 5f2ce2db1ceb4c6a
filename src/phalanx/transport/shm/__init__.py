"""Ranks of one host that share memory."""
