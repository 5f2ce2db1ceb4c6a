"""Uneven inputs: ranks with fewer batches (`DDP.join`), and batches of different sizes
(`DDP.weighted`).

Ranks that have no batch left answer those that have one, until none has:

    rank 0   batch 1 | batch 2 | -------- answers -------- | parameters of rank 1
    rank 1   batch 1 | batch 2 | batch 3 | batch 4 | over  | parameters of rank 1
    rank 2   batch 1 | batch 2 | batch 3 | -- answers ---- | parameters of rank 1

An answer is the collective that the others wait for, with zeros in it. (Li et al. 2020 leave uneven
inputs open; torch's `Join` context manager is the same idea.)
"""

from __future__ import annotations

import enum
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.collectives import all_gather
from phalanx.core.backend import Backend
from phalanx.errors import DesyncError, MisuseError
from phalanx.parallel.sync_batch_norm import SyncBatchNorm


class Join:
    """What the ranks know of each other while their numbers of batches may differ.

    active   the ranks that had a batch when the last header said that some had
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

    def exchange(self, phase: JoinPhase, samples: float = 0.0) -> JoinHeader:
        """Exchange a join header. Raises `MisuseError` if one rank is over, another is not, and
        the user wants to be told so.
        """
        header = exchange_join_header(phase, self._backend, samples)
        self.active = header.active or self.active
        over = sorted({*range(self._backend.world_size)} - {*header.active})
        if self.throws and over and header.active:
            noun = "ranks" if len(over) > 1 else "rank"
            raise MisuseError(
                f"rank {self._backend.rank}: DDP: {noun} {', '.join(map(str, over))} ran out of "
                f"batches, and others have not (throw_on_early_termination=True)",
                rank=self._backend.rank,
                peer=over[0],
                op="DDP",
            )
        return header


def check_joinable(module: nn.Module, backend: Backend, already: Join | None) -> None:
    """Raise `MisuseError` if no rank could answer for this module, or it is in `join` already."""
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


# ------------------------------------------------------------------------------
# The join header: each rank says which phase of training it is about to begin, before it does.
#
#     rank 0   forward  | backward | over    | over
#     rank 1   forward  | backward | forward | over        a column is one message of 16 bytes
#
# So ranks that have no batch left know what the others wait for, and samples can be counted.


class JoinPhase(enum.IntEnum):
    """What a rank is about to do."""

    OVER = 0  # nothing: it has no batch left
    FORWARD = 1  # a forward pass, which begins with rank 0's buffers
    WEIGHTING = 2  # a loss is weighted with a number of samples
    BACKWARD = 3  # a backward pass that averages gradients
    CATCHING_UP = 4  # accumulated gradients are averaged, outside a backward pass


_WORDS = {
    JoinPhase.FORWARD: "begins a forward pass",
    JoinPhase.WEIGHTING: "weights a loss",
    JoinPhase.BACKWARD: "begins a backward pass",
    JoinPhase.CATCHING_UP: "averages accumulated gradients",
}


class JoinHeader(NamedTuple):
    """What all ranks said.

    phase     of the ranks that have a batch; OVER if none has
    active    the ranks that have one, ascending
    samples   of each rank
    """

    phase: JoinPhase
    active: list[int]
    samples: list[float]


def exchange_join_header(phase: JoinPhase, backend: Backend, samples: float = 0.0) -> JoinHeader:
    """Say what this rank is about to do; blocks until all ranks have said it.

    Raises `DesyncError`, on every rank, if two of those that have a batch do different things.
    """
    row = torch.tensor([[float(phase), samples]], dtype=torch.float64)
    rows = all_gather(row, backend).tolist()
    phases = [JoinPhase(int(row[0])) for row in rows]
    active = [rank for rank, theirs in enumerate(phases) if theirs is not JoinPhase.OVER]
    if not active:
        return JoinHeader(JoinPhase.OVER, [], [])
    first = active[0]
    for rank in active:
        if phases[rank] is not phases[first]:
            raise DesyncError(
                f"rank {backend.rank}: DDP: rank {first} {_WORDS[phases[first]]} while rank {rank} "
                f"{_WORDS[phases[rank]]}. Every rank that has a batch has to do the same with it",
                rank=backend.rank,
                peer=rank if rank != backend.rank else first,
                op="DDP",
            )
    return JoinHeader(phases[first], active, [row[1] for row in rows])


# ------------------------------------------------------------------------------
# Losses of batches of different sizes, weighted so that their mean is that of the joined batch.
#
# With n_r samples on rank r, N on all p ranks, and L_r the mean loss of rank r's samples,
#
#     L = sum over r of n_r / N * L_r  =  1/p * sum over r of (p * n_r / N) * L_r
#
# is the mean loss of all samples. DDP averages over ranks, so rank r's loss is scaled by p * n_r /
# N. The loss is scaled, and not the averaged gradient, since `SyncBatchNorm` mixes the ranks'
# losses on their way back.


class Weighting:
    """Scales the losses of a backend's ranks.

    zero   whether the backward pass that runs is of a loss with zero weight
    """

    def __init__(self, backend: Backend) -> None:
        self.zero = False
        self._backend = backend

    def scale(self, loss: Tensor, samples: float, join: Join | None) -> Tensor:
        """The loss of this rank's samples, scaled; with 0 of them it is 0, and so is its gradient.

        (The mean of no samples is NaN, and so is its gradient: neither may reach the other ranks.)
        """
        count = float(samples)
        if not (isfinite(count) and count >= 0):
            raise ValueError(f"samples must be a number of at least 0, not {samples!r}")
        if join is None:
            header = exchange_join_header(JoinPhase.WEIGHTING, self._backend, count)
        else:
            header = join.exchange(JoinPhase.WEIGHTING, count)
        divisor = self._backend.world_size if join is None else join.divisor
        factor = count * divisor / sum(header.samples) if count else 0.0
        return _Scale.apply(loss, factor, self)  # type: ignore[no-any-return, no-untyped-call]


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float, weighting: Weighting) -> Tensor:
        ctx.factor, ctx.weighting = factor, weighting
        return loss * factor if factor else torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.weighting.zero = ctx.factor == 0
        return (grad * ctx.factor if ctx.factor else torch.zeros_like(grad)), None, None
