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
    gradients = [p.grad.detach() for p in parameters if p.grad is not None and p.grad.numel()]
    infinite = math.isinf(norm_type)
    wide = [g.float() if g.element_size() < 4 else g for g in gradients]
    if wide:
        norms = torch.stack([torch.linalg.vector_norm(g, norm_type).double().cpu() for g in wide])
        total = norms.max() if infinite else norms.pow(norm_type).sum()
    if shards is not None:
        all_reduce_(total, shards, ReduceOp.MAX if infinite else ReduceOp.SUM)
    return total if infinite else total.pow(1 / norm_type)


@torch.no_grad()
def clip_(parameters: Sequence[nn.Parameter], total: Tensor, max_norm: float) -> None:
    """Scale gradients so that their norm, which is `total`, is at most `max_norm`."""
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
