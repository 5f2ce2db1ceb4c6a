"""The bubble: the share of a step in which ranks wait, measured, beside the theory."""

from __future__ import annotations

import torch
from msgspec import Struct

from phalanx.backends.base import Backend
from phalanx.collectives import all_gather

__all__ = ["PipelineBubble", "measure_bubble"]


class PipelineBubble(Struct, frozen=True):
    """The share of the ranks' time in which they did not compute.

    measured   of the last train_step
    theory     of its schedule, (p-1) / (v m + p-1), with stages that take equally long, and
               messages that take no time
    """

    measured: float
    theory: float

    def __str__(self) -> str:
        return f"bubble {self.measured:.1%}, in theory {self.theory:.1%}"


def measure_bubble(busy: float, span: float, theory: float, backend: Backend) -> PipelineBubble:
    """From the seconds that each rank computed, and was in the step: 1 - sum(busy) / (p * span).

    The ranks begin a step together, and rank 0 ends it: the longest span is the step's.
    """
    rows = all_gather(torch.tensor([[busy, span]], dtype=torch.float64), backend)
    measured = 1 - rows[:, 0].sum() / (backend.world_size * rows[:, 1].max())
    return PipelineBubble(float(measured), theory)
