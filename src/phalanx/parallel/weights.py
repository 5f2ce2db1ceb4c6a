"""Losses of batches of different sizes, weighted so that their mean is that of the joined batch.

With n_r samples on rank r, N on all p ranks, and L_r the mean loss of rank r's samples,

    L = sum over r of n_r / N * L_r  =  1/p * sum over r of (p * n_r / N) * L_r

is the mean loss of all samples. DDP averages over ranks, so rank r's loss is scaled by p * n_r / N.
It is the loss that is scaled, not the averaged gradient: what goes back through `SyncBatchNorm`
mixes the ranks' losses on the way.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.parallel.roll import Turn, call_the_roll

if TYPE_CHECKING:
    from phalanx.parallel.reducer import Reducer


def weigh(loss: Tensor, samples: float, reducer: Reducer, backend: Backend) -> Tensor:
    """The loss of this rank's samples, scaled; with 0 of them it is 0, and so is its gradient.

    (The mean of no samples is NaN, and so is its gradient: neither may reach the other ranks.)
    """
    count = float(samples)
    if not (isfinite(count) and count >= 0):
        raise ValueError(f"samples must be a number of at least 0, not {samples!r}")
    join = reducer.join
    if join is None:
        roll, divisor = call_the_roll(Turn.WEIGHING, backend, count), backend.world_size
    else:
        roll, divisor = join.call(Turn.WEIGHING, count), join.divisor
    factor = count * divisor / sum(roll.samples) if count else 0.0
    return _Scale.apply(loss, factor, reducer)  # type: ignore[no-any-return, no-untyped-call]


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float, reducer: Reducer) -> Tensor:
        ctx.factor, ctx.reducer = factor, reducer
        return loss * factor if factor else torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.reducer.weightless = ctx.factor == 0
        return (grad * ctx.factor if ctx.factor else torch.zeros_like(grad)), None, None
