"""The norm of all gradients, of which each rank has a part of some, and the whole of the others."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from phalanx.backends.base import Backend
from phalanx.collectives import ReduceOp
from phalanx.parallel.tensor.layer import ParallelLayer
from phalanx.parallel.tensor.moves import Ranks, all_reduce


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients of a model with parallel layers, in place, so that their norm is bounded.

    max_norm    of all gradients together, as the plain model has them
    norm_type   a number above 0, or `inf` for the largest

    Returns the norm before, float64, the same on every rank. What is cut counts on each rank for
    its part, what is whole counts once. (torch's function of this name would find another norm on
    each rank, and what is whole would drift apart.) Call it when gradients are final: after
    `backward()`, with DDP too. Blocks for a message of one number to those with the other parts.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is a number above 0, or inf, not {norm_type}")
    trained = [parameter for parameter in module.parameters() if parameter.grad is not None]
    owners = _owners(module)
    power = 1.0 if norm_type == math.inf else norm_type
    total: dict[Backend | None, Tensor] = {}
    for parameter in trained:
        assert parameter.grad is not None
        one = torch.linalg.vector_norm(parameter.grad, norm_type, dtype=torch.float64) ** power
        owner = owners.get(parameter)
        total[owner] = _joined(total[owner], one, norm_type) if owner in total else one
    for backend in dict.fromkeys(owners.values()):  # every rank, without gradients too
        part = total.get(backend, torch.zeros((), dtype=torch.float64))
        if backend.world_size > 1:
            op = ReduceOp.MAX if norm_type == math.inf else ReduceOp.SUM
            total[backend] = all_reduce(part, Ranks(backend, "clip_grad_norm_"), op)
    norm = torch.zeros((), dtype=torch.float64)
    for part in total.values():
        norm = _joined(norm.to(part.device), part, norm_type)
    norm = norm ** (1 / power)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch has it
    for parameter in trained:
        assert parameter.grad is not None
        parameter.grad.mul_(factor.to(parameter.grad.device, parameter.grad.dtype))
    return norm


def _joined(a: Tensor, b: Tensor, norm_type: float) -> Tensor:
    return torch.maximum(a, b) if norm_type == math.inf else a + b


def _owners(module: nn.Module) -> dict[nn.Parameter, Backend]:
    """For each parameter that is cut, the ranks that have the other parts."""
    return {
        layer._parameters[name]: layer.backend  # type: ignore[misc]
        for layer in module.modules()
        if isinstance(layer, ParallelLayer)
        for name in layer.splits
        if layer._parameters[name] is not None
    }
