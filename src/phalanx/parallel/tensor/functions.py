"""How activations and their gradients cross between ranks: pairs, each the other's backward.

                          forward             backward
    copy_to_ranks         nothing             all_reduce              f of the paper
    reduce_from_ranks     all_reduce          nothing                 g
    scatter_to_ranks      this rank's shard   all_gather
    gather_from_ranks     all_gather          this rank's shard
    gather_sequence       all_gather          reduce_scatter          g of the second paper
    scatter_sum           reduce_scatter      all_gather              and its conjugate

             same on every rank              of its own on each              same again
    x ------ copy_to_ranks (f) ------> gelu(x A_r) B_r ------ reduce_from_ranks (g) ------> y
    dx <----- sum over ranks <----------------------------------- as it is <--------------- dy

(f and g: Shoeybi et al. 2019, "Megatron-LM", section 3; along the sequence: Korthikanti et al.
2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2.)

Every rank calls them in the same order, and goes back through them if one does, in the thread that
called `backward`. They can be differentiated twice. One rank gets back what it gave.
`label` says in errors what it is; ranks whose labels differ get a `DesyncError`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.backends.base import Backend
from phalanx.errors import SizeMismatchError
from phalanx.parallel.tensor.moves import (
    Ranks,
    all_gather,
    all_reduce,
    reduce_scatter,
    sequence_cut,
)
from phalanx.parallel.tensor.shards import Cut


def copy_to_ranks(x: Tensor, backend: Backend, *, label: str = "copy_to_ranks") -> Tensor:
    """`x`, which is the same on every rank, to be used by each in its own way.

    Forward sends nothing; backward sums the ranks' gradients of it: an all_reduce of its bytes.
    """
    return _apply(_Copy, x, Ranks(backend, label))


def reduce_from_ranks(x: Tensor, backend: Backend, *, label: str = "reduce_from_ranks") -> Tensor:
    """The sum of every rank's `x`, to be used by all in the same way.

    Forward is an all_reduce; backward sends nothing.
    """
    return _apply(_Reduce, x, Ranks(backend, label))


def scatter_to_ranks(
    x: Tensor,
    backend: Backend,
    dim: int,
    *,
    cut: Cut | None = None,
    label: str = "scatter_to_ranks",
) -> Tensor:
    """This rank's shard, along `dim`, of an `x` that is the same on every rank.

    Forward sends nothing; backward joins the shards' gradients: an all_gather.
    """
    return _shard(_Scatter, x, dim, cut, Ranks(backend, label))


def gather_from_ranks(
    x: Tensor,
    backend: Backend,
    dim: int,
    *,
    cut: Cut | None = None,
    label: str = "gather_from_ranks",
) -> Tensor:
    """The whole of which each rank has the shard `x`, to be used by all in the same way.

    Forward is an all_gather (and one of 8 bytes, unless `cut` tells the sizes); backward takes
    this rank's shard of the gradient and sends nothing.
    """
    return _gather(_Gather, x, dim, cut, Ranks(backend, label))


def gather_sequence(
    x: Tensor, backend: Backend, dim: int, *, cut: Cut | None = None, label: str = "gather_sequence"
) -> Tensor:
    """The whole of which each rank has the shard `x`, to be used by each in its own way.

    Forward is an all_gather (and one of 8 bytes, unless `cut` tells the sizes); backward sums the
    ranks' gradients of it and takes this rank's shard: a reduce_scatter.
    """
    return _gather(_GatherSequence, x, dim, cut, Ranks(backend, label))


def scatter_sum(
    x: Tensor, backend: Backend, dim: int, *, cut: Cut | None = None, label: str = "scatter_sum"
) -> Tensor:
    """This rank's shard, along `dim`, of the sum of every rank's `x`.

    Forward is a reduce_scatter, backward an all_gather.
    """
    return _shard(_ScatterSum, x, dim, cut, Ranks(backend, label))


# The functions ------------------------------------------------------------------------------


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _Reduce.apply(dy, ctx.ranks), None  # type: ignore[no-untyped-call]


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return all_reduce(x, ranks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _Copy.apply(dy, ctx.ranks), None  # type: ignore[no-untyped-call]


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, dim: int, ranks: Ranks) -> Tensor:
        ctx.rest = cut, dim, ranks
        # Not a view, which could not be changed in place.
        return cut.shard(x, dim, ranks.backend.rank).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _Gather.apply(dy, *ctx.rest), None, None, None  # type: ignore[no-untyped-call]


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, dim: int, ranks: Ranks) -> Tensor:
        ctx.rest = cut, dim, ranks
        return all_gather(x, cut, dim, ranks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _Scatter.apply(dy, *ctx.rest), None, None, None  # type: ignore[no-untyped-call]


class _GatherSequence(_Gather):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _ScatterSum.apply(dy, *ctx.rest), None, None, None  # type: ignore[no-untyped-call]


class _ScatterSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, dim: int, ranks: Ranks) -> Tensor:
        ctx.rest = cut, dim, ranks
        return reduce_scatter(x, cut, dim, ranks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _GatherSequence.apply(dy, *ctx.rest), None, None, None  # type: ignore[no-untyped-call]


def _apply(function: type[Function], x: Tensor, *rest: Any) -> Tensor:
    ranks: Ranks = rest[-1]
    if ranks.backend.world_size == 1:
        return x
    return cast(Tensor, function.apply(x, *rest))  # type: ignore[no-untyped-call]


def _shard(function: type[Function], x: Tensor, dim: int, cut: Cut | None, ranks: Ranks) -> Tensor:
    dim = _checked_dim(x, dim, ranks.label)
    cut = cut or Cut.of(x.shape[dim], ranks.backend.world_size)
    _check_size(x, dim, cut.total, ranks)
    return _apply(function, x, cut, dim, ranks)


def _gather(function: type[Function], x: Tensor, dim: int, cut: Cut | None, ranks: Ranks) -> Tensor:
    dim = _checked_dim(x, dim, ranks.label)
    if ranks.backend.world_size == 1:
        return x
    if cut is None:
        cut = sequence_cut(x, dim, ranks)
    else:
        _check_size(x, dim, cut.sizes()[ranks.backend.rank], ranks)
    return _apply(function, x, cut, dim, ranks)


def _checked_dim(x: Tensor, dim: int, label: str) -> int:
    """From the left: what a plan is cached by, and ranks compare, is then the same for -1 and 2."""
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"{label}: a tensor of shape {list(x.shape)} has no dim {dim}")
    return dim % x.dim()


def _check_size(x: Tensor, dim: int, size: int, ranks: Ranks) -> None:
    if x.shape[dim] != size:
        rank = ranks.backend.rank
        raise SizeMismatchError(
            f"rank {rank}: {ranks.label}: a tensor of shape {list(x.shape)} should be {size} long "
            f"along dim {dim}, as it was cut",
            rank=rank,
            op=ranks.label,
        )
