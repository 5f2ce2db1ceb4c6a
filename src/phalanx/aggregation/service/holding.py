"""The parameters that one server has, and their optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

OptimizerFactory = Callable[[list[Tensor]], torch.optim.Optimizer]


class Holding:
    """One server's parameters: the caller's tensors, changed in place.

    optimizer   made by `make` for exactly these; None where there are none
    """

    def __init__(self, params: list[Tensor], make: OptimizerFactory) -> None:
        self.params = params
        self.optimizer = make(params) if params else None

    def step(self, pushed: Sequence[list[Tensor]]) -> None:
        """One step of the optimizer along the mean of some workers' gradients.

        These are used as memory. Sums are in the order given; of float16 and bfloat16, in float32.
        """
        if self.optimizer is None:
            return
        means = [_mean(gradients) for gradients in zip(*pushed, strict=True)]
        for param, mean in zip(self.params, means, strict=True):
            param.grad = mean.to(param.device)
        self.optimizer.step()
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def copy_to(self, views: Sequence[Tensor]) -> None:
        """Write the parameters into a message."""
        for view, param in zip(views, self.params, strict=True):
            view.copy_(param)


def _mean(gradients: tuple[Tensor, ...]) -> Tensor:
    first, *others = gradients
    if not others:
        return first
    if first.dtype.itemsize <= 2:
        wide = first.float()
        for other in others:
            wide += other
        return (wide / len(gradients)).to(first.dtype)
    for other in others:
        first += other
    return first.div_(len(gradients))
