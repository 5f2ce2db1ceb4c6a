"""Where two stages meet, in autograd: what arrives, and what departs, is a node of its own.

    stage 0   x -> layers -> y -> Departure    ~ y ~>    Arrival -> y' -> layers -> ...    stage 1
                             dy <- Departure   <~ dy ~   Arrival <- dy' <- ...

The tensor that a Departure gives holds no data: once y has been sent, its memory is free, unless a
layer has kept it for its backward pass. What an Arrival gives is no leaf, so that a layer may
change it in place, as it might in the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Joint", "arrive", "depart"]


class Joint:
    """The side of the node that autograd does not see: the gradients that go through it."""

    def __init__(self) -> None:
        self.gradients: tuple[Tensor | None, ...] = ()


def arrive(tensors: Sequence[Tensor], joint: Joint) -> list[Tensor]:
    """The same tensors, now with a gradient, which a backward pass leaves in `joint`."""
    if not tensors:
        return []
    start = torch.empty(0, requires_grad=True)  # or there would be nothing to differentiate by
    return list(_Arrival.apply(start, joint, list(tensors)))  # type: ignore[no-untyped-call]


def depart(tensors: Sequence[Tensor], joint: Joint) -> Tensor:
    """A scalar whose `backward()` goes on from these tensors with the gradients in `joint`."""
    scalar: Tensor = _Departure.apply(joint, *tensors)  # type: ignore[no-untyped-call]
    return scalar


class _Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, joint: Joint, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.joint = joint
        return tuple(tensors)  # in a list they are not inputs, and what comes out is no view

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.joint.gradients = gradients
        return None, None, None


class _Departure(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Joint, *tensors: Tensor) -> Tensor:
        ctx.joint = joint
        return torch.zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.joint.gradients = ctx.joint.gradients, ()
        return None, *gradients
