"""Backends: the ways in which bytes move between ranks."""

from phalanx.core.backend import DEFAULT_TIMEOUT, Backend, SubBackend
from phalanx.native.mpi import MpiBackend
from phalanx.native.torch_group import GlooBackend, NcclBackend, TorchBackend, UccBackend
from phalanx.transport.backends import HybridBackend, SharedMemoryBackend, TcpBackend
from phalanx.transport.simulated import SimulatedBackend

__all__ = [
    "DEFAULT_TIMEOUT",
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
