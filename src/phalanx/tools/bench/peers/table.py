"""The table of peers: name -> why it cannot be here, and how it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from phalanx.tools.bench.peers.backends import lacks_backend, make_ours
from phalanx.tools.bench.peers.libraries import Copy, Gloo, Mpi, Socket, lacks_gloo, lacks_mpi
from phalanx.tools.bench.peers.others import DeepSpeed, Mlx, lacks_deepspeed, lacks_mlx
from phalanx.tools.bench.peers.peer import Peer, Place
from phalanx.tools.bench.peers.training import Alone


def _nothing() -> str:
    return ""


class Row(NamedTuple):
    """One peer.

    lacks       says, without asking other ranks, why it cannot be here; empty: it may be
    make        makes it, on every rank at the same time
    needs_mpi   whether the ranks have to be started by mpirun
    ours        whether it is Phalanx
    machine     whether it is no library, but what the machine can do
    trains      whether it has training steps
    """

    lacks: Callable[[], str]
    make: Callable[[Place], Peer]
    needs_mpi: bool = False
    ours: bool = False
    machine: bool = False
    trains: bool = False


def _ours(name: str) -> Row:
    return Row(lacks_backend(name), partial(make_ours, name), ours=True, trains=True)


def _lacks_our_mpi() -> str:
    return lacks_backend("mpi")() or lacks_mpi()


PEERS: Mapping[str, Row] = MappingProxyType(
    {
        "shm": _ours("shm"),
        "hybrid": _ours("hybrid"),
        "tcp": _ours("tcp"),
        "phalanx-gloo": _ours("gloo"),
        "phalanx-mpi": Row(
            _lacks_our_mpi, partial(make_ours, "mpi"), needs_mpi=True, ours=True, trains=True
        ),
        "gloo": Row(lacks_gloo, Gloo, trains=True),
        "mpi": Row(lacks_mpi, Mpi, needs_mpi=True),
        "deepspeed": Row(lacks_deepspeed, DeepSpeed),
        "mlx": Row(lacks_mlx, Mlx),
        "socket": Row(_nothing, Socket, machine=True),
        "copy": Row(_nothing, Copy, machine=True),
        "alone": Row(_nothing, Alone, machine=True, trains=True),
    }
)
"""`phalanx-gloo` and `phalanx-mpi` are Phalanx over those libraries; `gloo` and `mpi`, they."""
