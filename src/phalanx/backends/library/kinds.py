"""What each kind of process group can do, as data.

A collective that is not in the table, or whose result would not be what `ReduceOp` promises, is
done with rounds of messages instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch

from phalanx.backends.native import Call

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

    def has(self, call: Call) -> bool:
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
