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
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F  # noqa: N812

from phalanx.collectives import all_gather, all_reduce, reduce_scatter
from phalanx.core.backend import Backend
from phalanx.errors import SizeMismatchError
from phalanx.tensor.shards import ShardSpec
from phalanx.torch_internals import disable_dynamo
from phalanx.wire.memory import plain


def copy_to_ranks(x: Tensor, backend: Backend, *, label: str = "copy_to_ranks") -> Tensor:
    """Return `x`, which is the same on every rank, to be used by each in its own way.

    Forward sends nothing; backward sums the ranks' gradients of it: an all_reduce of its bytes.
    """
    return _apply("copy_to_ranks", x, _UNCUT, 0, backend, label)


def reduce_from_ranks(x: Tensor, backend: Backend, *, label: str = "reduce_from_ranks") -> Tensor:
    """Return the sum of every rank's `x`, to be used by all in the same way.

    Forward is an all_reduce; backward sends nothing.
    """
    return _apply("reduce_from_ranks", x, _UNCUT, 0, backend, label)


def scatter_to_ranks(
    x: Tensor,
    backend: Backend,
    dim: int,
    *,
    cut: ShardSpec | None = None,
    label: str = "scatter_to_ranks",
) -> Tensor:
    """Return this rank's shard, along `dim`, of an `x` that is the same on every rank.

    Forward sends nothing; backward joins the shards' gradients: an all_gather.
    """
    return _along("scatter_to_ranks", x, dim, cut, backend, label)


def gather_from_ranks(
    x: Tensor,
    backend: Backend,
    dim: int,
    *,
    cut: ShardSpec | None = None,
    label: str = "gather_from_ranks",
) -> Tensor:
    """Join the ranks' shards `x` to the whole, to be used by all in the same way.

    Forward is an all_gather (and one of 8 bytes, unless `cut` tells the sizes); backward takes
    this rank's shard of the gradient and sends nothing.
    """
    return _along("gather_from_ranks", x, dim, cut, backend, label)


def gather_sequence(
    x: Tensor,
    backend: Backend,
    dim: int,
    *,
    cut: ShardSpec | None = None,
    label: str = "gather_sequence",
) -> Tensor:
    """Join the ranks' shards `x` to the whole, to be used by each in its own way.

    Forward is an all_gather (and one of 8 bytes, unless `cut` tells the sizes); backward sums the
    ranks' gradients of it and takes this rank's shard: a reduce_scatter.
    """
    return _along("gather_sequence", x, dim, cut, backend, label)


def scatter_sum(
    x: Tensor,
    backend: Backend,
    dim: int,
    *,
    cut: ShardSpec | None = None,
    label: str = "scatter_sum",
) -> Tensor:
    """Return this rank's shard, along `dim`, of the sum of every rank's `x`.

    Forward is a reduce_scatter, backward an all_gather.
    """
    return _along("scatter_sum", x, dim, cut, backend, label)


def _apply(name: str, x: Tensor, cut: ShardSpec, dim: int, backend: Backend, label: str) -> Tensor:
    return x if backend.world_size == 1 else _move(x, name, cut, dim, backend, label)


@disable_dynamo()  # torch.compile runs it as it is, and compiles what is before and after
def _move(*args: Any) -> Tensor:
    return cast(Tensor, _BetweenRanks.apply(*args))  # type: ignore[no-untyped-call]


def _along(
    name: str, x: Tensor, dim: int, cut: ShardSpec | None, backend: Backend, label: str
) -> Tensor:
    """Apply a function that gathers shards, or gives one, along a dim that `x` has to have."""
    rank, gathers = backend.rank, name.startswith("gather")
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"{label}: a tensor of shape {list(x.shape)} has no dim {dim}")
    dim %= x.dim()  # plans are cached, and ranks compared, alike for -1 and 2
    if gathers and backend.world_size == 1:
        return x
    if cut is None and gathers:
        cut = sequence_cut(x, dim, backend, label)
    elif cut is None:
        cut = ShardSpec.of(x.shape[dim], backend.world_size)
    size = cut.sizes()[rank] if gathers else cut.total
    if x.shape[dim] != size:
        raise SizeMismatchError(
            f"rank {rank}: {label}: a tensor of shape {list(x.shape)} should be {size} long "
            f"along dim {dim}, as it was cut",
            rank=rank,
            op=label,
        )
    return _apply(name, x, cut, dim, backend, label)


# ------------------------------------------------------------------------------
# Shards moved between ranks by collectives, along any dimension and of any sizes.
#
#     all_gather_shards      every rank's shard   ->  the whole, on every rank
#     reduce_scatter_shards  every rank's whole   ->  its shard of their sum
#
# Their bytes together are those of one all_reduce (Korthikanti et al. 2022). Where shards differ in
# size each is sent as long as the longest: one row more at most.


def all_gather_shards(x: Tensor, cut: ShardSpec, dim: int, backend: Backend, label: str) -> Tensor:
    """Return the whole of the ranks' shards, cut along `dim`. Blocks."""
    sizes = cut.sizes()
    out = all_gather(_padded(x, max(sizes), dim).unsqueeze(0), backend, label=label)
    if _lies_in_rank_order(cut, sizes, dim):
        return out.flatten(0, 1)
    rows = zip(out.unbind(), sizes, strict=True)
    return cut.join([row.narrow(dim, 0, size) for row, size in rows], dim)


def reduce_scatter_shards(
    x: Tensor, cut: ShardSpec, dim: int, backend: Backend, label: str
) -> Tensor:
    """Return this rank's shard, cut along `dim`, of the sum of every rank's `x`. Blocks."""
    sizes = cut.sizes()
    longest = max(sizes)
    if _lies_in_rank_order(cut, sizes, dim):
        source = plain(x).view(len(sizes), longest, *x.shape[1:])
    else:
        shards = cut.shards(x.detach(), dim)
        source = torch.stack([_padded(shard, longest, dim) for shard in shards])
    own = reduce_scatter(source, backend, label=label)[0]
    return own.narrow(dim, 0, sizes[backend.rank])


@disable_dynamo()
def sequence_cut(x: Tensor, dim: int, backend: Backend, label: str) -> ShardSpec:
    """Return the cut of a sequence that ranks have in shards. Blocks for a message of 8 bytes.

    A rank cannot know it: with 3 rows here, 2 ranks may have 5 or 6. Raises `SizeMismatchError`, on
    every rank, unless the sizes are those of a sequence that was cut.
    """
    mine = torch.tensor([x.shape[dim]], dtype=torch.int64)
    found = all_gather(mine, backend, label=label).tolist()
    cut = ShardSpec.of(sum(found), backend.world_size)
    if cut.sizes() != found:
        raise SizeMismatchError(
            f"rank {backend.rank}: {label}: the ranks' parts of a sequence of {sum(found)}, "
            f"along dim {dim}, are {found} long, and should be {cut.sizes()}. Cut it with "
            "scatter_to_ranks, or by a layer with sequence_dim",
            rank=backend.rank,
            op=label,
        )
    return cut


def _padded(x: Tensor, size: int, dim: int) -> Tensor:
    """Return `x` with zeros behind it, so that it is `size` long along `dim`."""
    missing = size - x.shape[dim]
    behind = x.dim() - 1 - dim % x.dim()
    return F.pad(x, [0, 0] * behind + [0, missing]) if missing else x


def _lies_in_rank_order(cut: ShardSpec, sizes: list[int], dim: int) -> bool:
    """Return whether the whole is just the shards, one behind the other."""
    return dim == 0 and min(sizes) == max(sizes) and all(len(own) == 1 for own in cut.runs)


# ------------------------------------------------------------------------------
# The functions for autograd, by name: what each does forward, and which one is its backward pass.


def _own_shard(x: Tensor, cut: ShardSpec, dim: int, backend: Backend, label: str) -> Tensor:
    # Not a view, which could not be changed in place.
    return cut.shard(x, dim, backend.rank).clone(memory_format=torch.contiguous_format)


def _same(x: Tensor, cut: ShardSpec, dim: int, backend: Backend, label: str) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, cut: ShardSpec, dim: int, backend: Backend, label: str) -> Tensor:
    return all_reduce(x, backend, label=label)


_Moves: TypeAlias = Callable[[Tensor, ShardSpec, int, Backend, str], Tensor]
_UNCUT = ShardSpec(0, ())  # for the functions that cut nothing
_FUNCTIONS: Mapping[str, tuple[_Moves, str]] = MappingProxyType(
    {
        "copy_to_ranks": (_same, "reduce_from_ranks"),
        "reduce_from_ranks": (_sum, "copy_to_ranks"),
        "scatter_to_ranks": (_own_shard, "gather_from_ranks"),
        "gather_from_ranks": (all_gather_shards, "scatter_to_ranks"),
        "gather_sequence": (all_gather_shards, "scatter_sum"),
        "scatter_sum": (reduce_scatter_shards, "gather_sequence"),
    }
)


class _BetweenRanks(Function):
    """A row of `_FUNCTIONS`. Backward is the row's conjugate, and can be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, name: str, cut: ShardSpec, dim: int, backend: Backend, label: str
    ) -> Tensor:
        forward, ctx.conjugate = _FUNCTIONS[name]
        ctx.rest = cut, dim, backend, label
        return forward(x, cut, dim, backend, label)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx = _BetweenRanks.apply(dy, ctx.conjugate, *ctx.rest)  # type: ignore[no-untyped-call]
        return dx, None, None, None, None, None
