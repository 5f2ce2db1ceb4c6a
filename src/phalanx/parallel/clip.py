"""The norm of gradients whose parts are on several ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phalanx.backends.base import Backend
from phalanx.collectives import ReduceOp, all_reduce_


def norm_of(parameters: Sequence[nn.Parameter], shards: Backend | None, norm_type: float) -> Tensor:
    """The norm of all gradients together; the same on every rank. One message of 8 bytes.

    A float64 tensor of no dimensions. `shards` are the ranks that have the other parts.
    """
    total = torch.zeros((), dtype=torch.float64)
    gradients = [p.grad for p in parameters if p.grad is not None]
    infinite = math.isinf(norm_type)
    if gradients:
        norms = torch.stack([norm_here(gradient, norm_type) for gradient in gradients])
        total = norms.max() if infinite else norms.pow(norm_type).sum()
    if shards is not None:
        all_reduce_(total, shards, ReduceOp.MAX if infinite else ReduceOp.SUM)
    return total if infinite else total.pow(1 / norm_type)


def norm_here(gradient: Tensor, norm_type: float) -> Tensor:
    """The norm of one tensor, maybe an empty one: float64, of no dimensions."""
    if not gradient.numel():
        return torch.zeros((), dtype=torch.float64)  # torch finds no largest one among none
    wide = gradient.float() if gradient.element_size() < 4 else gradient
    norm: Tensor = torch.linalg.vector_norm(wide.detach(), norm_type)
    return norm.double().cpu()


@torch.no_grad()
def clip_(parameters: Sequence[nn.Parameter], total: Tensor, max_norm: float) -> None:
    """Scale gradients so that their norm, which is `total`, is at most `max_norm`."""
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch has it
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
