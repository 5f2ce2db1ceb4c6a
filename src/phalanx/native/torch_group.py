"""`TorchBackend`: a process group of `torch.distributed`, and forms of it that make their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from phalanx.core.backend import DEFAULT_TIMEOUT
from phalanx.core.call import check_timeout
from phalanx.core.steps import NativeCall
from phalanx.errors import BackendUnavailableError, InvalidRankError, InvalidWorldSizeError
from phalanx.native.backend import LibraryBackend
from phalanx.wire.control import parse_address

if TYPE_CHECKING:
    import socket

    from phalanx.native.base import Library


class TorchBackend(LibraryBackend):
    """One rank of a process group of `torch.distributed`, with its collectives.

    process_group   of any backend; also one that was made without `init_process_group`. By
                    default that of `init_process_group`. It stays open when this is closed
    timeout         seconds that a call waits at most

    Every rank of the group makes one, which blocks until all have. It is a mesh as that of
    `HybridBackend`, which the ranks form by way of the group, with the group's own collectives.
    What the group has not (see docs/backends.md) is done over the mesh, so nothing mixes with what
    else the process group is used for, but collectives, whose order has to be the same on every
    rank.

    The group's own collectives cannot be compared before they run: ranks that call different ones
    are told so where they wait for each other, and at every tenth collective; but some libraries
    end the process, or give wrong numbers, before. PHALANX_STRICT=1 does without them. Raises
    `MisuseError` if there is no group, `BackendUnavailableError`.
    """

    def __init__(self, process_group: Any = None, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        check_timeout(timeout)
        check_available()
        from phalanx.native import torch_formation  # noqa: PLC0415 - torch may lack what it needs

        group = torch_formation.checked_group(process_group)
        super().__init__(
            group.rank(),
            group.size(),
            torch_formation.where_over(group, timeout),
            lambda topology: torch_formation.library_over(group, topology),
            name="the process group",
            timeout=timeout,
            all_came=True,
        )


class _NamedBackend(LibraryBackend):
    """A process group that is made here, of one of torch's kinds."""

    kind: ClassVar[str]

    def __init__(
        self,
        rank: int,
        world_size: int,
        master_addr: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        job: str = "",
        generation: int = 0,
        listener: socket.socket | None = None,
    ) -> None:
        try:
            if world_size < 1:
                raise InvalidWorldSizeError(f"a group needs at least one rank, not {world_size}")
            if not 0 <= rank < world_size:
                raise InvalidRankError(
                    f"rank {rank} is not one of the {world_size} ranks 0 to {world_size - 1}",
                    rank=rank,
                )
            check_timeout(timeout)
            check_available(self.kind)
            from phalanx.native import torch_formation  # noqa: PLC0415 - as above

            store = torch_formation.store_at(rank, world_size, master_addr, timeout, listener)
            prefix = f"phalanx/{job}/{generation}"
            host = parse_address(master_addr).host if world_size > 1 else "127.0.0.1"
            patient = torch_formation.PatientStore(store, prefix, timeout)
            where = torch_formation.where_of(patient, rank, host, timeout)
        except BaseException:
            if listener is not None:
                listener.close()
            raise

        def join(topology: tuple[int, ...]) -> Library:
            interface = torch_formation.interface_for(topology)
            former = torch_formation.Former(self.kind, rank, store, prefix, interface)
            return torch_formation.form(self.kind, rank, world_size, former, timeout)

        super().__init__(
            *(rank, world_size, where, join),
            name=self.kind,
            timeout=timeout,
            job=job,
            generation=generation,
        )


class GlooBackend(_NamedBackend):
    """One rank of a Gloo group that is made for it. CPU tensors.

    rank, world_size  which one this is, of how many
    master_addr       `"host:port"` where rank 0 holds the store through which they meet
    timeout           seconds that a call waits at most, the epoch of the ranks included
    job, generation   ranks of another job, or of an earlier start of it, are not met
    listener          for rank 0: a socket that listens at `master_addr` already

    Blocks until all ranks have met. Torch's store knows no token: whoever reaches it can take part.
    Otherwise as `TorchBackend`. Raises `InvalidWorldSizeError`, `InvalidRankError`,
    `BackendUnavailableError` (this build of torch lacks it, or the port is in use),
    `CollectiveTimeoutError` if not all ranks come.
    """

    kind = "gloo"


class NcclBackend(_NamedBackend):
    """One rank of an NCCL group that is made for it.

    As `GlooBackend`. CUDA tensors, on the device that is current (`torch.cuda.set_device`). Its
    collectives run on torch's streams: a call returns when the result is ordered before what this
    thread's stream does next. CPU tensors go over the mesh.
    """

    kind = "nccl"


class UccBackend(_NamedBackend):
    """One rank of a UCC group that is made for it.

    As `GlooBackend`.
    """

    kind = "ucc"


_INSTALL = {
    "gloo": "install a build of torch with Gloo: the wheels from pytorch.org have it",
    "nccl": "install a build of torch for CUDA, from pytorch.org (choose a CUDA platform there)",
    "ucc": "build torch from source with USE_UCC=1: its wheels come without",
}


def check_available(*kinds: str) -> None:
    """Raise `BackendUnavailableError` unless this build of torch has such process groups."""
    if not torch.distributed.is_available():
        raise BackendUnavailableError(
            "this build of torch has no torch.distributed: install one that has it, such as those "
            "from pytorch.org; or use the backend 'tcp' or 'shm', which do not need it"
        )
    for name in dict.fromkeys(kinds):
        if not getattr(torch.distributed, f"is_{name}_available")():
            raise BackendUnavailableError(
                f"this build of torch has no {name.upper() if name != 'gloo' else 'Gloo'}: "
                f"{_INSTALL[name]}; or use the backend 'tcp' or 'shm', which need neither"
            )


# ------------------------------------------------------------------------------
# What each kind of process group can do, as data.
#
# A collective that is not in the table, or whose result would not be what `ReduceOp` promises, is
# done with rounds of messages instead.

ProcessGroup = Any

MOVING = frozenset({"broadcast", "all_gather", "gather", "scatter", "all_to_all"})
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})
ALL = MOVING | REDUCING | {"barrier"}

_FLOATS = frozenset({torch.float32, torch.float64})
_SHORT = frozenset({torch.float16, torch.bfloat16})
_WHOLE = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})


@dataclass(frozen=True)
class GroupKind:
    """One kind of process group, on one kind of device.

    title        its name, for messages
    collectives  those that it has
    dtypes       for each reduction, the dtypes that it computes as `ReduceOp` promises
    on_stream    whether its collectives run on a device's stream
    averages     whether it computes means itself, instead of sums
    break_off    ends at once all that is under way in a group; None: nothing does
    """

    title: str
    collectives: frozenset[str]
    dtypes: Mapping[str, frozenset[torch.dtype]]
    on_stream: bool = False
    averages: bool = False
    break_off: Callable[[ProcessGroup], None] | None = None

    def has(self, call: NativeCall) -> bool:
        """Whether groups of this kind carry out such a collective."""
        collective, source, out, op, _ = call
        if collective not in REDUCING:
            return collective in self.collectives
        tensor = source if source is not None else out
        assert tensor is not None
        assert op is not None
        return tensor.dtype in self.dtypes.get(op, ()) and collective in self.collectives


def _break_off_gloo(group: ProcessGroup) -> None:
    """A receive that times out makes Gloo close the connections to all peers."""
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):  # it says so; or the peer has closed, and the next may do
                group.recv([torch.empty(1)], peer, _NOBODYS).wait(timedelta(milliseconds=1))


_NOBODYS = 2  # a tag that no message has


_ALL_NUMBERS = _FLOATS | _SHORT | _WHOLE

# Gloo's minimum and maximum of NaN and a number are either; its sum of many float16 may overflow
# where their mean does not.
GLOO = GroupKind(
    title="Gloo",
    collectives=ALL,
    dtypes=MappingProxyType(
        {
            "sum": _ALL_NUMBERS,
            "mean": _ALL_NUMBERS - {torch.float16},
            "product": _ALL_NUMBERS,
            **dict.fromkeys(("min", "max", "band", "bor", "bxor"), _WHOLE),
        }
    ),
    break_off=_break_off_gloo,
)

NCCL = GroupKind(
    title="NCCL",
    collectives=ALL,
    dtypes=MappingProxyType(dict.fromkeys(("sum", "mean", "product", "min", "max"), _ALL_NUMBERS)),
    on_stream=True,
    averages=True,
)

_UCC_COLLECTIVES = frozenset({"all_reduce", "broadcast", "all_gather", "all_to_all", "barrier"})
_UCC_DTYPES = MappingProxyType(dict.fromkeys(("sum", "mean"), _FLOATS | {torch.int32, torch.int64}))
UCC = GroupKind(title="UCC", collectives=_UCC_COLLECTIVES, dtypes=_UCC_DTYPES)
UCC_ON_CUDA = GroupKind(
    title="UCC", collectives=_UCC_COLLECTIVES, dtypes=_UCC_DTYPES, on_stream=True
)

# What any group can be expected to do.
OTHER = GroupKind(
    title="the process group",
    collectives=frozenset({"all_reduce", "broadcast", "barrier"}),
    dtypes=MappingProxyType(dict.fromkeys(("sum", "mean"), _FLOATS)),
)

KINDS: Mapping[tuple[str, str], GroupKind] = MappingProxyType(
    {
        ("gloo", "cpu"): GLOO,
        ("nccl", "cuda"): NCCL,
        ("ucc", "cpu"): UCC,
        ("ucc", "cuda"): UCC_ON_CUDA,
    }
)
"""By torch's name for the backend, and the device."""


def kinds_of(group: ProcessGroup) -> Mapping[str, GroupKind]:
    """For each kind of device that a group takes tensors of, what it does with them."""
    devices = getattr(group, "_device_types", None)
    if devices is None:  # one of a process group's backends, without the process group
        name = group.name()
        known = {device: kind for (n, device), kind in KINDS.items() if n == name}
        return MappingProxyType(known or {"cpu": OTHER})
    kinds: dict[str, GroupKind] = {}
    for device in devices:
        name = group._get_backend(device).name()
        if (name, device.type) in KINDS:
            kinds[device.type] = KINDS[name, device.type]
        elif not any(name == known for known, _ in KINDS):
            kinds[device.type] = OTHER
    return MappingProxyType(kinds)
