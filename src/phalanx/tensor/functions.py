"""Functions that move activations between ranks: pairs, of which each is the other's backward.

                          forward             backward
    copy_to_ranks         nothing             all_reduce              f of the paper
    reduce_from_ranks     all_reduce          nothing                 g
    scatter_to_ranks      this rank's shard   all_gather
    gather_from_ranks     all_gather          this rank's shard
    gather_sequence       all_gather          reduce_scatter          g of the second paper
    scatter_sum           reduce_scatter      all_gather              and its conjugate

             same on every rank              different on each               same again
    x ------ copy_to_ranks (f) ------> gelu(x A_r) B_r ------ reduce_from_ranks (g) ------> y
    dx <----- sum over ranks <----------------------------------- as it is <--------------- dy

(f and g: Shoeybi et al. 2019, "Megatron-LM", section 3; along the sequence: Korthikanti et al.
2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2.)

Every rank calls them in the same order, and runs their backward passes if one does, in the thread
that called `backward`. They can be differentiated twice. On one rank they return their input.
`label` names the call in errors; ranks whose labels differ get a `DesyncError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F  # noqa: N812

from phalanx.collectives import ReduceOp
from phalanx.collectives.request import Task, memory_for
from phalanx.collectives.resolve import start
from phalanx.core.backend import Backend
from phalanx.errors import SizeMismatchError
from phalanx.tensor.shards import ShardSpec
from phalanx.wire.memory import plain


def copy_to_ranks(x: Tensor, backend: Backend, *, label: str = "copy_to_ranks") -> Tensor:
    """`x`, which is the same on every rank, to be used by each in its own way.

    Forward sends nothing; backward sums the ranks' gradients of it: an all_reduce of its bytes.
    """
    return _apply("copy_to_ranks", x, _UNCUT, 0, LabeledBackend(backend, label))


def reduce_from_ranks(x: Tensor, backend: Backend, *, label: str = "reduce_from_ranks") -> Tensor:
    """The sum of every rank's `x`, to be used by all in the same way.

    Forward is an all_reduce; backward sends nothing.
    """
    return _apply("reduce_from_ranks", x, _UNCUT, 0, LabeledBackend(backend, label))


def scatter_to_ranks(
    x: Tensor,
    backend: Backend,
    dim: int,
    *,
    cut: ShardSpec | None = None,
    label: str = "scatter_to_ranks",
) -> Tensor:
    """This rank's shard, along `dim`, of an `x` that is the same on every rank.

    Forward sends nothing; backward joins the shards' gradients: an all_gather.
    """
    return _shard("scatter_to_ranks", x, dim, cut, LabeledBackend(backend, label))


def gather_from_ranks(
    x: Tensor,
    backend: Backend,
    dim: int,
    *,
    cut: ShardSpec | None = None,
    label: str = "gather_from_ranks",
) -> Tensor:
    """The whole of which each rank has the shard `x`, to be used by all in the same way.

    Forward is an all_gather (and one of 8 bytes, unless `cut` tells the sizes); backward takes
    this rank's shard of the gradient and sends nothing.
    """
    return _gather("gather_from_ranks", x, dim, cut, LabeledBackend(backend, label))


def gather_sequence(
    x: Tensor,
    backend: Backend,
    dim: int,
    *,
    cut: ShardSpec | None = None,
    label: str = "gather_sequence",
) -> Tensor:
    """The whole of which each rank has the shard `x`, to be used by each in its own way.

    Forward is an all_gather (and one of 8 bytes, unless `cut` tells the sizes); backward sums the
    ranks' gradients of it and takes this rank's shard: a reduce_scatter.
    """
    return _gather("gather_sequence", x, dim, cut, LabeledBackend(backend, label))


def scatter_sum(
    x: Tensor,
    backend: Backend,
    dim: int,
    *,
    cut: ShardSpec | None = None,
    label: str = "scatter_sum",
) -> Tensor:
    """This rank's shard, along `dim`, of the sum of every rank's `x`.

    Forward is a reduce_scatter, backward an all_gather.
    """
    return _shard("scatter_sum", x, dim, cut, LabeledBackend(backend, label))


def _apply(name: str, x: Tensor, cut: ShardSpec, dim: int, ranks: LabeledBackend) -> Tensor:
    if ranks.backend.world_size == 1:
        return x
    return cast(Tensor, _BetweenRanks.apply(x, name, cut, dim, ranks))  # type: ignore[no-untyped-call]


def _shard(name: str, x: Tensor, dim: int, cut: ShardSpec | None, ranks: LabeledBackend) -> Tensor:
    dim = _checked_dim(x, dim, ranks.label)
    cut = cut or ShardSpec.of(x.shape[dim], ranks.backend.world_size)
    _check_size(x, dim, cut.total, ranks)
    return _apply(name, x, cut, dim, ranks)


def _gather(name: str, x: Tensor, dim: int, cut: ShardSpec | None, ranks: LabeledBackend) -> Tensor:
    dim = _checked_dim(x, dim, ranks.label)
    if ranks.backend.world_size == 1:
        return x
    if cut is None:
        cut = sequence_cut(x, dim, ranks)
    else:
        _check_size(x, dim, cut.sizes()[ranks.backend.rank], ranks)
    return _apply(name, x, cut, dim, ranks)


def _checked_dim(x: Tensor, dim: int, label: str) -> int:
    """Counted from the left: plans are cached, and ranks compared, alike for -1 and 2."""
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"{label}: a tensor of shape {list(x.shape)} has no dim {dim}")
    return dim % x.dim()


def _check_size(x: Tensor, dim: int, size: int, ranks: LabeledBackend) -> None:
    if x.shape[dim] != size:
        rank = ranks.backend.rank
        raise SizeMismatchError(
            f"rank {rank}: {ranks.label}: a tensor of shape {list(x.shape)} should be {size} long "
            f"along dim {dim}, as it was cut",
            rank=rank,
            op=ranks.label,
        )


# ------------------------------------------------------------------------------
# Shards moved between ranks by collectives, along any dimension and of any sizes.
#
#     all_gather      every rank's shard   ->  the whole, on every rank
#     reduce_scatter  every rank's whole   ->  its shard of their sum
#     all_reduce      every rank's whole   ->  their sum, on every rank
#
# The bytes of an all_gather and a reduce_scatter together are those of one all_reduce (Korthikanti
# et al. 2022). Where shards differ in size each is sent as long as the longest: one row more at
# most.


class LabeledBackend(NamedTuple):
    """The ranks that take part, and what for.

    label   which layer it is, in errors: ranks in different layers get a `DesyncError`
    """

    backend: Backend
    label: str


def all_reduce(x: Tensor, ranks: LabeledBackend, op: ReduceOp = ReduceOp.SUM) -> Tensor:
    """The reduction of every rank's `x`, as a new tensor. Blocks."""
    source = plain(x)
    out = memory_for(ranks.backend, tuple(x.shape), x.dtype, x.device)
    _move(Task("all_reduce", tuple(x.shape), x.dtype, source, out, lambda: out, op), ranks)
    return out


def all_gather(x: Tensor, cut: ShardSpec, dim: int, ranks: LabeledBackend) -> Tensor:
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


def reduce_scatter(x: Tensor, cut: ShardSpec, dim: int, ranks: LabeledBackend) -> Tensor:
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


def sequence_cut(x: Tensor, dim: int, ranks: LabeledBackend) -> ShardSpec:
    """How the sequence is cut of which every rank has a shard. Blocks for a message of 8 bytes.

    A rank cannot know it: with 3 rows here, 2 ranks may have 5 or 6. Raises `SizeMismatchError`, on
    every rank, unless the sizes are those of a sequence that was cut.
    """
    backend = ranks.backend
    mine = torch.tensor([x.shape[dim]], dtype=torch.int64)
    sizes = torch.empty(backend.world_size, dtype=torch.int64)
    _move(Task("all_gather", tuple(sizes.shape), sizes.dtype, mine, sizes, lambda: sizes), ranks)
    found = sizes.tolist()
    cut = ShardSpec.of(sum(found), backend.world_size)
    if cut.sizes() != found:
        raise SizeMismatchError(
            f"rank {backend.rank}: {ranks.label}: the ranks' parts of a sequence of {sum(found)}, "
            f"along dim {dim}, are {found} long, and should be {cut.sizes()}. Cut it with "
            "scatter_to_ranks, or by a layer with sequence_dim",
            rank=backend.rank,
            op=ranks.label,
        )
    return cut


def _move(task: Task[Tensor], ranks: LabeledBackend) -> None:
    start(task, ranks.backend, label=ranks.label).wait()


def _padded(x: Tensor, size: int, dim: int) -> Tensor:
    """With zeros behind it, so that it is `size` long along `dim`."""
    missing = size - x.shape[dim]
    behind = x.dim() - 1 - dim % x.dim()
    return F.pad(x, [0, 0] * behind + [0, missing]) if missing else x


def _lies_in_rank_order(cut: ShardSpec, sizes: list[int], dim: int) -> bool:
    """Whether the whole is nothing but the shards one behind the other."""
    return dim == 0 and min(sizes) == max(sizes) and all(len(own) == 1 for own in cut.runs)


# ------------------------------------------------------------------------------
# The functions for autograd, by name: what each does forward, and which one is its backward pass.


def _own_shard(x: Tensor, cut: ShardSpec, dim: int, ranks: LabeledBackend) -> Tensor:
    # Not a view, which could not be changed in place.
    return cut.shard(x, dim, ranks.backend.rank).clone(memory_format=torch.contiguous_format)


_UNCUT = ShardSpec(0, ())  # for the functions that cut nothing
_FUNCTIONS: Mapping[str, tuple[Callable[[Tensor, ShardSpec, int, LabeledBackend], Tensor], str]] = (
    MappingProxyType(
        {
            "copy_to_ranks": (lambda x, cut, dim, ranks: x.view_as(x), "reduce_from_ranks"),
            "reduce_from_ranks": (lambda x, cut, dim, ranks: all_reduce(x, ranks), "copy_to_ranks"),
            "scatter_to_ranks": (_own_shard, "gather_from_ranks"),
            "gather_from_ranks": (all_gather, "scatter_to_ranks"),
            "gather_sequence": (all_gather, "scatter_sum"),
            "scatter_sum": (reduce_scatter, "gather_sequence"),
        }
    )
)


class _BetweenRanks(Function):
    """A row of `_FUNCTIONS`. Backward is the row's conjugate, and can be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, name: str, cut: ShardSpec, dim: int, ranks: LabeledBackend
    ) -> Tensor:
        forward, ctx.conjugate = _FUNCTIONS[name]
        ctx.rest = cut, dim, ranks
        return forward(x, cut, dim, ranks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx = _BetweenRanks.apply(dy, ctx.conjugate, *ctx.rest)  # type: ignore[no-untyped-call]
        return dx, None, None, None, None
