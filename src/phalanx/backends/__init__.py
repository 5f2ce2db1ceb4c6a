"""Backends: the ways in which bytes move between ranks."""

from phalanx.backends.base import Backend
from phalanx.backends.mpi import MpiBackend
from phalanx.backends.simulated import SimulatedBackend
from phalanx.backends.sub import SubBackend
from phalanx.backends.tcp import TcpBackend

__all__ = ["Backend", "MpiBackend", "SimulatedBackend", "SubBackend", "TcpBackend"]
