"""Ranks that MPI has started, connected by its library."""

from phalanx.backends.mpi.backend import MpiBackend

__all__ = ["MpiBackend"]
