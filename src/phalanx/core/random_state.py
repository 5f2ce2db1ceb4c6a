"""A random state for each rank, though they share one process.

Torch's, NumPy's and Python's generators are global. The rank that runs owns them. Before another
rank runs, the owner's states are saved and the other's are restored. That is done only when the
owner changes, and for NumPy only if it is imported, since it costs some 20 microseconds.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any, NamedTuple

import torch


class RandomState(NamedTuple):
    """The states of the global generators."""

    torch: torch.Tensor
    python: tuple[Any, ...]
    numpy: Any


def current() -> RandomState:
    """Return the generators' current states."""
    numpy = sys.modules.get("numpy")
    return RandomState(
        torch.get_rng_state(),
        random.getstate(),
        numpy.random.get_state() if numpy is not None else None,
    )


def restore(state: RandomState) -> None:
    """Make the generators go on from `state`."""
    torch.set_rng_state(state.torch)
    random.setstate(state.python)
    numpy = sys.modules.get("numpy")
    if numpy is not None and state.numpy is not None:
        numpy.random.set_state(state.numpy)


def seeded(seed: int, rank: int) -> RandomState:
    """Return fresh states for a rank, without touching the global ones. Any int is a seed."""
    seed = _seed_of(seed, rank)
    numpy = sys.modules.get("numpy")
    return RandomState(
        torch.Generator().manual_seed(seed).get_state(),
        random.Random(seed).getstate(),
        numpy.random.RandomState(seed % 2**32).get_state() if numpy is not None else None,
    )


def seed_all(seed: int, rank: int) -> None:
    """Give all generators fresh states for a rank, those of other devices, too."""
    torch.manual_seed(_seed_of(seed, rank))
    restore(seeded(seed, rank))


def _seed_of(seed: int, rank: int) -> int:
    digest = hashlib.sha256(f"rank {rank} of a run with seed {seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class RandomStates:
    """The random states of `size` ranks, seeded differently, of which one is in force."""

    def __init__(self, size: int, seed: int) -> None:
        self._states = [seeded(seed, rank) for rank in range(size)]
        self._outside = current()
        self._owner: int | None = None

    def give_to(self, rank: int) -> None:
        """Let rank `rank` run next."""
        if rank == self._owner:
            return
        if self._owner is not None:
            self._states[self._owner] = current()
        restore(self._states[rank])
        self._owner = rank

    def close(self) -> None:
        """Restore the states from before."""
        restore(self._outside)
