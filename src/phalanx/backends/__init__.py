"""Backends: the ways in which bytes move between ranks."""

from phalanx.backends.base import Backend
from phalanx.backends.shm.backend import HybridBackend, SharedMemoryBackend
from phalanx.backends.simulated import SimulatedBackend
from phalanx.backends.sub import SubBackend
from phalanx.backends.tcp import TcpBackend

__all__ = [
    "Backend",
    "HybridBackend",
    "SharedMemoryBackend",
    "SimulatedBackend",
    "SubBackend",
    "TcpBackend",
]
