"""What a server has done so far: for its `on_step`, and in the end."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class ServiceRecord:
    """The service as one of its servers sees it. It changes while the service goes on.

    rank        the server's
    numbers     which of the parameters it has, by their places in the list
    params      these, the caller's own tensors: as they are after the last step
    optimizer   theirs; None if it has none
    steps       of the optimizer
    clocks      of the workers that have joined and not left: steps each has done, counted from
                where the slowest was when it joined
    pushes      of every worker that has joined: how many of its steps count here
    dropped     the workers that were lost, and why
    """

    rank: int
    numbers: list[int]
    params: list[Tensor]
    optimizer: torch.optim.Optimizer | None
    steps: int = 0
    clocks: dict[int, int] = field(default_factory=dict)
    pushes: dict[int, int] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
