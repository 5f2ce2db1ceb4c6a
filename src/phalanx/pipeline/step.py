"""One step on one rank: it carries out the actions of a schedule, one after the other.

For each it takes what has come, computes, and gives on what is to go. `wires.py` moves bytes,
`joints.py` tells autograd where they came from; this file knows the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.errors import MisuseError
from phalanx.pipeline.agreement import digest_of
from phalanx.pipeline.plan import Plan
from phalanx.pipeline.schedules import Action, Kind
from phalanx.pipeline.stage_p2p import Layout, Parcel, Tree, Wires, needing_grad, rebuild

AHEAD = 2  # actions for which messages are being received while this one computes


class Batch(NamedTuple):
    """A step's micro-batches.

    inputs    on the rank of the first stage; else empty
    targets   on the rank of the last stage; else empty
    weights   the share of the batch's samples that each has
    """

    inputs: list[Tree]
    targets: list[Tree]
    weights: list[float]


@dataclass
class _Alive:
    """What is kept of a micro-batch between its forward and its backward pass."""

    root: Tensor  # whose `backward()` is the backward pass: the loss, or a departure
    arrival: Joint
    arrived: Layout
    departure: Joint
    departed: list[int]  # numbers of the tensors for which gradients come back
    connected: list[bool]  # whether such a tensor has a gradient this time


@dataclass
class Step:
    """One step: `run` does it.

    module    this rank's layers, by name
    train     whether there are backward passes
    loss      the mean over the batch, on the last stage's rank, after its last forward pass
    busy      seconds in layers and loss, forward and backward
    most_alive   the most micro-batches whose activations were kept at a time
    doing     the action under way, for messages
    """

    plan: Plan
    module: nn.Module
    wires: Wires
    batch: Batch
    loss_function: Callable[[Tree, Tree], Tensor]
    rank: int
    num_ranks: int
    train: bool
    loss: Tensor | None = None
    busy: float = 0.0
    most_alive: int = 0
    doing: str = ""
    _losses: list[float] = field(default_factory=list)
    _alive: dict[tuple[int, int], _Alive] = field(default_factory=dict)

    def run(self, actions: Sequence[Action]) -> Tensor:
        """Carry them out; the loss of the step. Blocks until what goes on has been sent."""
        with torch.set_grad_enabled(self.train):
            for number, action in enumerate(actions):
                stage = self._stage_of(action)
                self.doing = f"{action} of {self.plan.words_for(stage)}"
                for coming in actions[number : number + 1 + AHEAD]:
                    self._expect(coming)
                if action.kind is Kind.F:
                    self._forward(stage, action.micro_batch)
                else:  # where train_step is under autocast, gradients have the dtypes of forward
                    with torch.autocast("cpu", enabled=False):
                        self._backward(stage, action.micro_batch)
            self.doing = "the end of the step"
            self.wires.finish()
            return self.wires.hear() if self.loss is None else self.loss

    def _stage_of(self, action: Action) -> int:
        return action.chunk * self.num_ranks + self.rank

    def _is_last(self, stage: int) -> bool:
        return stage == len(self.plan.stages) - 1

    def _expect(self, action: Action) -> None:
        """Begin to receive what an action needs, if anything, and if it is known what it is."""
        stage = self._stage_of(action)
        if action.kind is Kind.F:
            wanted = stage > 0
        else:
            alive = self._alive.get((stage, action.micro_batch))
            wanted = alive is not None and not self._is_last(stage) and bool(alive.departed)
        if wanted:
            self.wires.expect(Parcel(action.kind, stage, action.micro_batch))

    def _forward(self, stage: int, j: int) -> None:
        arrival, arrived = Joint(), Layout(None, ())
        if stage == 0:
            inputs = self.batch.inputs[j]
        else:
            arrived, leaves = self.wires.take(Parcel(Kind.F, stage, j))
            inputs = rebuild(arrived.structure, self._with_gradients(arrived, leaves, arrival))
            del leaves
        began = perf_counter()
        outputs = inputs
        del inputs  # or it would live as long as what follows
        for name in self.plan.names_in(stage):
            outputs = getattr(self.module, name)(outputs)
        if self._is_last(stage):
            root = self._loss_of(outputs, j)
            departure, departed, connected = Joint(), [], []
            self.busy += perf_counter() - began
        else:
            self.busy += perf_counter() - began
            name = f"the outputs of {self.plan.words_for(stage)}"
            layout, leaves = self.wires.give(Parcel(Kind.F, stage + 1, j), outputs, name)
            departure, departed = Joint(), needing_grad(layout.specs)
            connected = [leaves[number].requires_grad for number in departed]
            leaving = [leaves[number] for number in departed if leaves[number].requires_grad]
            root = depart(leaving, departure)
        if self.train:
            alive = _Alive(root, arrival, arrived, departure, departed, connected)
            self._alive[stage, j] = alive
            self.most_alive = max(self.most_alive, len(self._alive))

    def _with_gradients(self, layout: Layout, leaves: list[Tensor], joint: Joint) -> list[Tensor]:
        """What has come, connected to the joint where a gradient goes back."""
        if not self.train:
            return leaves
        numbers = needing_grad(layout.specs)
        arrived = arrive([leaves[number] for number in numbers], joint)
        for number, tensor in zip(numbers, arrived, strict=True):
            leaves[number] = tensor
        return leaves

    def _loss_of(self, outputs: Tree, j: int) -> Tensor:
        loss = self.loss_function(outputs, self.batch.targets[j])
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            what = what.removeprefix("torch.")
            raise MisuseError(
                f"the loss function has to return one real number, the mean over the samples of a "
                f"micro-batch, not {what}"
            )
        if self.train and not loss.requires_grad:
            raise MisuseError(
                "the loss depends on no parameter that is trained: is it computed without "
                "gradients, or is every layer frozen? To compute it only, call evaluate"
            )
        self._losses.append(self.batch.weights[j] * loss.item())
        if len(self._losses) == len(self.batch.weights):
            self.loss = torch.tensor(sum(self._losses), dtype=loss.dtype)
            self.wires.announce(self.loss)
        return loss

    def _backward(self, stage: int, j: int) -> None:
        alive = self._alive.pop((stage, j))
        if self._is_last(stage):
            began = perf_counter()
            torch.autograd.backward(alive.root, torch.full_like(alive.root, self.batch.weights[j]))
            self.busy += perf_counter() - began
        elif alive.departed:
            gradients = self._returned(alive, Parcel(Kind.B, stage, j))
            alive.departure.gradients = gradients
            if any(gradient is not None for gradient in gradients):
                began = perf_counter()
                torch.autograd.backward(alive.root)
                self.busy += perf_counter() - began
        numbers = needing_grad(alive.arrived.specs)
        if numbers:
            back = list(alive.arrival.gradients) or [None] * len(numbers)
            name = f"the gradients of {self.plan.words_for(stage)}"
            self.wires.give(Parcel(Kind.B, stage - 1, j), back, name)

    def _returned(self, alive: _Alive, parcel: Parcel) -> tuple[Tensor | None, ...]:
        """The gradients that have come back, of those tensors that have one this time."""
        layout, leaves = self.wires.take(parcel)
        gradients = rebuild(layout.structure, leaves)
        return tuple(
            gradient for gradient, wanted in zip(gradients, alive.connected, strict=True) if wanted
        )


# ------------------------------------------------------------------------------
# Where two stages meet, in autograd: what arrives, and what departs, is a node of its own.
#
#     stage 0   x -> layers -> y -> Departure    ~ y ~>    Arrival -> y' -> layers -> ...    stage 1
#                              dy <- Departure   <~ dy ~   Arrival <- dy' <- ...
#
# The tensor that a Departure gives holds no data: once y has been sent, its memory is free, unless
# a layer has kept it for its backward pass. What an Arrival gives is no leaf, so that a layer may
# change it in place, as it might in the whole model.


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


# ------------------------------------------------------------------------------
# What the shapes and dtypes of a step's messages may depend on, besides the number of samples.


def circumstances(module: nn.Module, inputs: Tree) -> int:
    """A hash of what this rank contributes; where it differs, shapes are told anew.

    Which parts are in training mode, which parameters are frozen, default dtype, autocast; and of
    the inputs, all but the number of samples.
    """
    layout, _ = Layout.of(inputs, "inputs")
    return digest_of(
        [part.training for part in module.modules()],
        [parameter.requires_grad for parameter in module.parameters()],
        str(torch.get_default_dtype()),
        str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else "",
        repr(layout.structure),
        [(spec.dtype, spec.shape[1:], spec.needs_grad) for spec in layout.specs],
    )
