"""The norm of the gradients of a model that ranks share, and clipping by it.

The model's modules tell the ranks with the other parts (`other_parts`):

    FSDP                        its shard group: each rank has a part of every parameter
    parallel layers             their ranks: each has a part of the parameters that are cut
    Pipeline                    its ranks: each has the parameters of other layers
    DDP, NO_SHARD, LocalSGD     nobody: a rank has whole gradients, with LocalSGD its own

Gradients that have parts in the same groups are added up together, and group by group:

    in               on this rank      over tensor        over data          over stage
    tensor, data     a                 a' = sum of a
    data             b                 a' + b             sum of (a' + b)
    stage            c                                                       sum of c
    none             d                                    and d              and all of these
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.collectives import ReduceOp, all_reduce
from phalanx.core.backend import Backend
from phalanx.errors import MisuseError
from phalanx.parallel.gradient_parts import GradientPart
from phalanx.parallel.wrapper import owner_of

NAME = "clip_grad_norm_"


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of a model, in place, so that their norm is at most `max_norm`.

    model       plain, in any wrappers, with any of its modules in wrappers, cut over ranks, or all
                of these, on any mesh
    max_norm    of all gradients together, as the plain model on the joined batch has them
    norm_type   a number above 0, or `inf` for the largest
    error_if_nonfinite   raise a `RuntimeError`, on every rank, before anything is scaled, if the
                norm is infinite or NaN

    Returns the norm before, float64: the same on all ranks that have the model together. Each
    rank's part of a gradient counts, and each stage's layers; a gradient that is whole on several
    ranks counts once. Every rank calls it, when gradients are final: after `backward()` or
    `train_step()`. Blocks for one message of a few numbers in each group that has parts: FSDP's
    shard groups, the ranks of parallel layers, a pipeline's ranks; in none for DDP, NO_SHARD and
    LocalSGD, with which each rank clips its own model.

    torch's function of this name finds another norm on each rank, and is refused if gradients are
    parts. Raises `TypeError` for parameters in place of the model; `MisuseError` for a stage's
    layers without their pipeline.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{NAME} takes the model, which knows who has which part, not {model!r}")
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type is a number above 0, or inf, not {norm_type}")
    total = _norm_over_ranks(model, norm_type)
    if error_if_nonfinite and not total.isfinite():
        backends = (getattr(module, "backend", None) for module in model.modules())
        rank = next((f"rank {b.rank}: " for b in backends if isinstance(b, Backend)), "")
        raise RuntimeError(f"{rank}{NAME}: the norm of the gradients is {total.item()}")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0).item()  # as torch has it
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    return total


def _norm_over_ranks(model: nn.Module, norm_type: float) -> Tensor:
    largest = norm_type == math.inf
    op, add = (ReduceOp.MAX, torch.maximum) if largest else (ReduceOp.SUM, torch.add)
    parameters = dict.fromkeys(model.parameters())
    owners = [owner for p in parameters if (owner := owner_of(p)) is not None]  # may be around it
    modules: Iterable[Any] = dict.fromkeys([*reversed(list(model.modules())), *owners])
    asked = [module for module in modules if hasattr(type(module), "other_parts")]
    # Last those whose ranks have other modules: the rest of the other groups is alike on them.
    asked.sort(key=lambda module: getattr(module, "spreads", False))
    shared: dict[Backend, set[nn.Parameter]] = {}
    for backend, some in (module.other_parts() for module in asked):
        if backend is not None:
            shared.setdefault(backend, set()).update(some)
    # By the groups with parts; also without gradients here, since the other ranks wait for it.
    zero = torch.zeros((), dtype=torch.float64)
    norms = {groups: [zero] for groups in [(), *zip(shared)]}
    for parameter in parameters:
        groups = tuple(backend for backend, some in shared.items() if parameter in some)
        if not groups and type(parameter.grad) is GradientPart:
            raise MisuseError(f"{NAME}: these are some layers of a pipeline: give it the pipeline")
        here = norms.setdefault(groups, [zero])
        if parameter.grad is not None:
            here.append(_norm_here(parameter.grad, norm_type))
    powers = {}
    for groups, here in norms.items():
        each = torch.stack([norm.cpu() for norm in here])
        powers[groups] = each.amax() if largest else each.pow(norm_type).sum()
    for backend in shared:
        mine = [groups for groups in powers if groups[:1] == (backend,)]
        together = torch.stack([powers[groups] for groups in mine])
        for groups, value in zip(mine, all_reduce(together, backend, op, label=NAME), strict=True):
            powers[groups[1:]] = add(powers.get(groups[1:], zero), value)
    return powers[()] if largest else powers[()] ** (1 / norm_type)


def _norm_here(gradient: Tensor, norm_type: float) -> Tensor:
    """Return the norm of one tensor, which may be empty, or sparse; on its device."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    if not values.numel():
        return values.new_zeros((), dtype=torch.float32)  # torch finds no largest one among none
    wide = values.float() if values.element_size() < 4 else values
    norm: Tensor = torch.linalg.vector_norm(wide, norm_type)
    return norm
