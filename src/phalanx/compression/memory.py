"""What a compressor remembers: tensors by name, and how often it was called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor


class Remembers(Protocol):
    """What has a state, which changes for good with `commit`, after a pass."""

    def commit(self) -> None:
        """The pass counts."""

    def rollback(self) -> None:
        """The pass does not count: be as after the last commit."""

    def state_dict(self) -> dict[str, Tensor]:
        """The state after the last commit; copies."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Be in that state."""


class Memory:
    """Tensors by name. Those that a pass puts in are seen once it is committed."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._new: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        """The tensor of that name, as of the last commit."""
        return self._kept.get(name)

    def new(self, name: str) -> Tensor | None:
        """What this pass has put in under that name."""
        return self._new.get(name)

    def latest(self, name: str) -> Tensor | None:
        """What this pass has put in under that name; else what is kept."""
        return self._new.get(name, self._kept.get(name))

    def put(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor, which nobody else writes, when this pass is committed."""
        self._new[name] = tensor

    def drop(self, name: str) -> None:
        """Forget a tensor now."""
        self._kept.pop(name, None)

    def commit(self) -> None:
        """The pass counts."""
        self._kept.update(self._new)
        self._new.clear()

    def rollback(self) -> None:
        """The pass does not count."""
        self._new.clear()

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, as of the last commit."""
        yield from list(self._kept.items())

    def state_dict(self) -> dict[str, Tensor]:
        """Names and tensors, as of the last commit; copies."""
        return {name: kept.clone() for name, kept in self._kept.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Forget all and know these, of which copies are made."""
        self._kept = {name: kept.detach().clone() for name, kept in state.items()}
        self._new.clear()


class Turns:
    """Counts calls, so that each has random numbers of its own, and alike on every part.

    A pass that is rolled back is counted again: parts that were cut short at different calls go on
    alike.
    """

    def __init__(self) -> None:
        self._before = 0
        self._in_this_pass = 0

    def next(self) -> int:
        """The number of this call."""
        number = self._before + self._in_this_pass
        self._in_this_pass += 1
        return number

    def commit(self) -> None:
        """The pass counts."""
        self._before += self._in_this_pass
        self._in_this_pass = 0

    def rollback(self) -> None:
        """The pass does not count."""
        self._in_this_pass = 0

    def state_dict(self) -> dict[str, Tensor]:
        """How many calls counted; its name is empty."""
        return {"": torch.tensor(self._before, dtype=torch.int64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there."""
        self._before, self._in_this_pass = int(state.get("", 0)), 0


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of a state has keys of that prefix, without it."""
    return {k[len(prefix) :]: value for k, value in state.items() if k.startswith(prefix)}
