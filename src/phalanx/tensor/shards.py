"""The cut of one dimension over ranks: as even as possible, the earlier shards one longer.

10 rows, 4 ranks               | 0 1 2 | 3 4 5 | 6 7 | 8 9 |
parts=(6, 6), 3 ranks          | 0 1 , 6 7 | 2 3 , 8 9 | 4 5 , 10 11 |
12 rows, unit=4, 2 ranks       | 0 1 2 3 , 4 5 6 7 | 8 9 10 11 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.core.call import whole_number
from phalanx.errors import SizeMismatchError

Run = tuple[int, int]


@dataclass(frozen=True)
class ShardSpec:
    """The elements of a dimension of `total` that each rank has.

    runs   for each rank its ranges (start, end), which follow each other in its shard
    """

    total: int
    runs: tuple[tuple[Run, ...], ...]

    @classmethod
    def of(
        cls, total: int, ranks: int, *, parts: Sequence[int] | None = None, unit: int = 1
    ) -> ShardSpec:
        """Cut `total` elements; each of `parts` (which add up to it) by itself, in whole units.

        A rank's shard then has a piece of each part, in order: queries, keys and values that lie
        one after the other in one layer stay so. `unit` elements stay together: a head's. If units
        do not divide, the earlier ranks have one more; with too few, the later have none.
        """
        runs: list[list[Run]] = [[] for _ in range(ranks)]
        start = 0
        for part in (total,) if parts is None else parts:
            units, longer = divmod(part // unit, ranks)
            for rank, own in enumerate(runs):
                end = start + unit * (units + (rank < longer))
                own.append((start, end))
                start = end
        return cls(total, tuple(map(tuple, runs)))

    def sizes(self) -> list[int]:
        """Return the number of each rank's elements."""
        return [sum(end - start for start, end in own) for own in self.runs]

    def shard(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        """Return the shard of `rank` of a tensor: a view if it is one run, else a copy."""
        pieces = [whole.narrow(dim, start, end - start) for start, end in self.runs[rank]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def shards(self, whole: Tensor, dim: int) -> list[Tensor]:
        """Return each rank's shard of a tensor."""
        return [self.shard(whole, dim, rank) for rank in range(len(self.runs))]

    def join(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """Return the whole, of every rank's shard in rank order: the inverse of `shards`."""
        pieces: list[tuple[Run, Tensor]] = []
        for own, shard in zip(self.runs, shards, strict=True):
            lengths = [end - start for start, end in own]
            pieces += zip(own, torch.split(shard, lengths, dim), strict=True)
        pieces.sort(key=lambda piece: piece[0])
        return torch.cat([values for _, values in pieces], dim)


def shard_tensor(t: Tensor, n: int) -> list[Tensor]:
    """Cut a tensor along dim 0 into `n` shards, of which the earlier ones are one row longer.

        7 rows, n = 3   ->   3, 2, 2

    Each shard is a new tensor that owns its rows alone: it does not keep `t` in memory, and is
    saved without it. A tensor of no dimensions has nothing to be cut along: it gives one copy of
    itself. Raises `ValueError` unless there are as many rows as shards, and one shard.
    """
    if not isinstance(t, Tensor):
        raise TypeError(f"shard_tensor cuts a tensor, not {type(t).__name__}")
    if whole_number(n, "n") < 1:
        raise ValueError(f"cannot cut a tensor into {n} shards: 1 or more are needed")
    if t.dim() == 0:
        return [t.clone()]
    if n > len(t):
        raise ValueError(
            f"cannot cut a tensor of shape {list(t.shape)} into {n} shards along dim 0: it has "
            f"{len(t)} rows, and every shard needs one"
        )
    return [shard.clone() for shard in torch.tensor_split(t, n)]


def gather_shards(shards: Sequence[Tensor]) -> Tensor:
    """Join the shards of `shard_tensor`: exactly the tensor that it was, as a new one.

    `[t]` with a tensor of no dimensions gives it back. Raises `ValueError` for no shards;
    `SizeMismatchError` (a ValueError) for shards whose dtypes, or shapes behind dim 0, disagree,
    naming the first.
    """
    shards = list(shards)
    if not shards:
        raise ValueError("cannot join no shards: 1 or more are needed")
    first = shards[0]
    if first.dim() == 0 and len(shards) == 1:
        return first.clone()
    for number, shard in enumerate(shards):
        alike = shard.dim() and shard.shape[1:] == first.shape[1:] and shard.dtype == first.dtype
        if not alike:
            raise SizeMismatchError(
                f"shard {number} of shape {list(shard.shape)} ({shard.dtype}) does not fit to "
                f"shard 0 of shape {list(first.shape)} ({first.dtype}): shards of one tensor "
                "differ in the number of rows only"
            )
    return torch.cat(shards)
