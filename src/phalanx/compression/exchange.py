"""What the parts of an average do together, as data: requests, which somebody else carries out.

    request         this part gives        every part gets
    Mean(x)         x                      the mean over all parts, of the same shape
    MeanShard(x)    x, of [parts, ...]     [...]: this part's row of that mean
    Gather(x)       x                      [parts, *x.shape]: row i is part i's x
    Swap(x)         x, of [parts, ...]     [parts, ...]: row i is what part i had for this one

So arithmetic knows of no rank and no backend: a test plays all parts in one thread.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, TypeAlias

from torch import Tensor


class Part(NamedTuple):
    """One of those who average together: number `number` of `parts`."""

    number: int
    parts: int


class Mean(NamedTuple):
    """The mean of a tensor over all parts; the same bits everywhere. It may be overwritten."""

    tensor: Tensor


class MeanShard(NamedTuple):
    """Of the mean of a tensor over all parts row i, for part i. It may be overwritten."""

    tensor: Tensor


class Gather(NamedTuple):
    """The tensors of all parts, which have one shape and dtype, as rows."""

    tensor: Tensor


class Swap(NamedTuple):
    """Row i of a tensor goes to part i."""

    tensor: Tensor


Request: TypeAlias = Mean | MeanShard | Gather | Swap
Rounds: TypeAlias = Generator[Request, Tensor, None]
