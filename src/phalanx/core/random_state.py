"""A random state for each rank, though they share one process.

Torch's, NumPy's and Python's generators are global. The rank that runs owns them. Before another
rank runs, the owner's states are saved and the other's are restored. That is done only when the
owner changes, and for NumPy only if it is imported. It takes some 15 microseconds, and up to 100
if NumPy's has drawn.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_TWISTER = 4 * 625  # bytes of NumPy's MT19937: 624 words, and the place of the next one


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
    if torch.accelerator.is_available():  # else torch would note it for later, in 2 ms
        torch.manual_seed(_seed_of(seed, rank))
    restore(seeded(seed, rank))


def _seed_of(seed: int, rank: int) -> int:
    digest = hashlib.sha256(f"rank {rank} of a run with seed {seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class RandomStates:
    """The random states of `size` ranks, seeded differently, of which one is in force."""

    def __init__(self, size: int, seed: int) -> None:
        states = [seeded(seed, rank) for rank in range(size)]
        self._outside = current()
        self._states = [(each.torch, each.python) for each in states]
        of_numpy = [each.numpy for each in states if each.numpy is not None]
        self._numpy = _NumpyStates(of_numpy) if of_numpy else None
        self._owner: int | None = None

    def give_to(self, rank: int) -> None:
        """Let rank `rank` run next."""
        if rank == self._owner:
            return
        if self._owner is not None:
            self._states[self._owner] = torch.get_rng_state(), random.getstate()
        for_torch, for_python = self._states[rank]
        torch.set_rng_state(for_torch)
        random.setstate(for_python)
        if self._numpy is not None:
            self._numpy.give_to(rank, self._owner)
        self._owner = rank

    def close(self) -> None:
        """Restore the states from before."""
        if self._numpy is not None:
            self._numpy.close()
        restore(self._outside)


class _NumpyStates:
    """NumPy's states: each rank has a generator of its own, put in place of the global one.

    To copy a state takes 30 us, to put another generator in place less than one. But NumPy draws
    normal numbers two at a time, and forgets the second one then. So the state of a rank that has
    such a number is copied; whether it has one is looked at if it has drawn.
    """

    def __init__(self, states: Sequence[Any]) -> None:
        self._random = made = sys.modules["numpy"].random
        self._outside = made.get_bit_generator()
        self._generators = [made.MT19937() for _ in states]
        for generator, state in zip(self._generators, states, strict=True):
            made.RandomState(generator).set_state(state)
        self._words: list[bytes | None] = [self._words_of(each) for each in self._generators]
        self._copies: list[Any] = [None for _ in states]

    def give_to(self, rank: int, owner: int | None) -> None:
        """Put the generator of a rank in place of the owner's."""
        if owner is not None:
            generator = self._generators[owner] = self._random.get_bit_generator()
            words = self._words_of(generator)
            if words is None or words != self._words[owner] or self._copies[owner] is not None:
                state = self._random.get_state(legacy=False)
                self._copies[owner] = state if state["has_gauss"] else None
                self._words[owner] = words
        self._random.set_bit_generator(self._generators[rank])
        if self._copies[rank] is not None:
            self._random.set_state(self._copies[rank])

    def close(self) -> None:
        """Put the generator from before in its place."""
        self._random.set_bit_generator(self._outside)

    def _words_of(self, generator: Any) -> bytes | None:
        """Return all that changes in a Mersenne Twister when it draws; None for another kind."""
        if not isinstance(generator, self._random.MT19937):
            return None
        return ctypes.string_at(generator.ctypes.state_address, _TWISTER)
