"""Loss scaling, if each rank has only a part of the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from phalanx.collectives import ReduceOp, all_reduce_
from phalanx.core.backend import Backend
from phalanx.parallel.wrapper import tell
from phalanx.torch_internals import skipped_step


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, for gradients that are shards: ranks skip a step together.

        scaler = phalanx.GradScaler(backend)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)              # only to clip: clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()

    With FSDP an infinity may lie in one rank's shard alone, with a pipeline in one stage's
    gradients: torch's scaler would skip the step there, and nowhere else. With DDP either will do.
    `backend` has all ranks that step together. A pipeline runs backward itself, so scale its loss:

        loss = pipeline.train_step(x, y, lambda *given: scaler.scale(criterion(*given)))
        loss /= scaler.get_scale()              # before update()

    `options` are torch's (`init_scale`, `growth_interval`, ...). Costs a message of 4 bytes a step,
    in `unscale_` or `step`, which block; every rank calls them (Micikevicius et al. 2018). With
    `enabled=False` nothing is scaled or sent. With several optimizers each rank has as many, in one
    order; one whose parameters are all on other ranks, such as that of a head in a pipeline, has
    none: `SGD([{"params": []}], lr=0.1)`.
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
        all_reduce_(anywhere, self._backend, ReduceOp.MAX, label="GradScaler, an optimizer")
        for value in found.values():
            value.fill_(anywhere.item())
        return found or {inv_scale.device: anywhere}  # as if all layers are frozen

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Take the optimizer's step on all ranks, or skip it on all; tell wrappers of a skip."""
        if not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        if hasattr(type(optimizer), "skips_together"):
            optimizer.skips_together = True  # type: ignore[attr-defined]
        result = super().step(optimizer, *args, **kwargs)
        if skipped_step(self, optimizer):
            tell(lambda owner, skipped: owner.after_skip(skipped), optimizer)
        return result
