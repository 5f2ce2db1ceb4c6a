"""Backends: the ways in which bytes move between ranks."""

from phalanx.backends.base import Backend
from phalanx.backends.mpi import MpiBackend
from phalanx.backends.shm.backend import HybridBackend, SharedMemoryBackend
from phalanx.backends.simulated import SimulatedBackend
from phalanx.backends.sub import SubBackend
from phalanx.backends.tcp import TcpBackend
from phalanx.backends.torch_group import GlooBackend, NcclBackend, TorchBackend, UccBackend

__all__ = [
    "Backend",
    "GlooBackend",
    "HybridBackend",
    "MpiBackend",
    "NcclBackend",
    "SharedMemoryBackend",
    "SimulatedBackend",
    "SubBackend",
    "TcpBackend",
    "TorchBackend",
    "UccBackend",
]
