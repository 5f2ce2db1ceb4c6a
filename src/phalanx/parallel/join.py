"""Joining: ranks that have no batch left answer those that have one, until nobody has.

    rank 0   batch 1 | batch 2 | -------- answers -------- | parameters of rank 1
    rank 1   batch 1 | batch 2 | batch 3 | batch 4 | over  | parameters of rank 1
    rank 2   batch 1 | batch 2 | batch 3 | -- answers ---- | parameters of rank 1

An answer is what the others wait for, with zeros in it. (Li et al. 2020 leave uneven inputs open;
torch's `Join` context manager is the same idea.)
"""

from __future__ import annotations

from torch import nn

from phalanx.backends.base import Backend
from phalanx.errors import MisuseError
from phalanx.parallel.roll import Roll, Turn, call_the_roll
from phalanx.parallel.sync_batch_norm import SyncBatchNorm


class Join:
    """What the ranks know of each other while their numbers of batches may differ.

    active   the ranks that had a batch at the last roll call at which some had
    """

    def __init__(
        self,
        backend: Backend,
        *,
        divide_by_initial_world_size: bool,
        throw_on_early_termination: bool,
    ) -> None:
        self.throws = throw_on_early_termination
        self.active = list(range(backend.world_size))
        self._backend = backend
        self._divide_by_all = divide_by_initial_world_size

    @property
    def leader(self) -> int:
        """The rank whose buffers, and in the end parameters, count: the first that has a batch."""
        return self.active[0]

    @property
    def divisor(self) -> int:
        """By what a sum of gradients is divided."""
        return self._backend.world_size if self._divide_by_all else len(self.active)

    def call(self, turn: Turn, samples: float = 0.0) -> Roll:
        """Call the roll. Raises `MisuseError` if a rank is over, and another is not, and the user
        wants to be told so.
        """
        roll = call_the_roll(turn, self._backend, samples)
        self.active = roll.active or self.active
        over = sorted({*range(self._backend.world_size)} - {*roll.active})
        if self.throws and over and roll.active:
            noun = "ranks" if len(over) > 1 else "rank"
            raise MisuseError(
                f"rank {self._backend.rank}: DDP: {noun} {', '.join(map(str, over))} ran out of "
                f"batches, and others have not (throw_on_early_termination=True)",
                rank=self._backend.rank,
                peer=over[0],
                op="DDP",
            )
        return roll


def check_joinable(module: nn.Module, backend: Backend, already: Join | None) -> None:
    """Raise `MisuseError` if nobody could answer for this module, or somebody does already."""
    problem = "join() inside join()" if already is not None else None
    for name, layer in module.named_modules():
        if isinstance(layer, SyncBatchNorm):
            problem = (
                f"join() cannot answer for {name or 'the module'}, a SyncBatchNorm, which needs "
                "every rank in each forward pass. Pass an empty batch on ranks that have none, "
                "weighted with 0 samples; or use join(throw_on_early_termination=True)"
            )
    if problem is not None:
        rank = backend.rank
        raise MisuseError(f"rank {rank}: DDP: {problem}", rank=rank, op="DDP")
