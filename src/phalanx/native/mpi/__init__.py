"""Ranks that MPI has started, connected by its library."""
