"""Loss scaling, and norms of gradients, where each rank has a part of the gradients only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.collectives import ReduceOp, all_reduce_
from phalanx.core.backend import Backend


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, for gradients that are shards: ranks skip a step together.

        scaler = phalanx.GradScaler(backend)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)              # only to clip: fsdp.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    With FSDP an infinity may lie in one rank's shard alone, and with a pipeline in one stage's
    gradients; torch's own scaler would skip the step there, and go on with the others. With DDP,
    where averages are the same everywhere, either one does. `backend` has all ranks that step
    together. A pipeline goes back by itself, so what is scaled is what its loss function returns:

        loss = pipeline.train_step(x, y, lambda *given: scaler.scale(criterion(*given)))
        loss /= scaler.get_scale()              # before update()

    `options` are torch's (`init_scale`, `growth_interval`, ...). Costs a message of 4 bytes a step,
    in `unscale_` or `step`, which block; every rank calls them (Micikevicius et al. 2018).
    """

    def __init__(self, backend: Backend, device: str = "cpu", **options: Any) -> None:
        super().__init__(device, **options)
        self._backend = backend
        if self.is_enabled():  # makes the scale on all ranks: a pipeline's last alone scales a loss
            self.scale(torch.zeros((), device=device))

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        anywhere = torch.zeros((), dtype=torch.float32)
        for value in found.values():
            anywhere = torch.maximum(anywhere, value.detach().float().cpu().reshape(()))
        all_reduce_(anywhere, self._backend, ReduceOp.MAX)
        for value in found.values():
            value.fill_(anywhere.item())
        return found or {inv_scale.device: anywhere}  # as where all layers are frozen


# ------------------------------------------------------------------------------
# The norm of gradients of which each rank has a part.


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
    """The norm of one tensor, which may be empty: float64, of no dimensions."""
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
