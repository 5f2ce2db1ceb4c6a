"""Ranks that are processes, connected over TCP."""

from phalanx.backends.tcp.backend import TcpBackend

__all__ = ["TcpBackend"]
