"""`mean`: of the values of all ranks, whose numbers may differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.collectives import all_reduce
from phalanx.core.backend import Backend

Values = float | Sequence[float] | Tensor


def mean(values: Values, backend: Backend, *, weights: Values | None = None) -> float:
    """Return the weighted mean of all ranks' values, the same on every rank: one message of 24
    bytes. It blocks; every rank calls it.

        correct = [(model(x).argmax(1) == y) for x, y in batches]        # of this rank's samples
        accuracy = phalanx.mean(torch.cat(correct), backend)             # of all samples
        loss = phalanx.mean(means, backend, weights=numbers_of_tokens)   # of all tokens

    values   of this rank: a number, a sequence of them, or a tensor of any shape and real dtype, on
             any device; none at all, too (an empty sequence)
    weights  how much each value counts, finite and not negative; one number for all of them, or of
             the same shape. A value of weight 0 does not count, even if it is NaN

    Values are added up in double precision. The mean is NaN if a value that counts is NaN.

    Raises ValueError, on every rank, if the weights of all ranks are 0 together, or those of a rank
    are negative, not finite, or of another shape than its values.
    """
    mine, weight = (_doubles(each) for each in (values, 1.0 if weights is None else weights))
    fits = weight.dim() == 0 or weight.shape == mine.shape
    sums = torch.zeros(3, dtype=torch.float64)
    if fits and bool((weight.isfinite() & (weight >= 0)).all()):
        weight = weight.expand_as(mine)
        sums[0] = torch.where(weight == 0, 0.0, mine * weight).sum()
        sums[1] = weight.sum()
    else:
        sums[2] = 1.0
    total, count, wrong = all_reduce(sums, backend).tolist()
    if wrong:
        here = "this rank's" if sums[2] else "another rank's"
        raise ValueError(
            f"rank {backend.rank}: mean: {here} weights must be finite and not negative, one for "
            f"each value or one for all; on {wrong:g} of {backend.world_size} ranks they are not"
        )
    if not count:
        raise ValueError(
            f"rank {backend.rank}: mean: no rank has a value that counts: all weights are 0"
        )
    return float(total / count)


def _doubles(values: Values) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
