"""Cross-entropy of logits whose classes lie on different ranks, which are never gathered.

    rank 0   z_0 [n, V_0] -> max, then sum of exp(z_0 - m), z_y if it has y --\
                                                                              3 numbers a row
    rank 1   z_1 [n, V_1] -> max, then sum of exp(z_1 - m), z_y if it has y --/

    loss = log(sum of exp(z - m)) + m - z_y

(Shoeybi et al. 2019, "Megatron-LM", section 3: b x s numbers are sent instead of b x s x V.)
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.collectives import ReduceOp, all_reduce
from phalanx.collectives.request import check_backend
from phalanx.core.backend import Backend
from phalanx.errors import SizeMismatchError, UnsupportedOperationError
from phalanx.tensor.functions import copy_to_ranks, reduce_from_ranks
from phalanx.tensor.layer import check_units
from phalanx.tensor.shards import ShardSpec
from phalanx.torch_internals import disable_dynamo

NAME = "parallel_cross_entropy"
REDUCTIONS = ("mean", "sum", "none")


@disable_dynamo()  # torch.compile runs it as it is
def parallel_cross_entropy(
    logits: Tensor,
    backend: Backend,
    targets: Tensor,
    *,
    num_classes: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropy of `F.cross_entropy` for the joined logits, on every rank.

    logits           [..., V_r]: this rank's classes, as a `ColumnParallelLinear` of V outputs gives
    targets          [...], int64: classes from 0 to V - 1, the same on every rank
    num_classes      V; needed only if it does not divide by the ranks
    ignore_index     rows with this target count for nothing
    reduction        `mean` over the rows that count, `sum`, or `none`: a loss for each row
    label_smoothing  the share of the target that goes to all classes alike

    For weighted classes, multiply the losses that `none` gives by `weight[targets]`. The classes
    are the last dim, not dim 1 as in `F.cross_entropy`: for two dims it is the same. The result is
    float32 (float64 for float64 logits), and the same bits on every rank. Large logits do no harm:
    the largest of all ranks is subtracted before `exp`.

    Blocks for two all_reduces, of n and 2n float32 numbers for n rows (3n with label smoothing),
    for any V. Backward sends nothing (n numbers if it is differentiated again). Raises,
    before anything is sent, `ValueError` for shapes and options that do not fit, `IndexError` for a
    target that is no class; `SizeMismatchError`, on every rank, if the ranks' classes are no even
    cut of V.
    """
    check_backend(backend, f"{NAME}(logits, backend, targets)", targets)
    _check(logits, targets, reduction, label_smoothing)
    rows, flat = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    total = logits.shape[-1] * backend.world_size if num_classes is None else num_classes
    classes = ShardSpec.of(total, backend.world_size)
    counts = flat != ignore_index
    if num_classes is not None:  # else targets are checked once the ranks have compared
        check_units(num_classes, 1, backend.world_size, "num_classes")
        mine = classes.sizes()[backend.rank]
        if mine != logits.shape[-1]:
            raise SizeMismatchError(
                f"rank {backend.rank}: {NAME}: of {num_classes} classes this rank has {mine}, and "
                f"its logits are of shape {list(logits.shape)}",
                rank=backend.rank,
                op=NAME,
            )
        _check_classes(flat, counts, total)
    ((first, _),) = classes.runs[backend.rank]
    shard = _ClassShard(backend, total, first, label_smoothing, known=num_classes is not None)
    losses = cast(Tensor, _CrossEntropy.apply(rows, flat, counts, shard))  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses.view(targets.shape)
    total_loss = losses.sum()
    return total_loss if reduction == "sum" else total_loss / counts.sum()


class _ClassShard(NamedTuple):
    """This rank's part of the classes, and the options of the loss.

    total      V
    first      this rank's first class
    smoothing  the share of the target that goes to all classes alike
    known      V was given; else the ranks have to compare how many classes each has
    """

    backend: Backend
    total: int
    first: int
    smoothing: float
    known: bool


class _CrossEntropy(Function):
    """Losses of rows, from this rank's classes.

    z [n, V_r] logits; y [n] targets; m [n] the largest logit; e its smoothing:

    loss = lse - (1 - e) z_y - e mean(z)        lse = m + log(sum exp(z - m)), sums over all ranks
    dz   = softmax(z) - (1 - e) [class is y] - e / V
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor, counts: Tensor, shard: _ClassShard) -> Tensor:
        wide = z if z.dtype is torch.float64 else z.float()
        m = _largest(wide, shard)
        if not shard.known:
            _check_classes(y, counts, shard.total)
        own, place = _target_places(y, counts, shard, z.shape[1])
        parts = [
            (wide - m.unsqueeze(1)).exp_().sum(1),
            torch.where(own, wide.gather(1, place).squeeze(1), 0),
        ]
        if shard.smoothing:
            parts.append(wide.sum(1))
        exps, z_y, *all_z = _all_reduce(torch.stack(parts), shard.backend).unbind()
        lse = m + exps.log()
        ctx.save_for_backward(z, y, counts, lse)
        ctx.shard = shard
        e = shard.smoothing
        losses = lse - z_y
        if e:
            losses = (1 - e) * losses + e * (lse - all_z[0] / shard.total)
        return torch.where(counts, losses, 0)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        z, y, counts, lse = ctx.saved_tensors
        shard: _ClassShard = ctx.shard
        e = shard.smoothing
        wide = z if z.dtype is torch.float64 else z.float()
        dz = (wide - lse.unsqueeze(1)).exp()
        if torch.is_grad_enabled():  # differentiated again: softmax depends on all ranks' logits
            one = reduce_from_ranks(dz.sum(1), shard.backend, label=NAME)
            dz = dz / copy_to_ranks(one, shard.backend, label=NAME).unsqueeze(1)
            dloss = copy_to_ranks(dloss, shard.backend, label=NAME)
        own, place = _target_places(y, counts, shard, z.shape[1])
        if e:
            dz -= e / shard.total
        dz.scatter_add_(1, place, own.to(dz.dtype).mul_(e - 1).unsqueeze(1))
        # Not by multiplying with zero: losses that do not count may be infinite.
        dz = dz.mul_(dloss.unsqueeze(1)).masked_fill_(~counts.unsqueeze(1), 0)
        return dz.to(z.dtype), None, None, None


def _all_reduce(values: Tensor, backend: Backend, op: ReduceOp = ReduceOp.SUM) -> Tensor:
    return values if backend.world_size == 1 else all_reduce(values, backend, op, label=NAME)


def _largest(z: Tensor, shard: _ClassShard) -> Tensor:
    """Return the largest logit of each row, of all ranks."""
    m = z.amax(1)
    if shard.known:
        return _all_reduce(m, shard.backend, ReduceOp.MAX)
    mine = z.shape[1]
    found = _all_reduce(torch.cat([m, m.new_tensor([mine, -mine])]), shard.backend, ReduceOp.MAX)
    most, least = found[-2:].tolist()
    if most != -least:
        rank = shard.backend.rank
        raise SizeMismatchError(
            f"rank {rank}: {NAME}: the ranks have from {-least:.0f} to {most:.0f} classes each, "
            f"and {mine} here: say how many there are together with num_classes=",
            rank=rank,
            op=NAME,
        )
    return found[:-2]


def _target_places(
    y: Tensor, counts: Tensor, shard: _ClassShard, size: int
) -> tuple[Tensor, Tensor]:
    """Return whether this rank has each row's target, [n], and its place, [n, 1]: 0 if not."""
    own = counts & (y >= shard.first) & (y < shard.first + size)
    return own, torch.where(own, y - shard.first, 0).unsqueeze(1)


def _check(logits: Tensor, targets: Tensor, reduction: str, label_smoothing: float) -> None:
    if not logits.is_floating_point():
        raise UnsupportedOperationError(f"{NAME} of logits of {logits.dtype} has no meaning")
    if targets.is_floating_point() or targets.dtype is torch.bool:
        raise UnsupportedOperationError(
            f"{NAME} takes classes, of int64, as targets, not probabilities ({targets.dtype})"
        )
    if logits.dim() == 0 or logits.shape[:-1] != targets.shape or not logits.shape[-1]:
        raise ValueError(
            f"{NAME}: targets of shape {list(targets.shape)} do not fit to logits of shape "
            f"{list(logits.shape)}: their shape is that of the logits without the last dim, which "
            "is that of this rank's classes, of which there has to be one"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"{NAME}: reduction is one of {', '.join(REDUCTIONS)}, not {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{NAME}: label_smoothing is from 0 to 1, not {label_smoothing}")


def _check_classes(y: Tensor, counts: Tensor, total: int) -> None:
    wrong = counts & ((y < 0) | (y >= total))
    if bool(wrong.any()):
        raise IndexError(
            f"{NAME}: target {int(y[wrong][0])} is no class: there are {total}, from 0"
        )
