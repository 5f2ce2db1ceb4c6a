"""Ranks that are processes, connected over TCP."""
