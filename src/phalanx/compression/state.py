"""The state of a compressor: tensors by name, and how often it was called; residuals as a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

State: TypeAlias = Mapping[str, Tensor]


class NamedTensors:
    """Tensors by name. Those that a pass puts in replace the others when it is committed.

    committed   as of the last commit
    pending     what this pass has put in, which nobody else writes
    """

    def __init__(self) -> None:
        self.committed: dict[str, Tensor] = {}
        self.pending: dict[str, Tensor] = {}

    def latest(self, name: str) -> Tensor | None:
        """What this pass has put in under that name; else the committed tensor."""
        return self.pending.get(name, self.committed.get(name))

    def commit(self) -> None:
        """The pass counts."""
        self.committed.update(self.pending)
        self.pending.clear()

    def rollback(self) -> None:
        """The pass does not count: the state is that of the last commit."""
        self.pending.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Names and committed tensors; copies."""
        return {name: tensor.clone() for name, tensor in self.committed.items()}

    def load_state_dict(self, state: State) -> None:
        """Replace all by copies of these."""
        self.committed = {name: tensor.detach().clone() for name, tensor in state.items()}
        self.pending.clear()


class CallCounter(NamedTensors):
    """Numbers calls, so that each has random numbers of its own, and alike on every member.

    A pass that is rolled back is counted again: members that were cut short at different calls go
    on alike. As a state: the number of calls that counted, whose name is empty.
    """

    def __init__(self) -> None:
        super().__init__()
        self.load_state_dict({})

    def next(self) -> int:
        """The number of this call."""
        number = self.pending.get("", self.committed[""])
        self.pending[""] = number + 1
        return int(number)

    def load_state_dict(self, state: State) -> None:
        """Continue from there."""
        super().load_state_dict({"": torch.tensor(int(state.get("", 0)), dtype=torch.int64)})


def strip_prefix(prefix: str, state: State) -> dict[str, Tensor]:
    """The entries whose keys have that prefix, without it."""
    return {k[len(prefix) :]: value for k, value in state.items() if k.startswith(prefix)}


# ------------------------------------------------------------------------------
# Residuals in a state dict: their keys, and what becomes of them with another number of members.
#
#   residual.<name>              what a member has left out of its gradient
#   owned.<start>-<stop>.<name>  what it has left out of the mean of these elements of the gradient
#   inner.<key>                  the compressor's own
#
# An average lacks  sum over p members of residual / p  +  sum of owned.  Of q members each gets an
# equal share of that, so that it lacks as much afterwards.
#
# Where gradients are cut into shards before they are averaged, a member knows slices of them only:
# then <name> is <start>-<stop>.<name>, elements start:stop of that gradient.

RESIDUAL, OWNED, INNER = "residual.", "owned.", "inner."


def slice_key(name: str, start: int, stop: int) -> str:
    """The key of elements start:stop of a gradient, without its prefix."""
    return f"{start}-{stop}.{name}"


def read_slice_key(key: str) -> tuple[str, int, int]:
    """The name, start and stop of such a key."""
    span, name = key.split(".", 1)
    start, stop = span.split("-")
    return name, int(start), int(stop)


def total_residual(states: Sequence[State], parts: int) -> dict[str, Tensor]:
    """What averages of that many members lack, by name; float64.

    states   of those members that are known
    """
    total: dict[str, Tensor] = {}
    for state in states:
        for name, residual in strip_prefix(RESIDUAL, state).items():
            mine = residual.double() / parts
            total[name] = total[name] + mine if name in total else mine
    for state in states:
        for key, residual in strip_prefix(OWNED, state).items():
            name, start, stop = read_slice_key(key)
            total[name][start:stop] += residual.double()
    return total


def join_slices(slices: State, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Whole gradients from slices of them, by name; zeros for what is not there.

    sizes   of the gradients, by name, as far as they are known
    """
    whole: dict[str, Tensor] = {}
    for key, values in slices.items():
        name, start, stop = read_slice_key(key)
        known = whole.setdefault(name, values.new_zeros(sizes.get(name, stop)))
        if len(known) < stop:
            known = whole[name] = torch.cat([known, known.new_zeros(stop - len(known))])
        known[start:stop] += values
    return whole


def split_residual(total: Tensor, parts: int, dtype: torch.dtype) -> list[Tensor]:
    """Residuals of that many members by whose mean an average lacks `total` (float64).

    Rounded to `dtype` so that together they are off by half a unit in the last place of one.
    """
    rest, shares = total * parts, []
    for remaining in range(parts, 0, -1):
        shares.append((rest / remaining).to(dtype))
        rest = rest - shares[-1].double()
    return shares
