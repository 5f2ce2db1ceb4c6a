"""Shards moved between ranks, along any dimension and of any sizes, with whole collectives.

    all_gather      every rank's shard   ->  the whole, on every rank
    reduce_scatter  every rank's whole   ->  its shard of their sum
    all_reduce      every rank's whole   ->  their sum, on every rank

The bytes of an all_gather and a reduce_scatter together are those of one all_reduce (Korthikanti et
al. 2022). Where shards differ in size each is sent as long as the longest: one row more at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from phalanx.backends.base import Backend
from phalanx.backends.memory import plain
from phalanx.collectives import ReduceOp
from phalanx.collectives.run import start
from phalanx.collectives.task import Task, memory_for
from phalanx.errors import SizeMismatchError
from phalanx.parallel.tensor.shards import Cut


class Ranks(NamedTuple):
    """Who takes part, and what for.

    label   which layer it is, in errors: ranks that are in different ones are told so
    """

    backend: Backend
    label: str


def all_reduce(x: Tensor, ranks: Ranks, op: ReduceOp = ReduceOp.SUM) -> Tensor:
    """The reduction of every rank's `x`, as a new tensor. Blocks."""
    source = plain(x)
    out = memory_for(ranks.backend, tuple(x.shape), x.dtype, x.device)
    _move(Task("all_reduce", tuple(x.shape), x.dtype, source, out, lambda: out, op), ranks)
    return out


def all_gather(x: Tensor, cut: Cut, dim: int, ranks: Ranks) -> Tensor:
    """The whole of which every rank has a shard, cut along `dim`. Blocks."""
    sizes = cut.sizes()
    mine = plain(_padded(x, max(sizes), dim))
    shape = (len(sizes), *mine.shape)
    out = memory_for(ranks.backend, shape, x.dtype, x.device)
    _move(Task("all_gather", shape, x.dtype, mine, out, lambda: out), ranks)
    if _lies_in_rank_order(cut, sizes, dim):
        return out.flatten(0, 1)
    rows = zip(out.unbind(), sizes, strict=True)
    return cut.join([row.narrow(dim, 0, size) for row, size in rows], dim)


def reduce_scatter(x: Tensor, cut: Cut, dim: int, ranks: Ranks) -> Tensor:
    """This rank's shard, cut along `dim`, of the sum of every rank's `x`. Blocks."""
    sizes = cut.sizes()
    rank, longest = ranks.backend.rank, max(sizes)
    if _lies_in_rank_order(cut, sizes, dim):
        source = plain(x).view(len(sizes), longest, *x.shape[1:])
    else:
        source = torch.stack(
            [_padded(shard, longest, dim) for shard in cut.shards(x.detach(), dim)]
        )
    out = memory_for(ranks.backend, tuple(source.shape[1:]), x.dtype, x.device)
    shape = tuple(source.shape)
    _move(Task("reduce_scatter", shape, x.dtype, source, out, lambda: out, ReduceOp.SUM), ranks)
    return out.narrow(dim, 0, sizes[rank])


def sequence_cut(x: Tensor, dim: int, ranks: Ranks) -> Cut:
    """How the sequence is cut of which every rank has a shard. Blocks for a message of 8 bytes.

    A rank cannot know it: with 3 rows here, 2 ranks may have 5 or 6. Raises `SizeMismatchError`, on
    every rank, unless the sizes are those of a sequence that was cut.
    """
    backend = ranks.backend
    mine = torch.tensor([x.shape[dim]], dtype=torch.int64)
    sizes = torch.empty(backend.world_size, dtype=torch.int64)
    _move(Task("all_gather", tuple(sizes.shape), sizes.dtype, mine, sizes, lambda: sizes), ranks)
    found = sizes.tolist()
    cut = Cut.of(sum(found), backend.world_size)
    if cut.sizes() != found:
        raise SizeMismatchError(
            f"rank {backend.rank}: {ranks.label}: the ranks' parts of a sequence of {sum(found)}, "
            f"along dim {dim}, are {found} long, and should be {cut.sizes()}. Cut it with "
            "scatter_to_ranks, or by a layer with sequence_dim",
            rank=backend.rank,
            op=ranks.label,
        )
    return cut


def _move(task: Task[Tensor], ranks: Ranks) -> None:
    start(task, ranks.backend, label=ranks.label).wait()


def _padded(x: Tensor, size: int, dim: int) -> Tensor:
    """With zeros behind it, so that it is `size` long along `dim`."""
    missing = size - x.shape[dim]
    behind = x.dim() - 1 - dim % x.dim()
    return F.pad(x, [0, 0] * behind + [0, missing]) if missing else x


def _lies_in_rank_order(cut: Cut, sizes: list[int], dim: int) -> bool:
    """Whether the whole is nothing but the shards one behind the other."""
    return dim == 0 and min(sizes) == max(sizes) and all(len(own) == 1 for own in cut.runs)
