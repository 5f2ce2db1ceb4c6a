"""Data parallelism in its shortest form: read this first, then `ddp.py`.

Every rank has the whole model and its own part of each batch. If all ranks start with the same
parameters, and average their gradients before each optimizer step, they stay the same: as if one
process had trained on the joined batch. `DDP` computes the same averages, and adds

    overlap with backward: hooks on parameters, gradients averaged in buckets     reducer.py
    memory of the buckets, few large messages in place of many small ones         averaging.py
    `no_sync`, unused parameters, activation checkpointing                        reducer.py
    all-reduce or compressed messages                                             averaging.py
    ranks with fewer batches (`join`)                                             uneven.py
    batches of different sizes (`weighted`)                                       ddp.py
    comparison of models and replicas, steps that are not finite, likely causes   guards.py
    plain names in `state_dict`, checkpoints                                      wrapper.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from phalanx.collectives import ReduceOp, all_reduce_, broadcast_
from phalanx.core.backend import Backend


class NaiveDDP(nn.Module):
    """A module for `loss.backward(); ddp.average_gradients(); optimizer.step()` on every rank."""

    def __init__(self, module: nn.Module, backend: Backend) -> None:
        super().__init__()
        self.module, self.backend = module, backend
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast_(tensor.detach(), backend, root=0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward pass."""
        return self.module(*args, **kwargs)

    def average_gradients(self) -> None:
        """Make every `.grad` the mean over the ranks; one that is None counts as zeros. Blocks."""
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                all_reduce_(parameter.grad, self.backend, ReduceOp.MEAN)
