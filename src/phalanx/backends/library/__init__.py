"""Backends over other libraries' groups of ranks."""
