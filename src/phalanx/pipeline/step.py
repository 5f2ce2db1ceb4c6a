"""One step on one rank: the actions of a schedule, carried out one after the other.

For each action the rank receives the stage's input (or the gradients of its output), computes, and
sends the result on. `stage_p2p.py` moves the bytes. Between two stages, autograd has a node on each
side:

    stage 0   x -> layers -> y -> SendBoundary    ~ y ~>    RecvBoundary -> y' -> layers    stage 1
                             dy <- SendBoundary   <~ dy ~   RecvBoundary <- dy' <- ...

The tensor that a SendBoundary returns holds no data: once y has been sent, its memory is free,
unless a layer has kept it for its backward pass. The tensor of a RecvBoundary is no leaf, so that a
layer may change it in place, as it might in the plain model.

If a schedule has W, a backward pass is done in two parts (backward_split.py).

Replicas, pipelines with the same layers, may each have a part of the step's batch (`ReplicaStep`):

    pipeline 0    weight 30    losses x 3 / 42    gradients   \\
    pipeline 1    weight 12    losses x 3 / 42    gradients    mean: those of the joined batch
    pipeline 2    weight  0    no batch           zeros       /
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.core.backend import Backend
from phalanx.core.device import device_kinds
from phalanx.errors import MisuseError
from phalanx.parallel.ddp import DDP
from phalanx.parallel.joined_step import JoinedStep, checked_weight
from phalanx.parallel.uneven import Join, JoinPhase
from phalanx.parallel.wrapper import Wrapper
from phalanx.pipeline.backward_split import WeightPart, backward_input
from phalanx.pipeline.handshake import Begun
from phalanx.pipeline.plan import PipelinePlan
from phalanx.pipeline.schedules import Action, ActionKind
from phalanx.pipeline.stage_p2p import MessageLayout, StageMessage, StageP2P, Tree, unflatten

AHEAD = 2  # actions for which messages are being received while this one computes


class StageBoundary:
    """Those tensors of a message that need a gradient, and the gradients that cross with them.

    places      of these tensors in the message
    connected   whether each was computed with autograd this time
    gradients   one for each that is connected; None if autograd found none
    start       the leaf behind the received ones, for autograd to differentiate by
    """

    def __init__(self, layout: MessageLayout | None = None, sent: Sequence[Tensor] = ()) -> None:
        specs = () if layout is None else layout.specs
        self.places = [place for place, spec in enumerate(specs) if spec.needs_grad]
        self.connected = [sent[place].requires_grad for place in self.places] if sent else []
        self.gradients: Sequence[Tensor | None] = [None] * len(self.places)
        self.start: Tensor | None = None


class _RecvBoundary(torch.autograd.Function):
    """Gives the received tensors a gradient, which a backward pass leaves in the boundary."""

    @staticmethod
    def forward(
        ctx: Any, start: Tensor, boundary: StageBoundary, tensors: list[Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.boundary = boundary
        return tuple(tensors)  # in a list they are no inputs, and outputs are no views

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.boundary.gradients = gradients
        return None, None, None


class _SendBoundary(torch.autograd.Function):
    """A scalar whose `backward()` goes on from sent tensors with the gradients in the boundary."""

    @staticmethod
    def forward(ctx: Any, boundary: StageBoundary, *tensors: Tensor) -> Tensor:
        ctx.boundary = boundary
        return torch.zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.boundary.gradients = ctx.boundary.gradients, ()
        return None, *gradients


# The values kept of a micro-batch in a stage between its passes: the tensor whose `backward()` is
# the backward pass (the loss, or a SendBoundary's scalar); the stage's input, without tensors on
# the first stage; its output, without tensors on the last.
_Activations = tuple[Tensor, StageBoundary, StageBoundary]


@dataclass
class PipelineStep:
    """One step, which `run` runs.

    module    this rank's layers, by name
    inputs    the micro-batches, on the rank of the first stage; else empty
    targets   the same, on the rank of the last stage; else empty
    weights   each micro-batch's share of the batch's samples, or the scale of sums of losses
    train     whether there are backward passes
    splits    whether these are done in two parts
    losses    weighted, of each micro-batch on the last stage's rank
    loss      the mean over the batch, there, after its last forward pass; if it is given, no rank
              is told of another
    busy      seconds in layers and loss, forward and backward
    span      seconds of the whole step
    most_alive   the most micro-batches whose activations were kept at a time
    doing     the action under way, for messages
    """

    plan: PipelinePlan
    module: nn.Module
    p2p: StageP2P
    inputs: list[Tree]
    targets: list[Tree]
    weights: list[float]
    loss_function: Callable[[Tree, Tree], Tensor]
    train: bool
    splits: bool
    losses: list[float] = field(default_factory=list)
    loss: Tensor | None = None
    busy: float = 0.0
    span: float = 0.0
    most_alive: int = 0
    doing: str = ""
    _alive: dict[tuple[int, int], _Activations] = field(default_factory=dict)
    _later: dict[tuple[int, int], list[WeightPart]] = field(default_factory=dict)

    def run(self, actions: Sequence[Action]) -> Tensor:
        """Run the schedule's actions; return the loss. Blocks until all messages have been sent."""
        began = perf_counter()
        rank = self.p2p.backend.rank
        own = [number for number, stage in enumerate(self.plan.stages) if stage.rank == rank]
        passes = [StageMessage(kind, own[c], j) for kind, j, c in actions]
        needed = [message for message in passes if message.kind is not ActionKind.W]
        carry_out = (self._forward, self._backward, self._backward_weights)
        begun = 0
        with torch.set_grad_enabled(self.train):
            for action, message in zip(actions, passes, strict=True):
                self.doing = f"{action} of {self.plan.describe_stage(message.stage)}"
                for soon in needed[begun : begun + 1 + AHEAD]:
                    self._post_recv(soon)
                begun += action.kind is not ActionKind.W
                carry_out[action.kind](message)
            self.doing = "the end of the step"
            self.p2p.wait_sends()
            loss = self.p2p.recv_loss() if self.loss is None else self.loss
        self.span = perf_counter() - began
        return loss

    def _post_recv(self, message: StageMessage) -> None:
        """Begin to receive a pass's input, if it has any, and its layout is known."""
        kind, stage, j = message
        if kind is ActionKind.F:
            is_sent = stage > 0
        else:
            is_sent = (stage, j) in self._alive and bool(self._alive[stage, j][2].places)
        if is_sent:
            self.p2p.post_recv(message)

    def _forward(self, message: StageMessage) -> None:
        _, stage, j = message
        if stage == 0:
            outputs, received = self.inputs[j], StageBoundary()
        else:
            outputs, received = self._recv_inputs(message)
        began = perf_counter()
        for name in self.plan.names_in(stage):
            outputs = getattr(self.module, name)(outputs)
        if stage == len(self.plan.stages) - 1:
            root, sent = self._loss_of(outputs, j), StageBoundary()
            self.busy += perf_counter() - began
        else:
            self.busy += perf_counter() - began
            name = f"the outputs of {self.plan.describe_stage(stage)}"
            layout, leaves = self.p2p.isend(StageMessage(ActionKind.F, stage + 1, j), outputs, name)
            sent = StageBoundary(layout, leaves)
            needing = [leaves[place] for place in sent.places if leaves[place].requires_grad]
            root = _SendBoundary.apply(sent, *needing)  # type: ignore[no-untyped-call]
        if self.train:
            self._alive[stage, j] = root, received, sent
            self.most_alive = max(self.most_alive, len(self._alive) + len(self._later))

    def _recv_inputs(self, message: StageMessage) -> tuple[Tree, StageBoundary]:
        """Return a stage's input, connected to its boundary if a gradient is sent back."""
        layout, leaves = self.p2p.recv(message)
        boundary = StageBoundary(layout)
        if self.train and boundary.places:
            boundary.start = torch.empty(0, requires_grad=True)
            needing = [leaves[place] for place in boundary.places]
            connected = _RecvBoundary.apply(boundary.start, boundary, needing)  # type: ignore[no-untyped-call]
            for place, tensor in zip(boundary.places, connected, strict=True):
                leaves[place] = tensor
        return unflatten(layout.structure, leaves), boundary

    def _loss_of(self, outputs: Tree, j: int) -> Tensor:
        loss = self.loss_function(outputs, self.targets[j])
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            what = what.removeprefix("torch.")
            raise MisuseError(
                f"the loss function has to return one real number, the mean over the samples of a "
                f"micro-batch (the sum, if there is a weight), not {what}"
            )
        if self.train and not loss.requires_grad:
            raise MisuseError(
                "the loss depends on no parameter that is trained: is it computed without "
                "gradients, or is every layer frozen? To compute it only, call evaluate"
            )
        self.losses.append(self.weights[j] * loss.item())
        if self.loss is None and len(self.losses) == len(self.weights):
            self.loss = torch.tensor(sum(self.losses), dtype=loss.dtype)
            self.p2p.isend_loss(self.loss)
        return loss

    def _backward(self, message: StageMessage) -> None:
        _, stage, j = message
        root, received, sent = self._alive.pop((stage, j))
        is_last = stage == len(self.plan.stages) - 1
        if sent.places:
            layout, leaves = self.p2p.recv(message)
            returned = zip(unflatten(layout.structure, leaves), sent.connected, strict=True)
            sent.gradients = [gradient for gradient, connected in returned if connected]
        if is_last or any(gradient is not None for gradient in sent.gradients):
            began = perf_counter()
            gradient = torch.full_like(root, self.weights[j] if is_last else 1.0)
            with without_autocast():
                if self.splits:
                    parts = backward_input(root, gradient, received.start)
                    if parts:
                        self._later[stage, j] = parts
                else:
                    torch.autograd.backward(root, gradient)
            self.busy += perf_counter() - began
        if received.places:
            name = f"the gradients of {self.plan.describe_stage(stage)}"
            message = StageMessage(ActionKind.B, stage - 1, j)
            self.p2p.isend(message, list(received.gradients), name)

    def _backward_weights(self, message: StageMessage) -> None:
        began = perf_counter()
        with without_autocast():
            for part in self._later.pop(message[1:], ()):
                part.run()
        self.busy += perf_counter() - began


@contextmanager
def without_autocast() -> Iterator[None]:
    """Turn autocast off: gradients have forward's dtypes, also if train_step is under autocast."""
    with ExitStack() as stack:
        for kind in device_kinds():
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class ReplicaStep(JoinedStep):
    """One step of this rank of a pipeline, and of its replicas, the ranks with the same layers.

    begin     agrees with the other ranks of the pipeline: `begun`
    scaled    this rank's sum of scaled losses

    FSDP averages in each micro-batch, and a rank without a batch follows the leader. DDP averages
    once, after the last one.
    """

    begun: Begun
    scaled = 0.0

    def __init__(self, pipeline: Wrapper, replicas: Backend, begin: Callable[[], Begun]) -> None:
        super().__init__(pipeline, 0.0, 0)
        self._backend = replicas
        self._begin = begin
        self._meets_in_forward = True  # its stages begin together

    def _checked(self, *_: Any) -> tuple[float, int]:
        self.begun = self._begin()
        weight = checked_weight(self.begun.weight, "train_step() with replicas=")
        return weight, int(weight > 0)

    def begin(self, agreed: Join, weight: float = 0.0, count: int = 0) -> None:
        """Begin, with what the replicas have agreed on."""
        super().begin(agreed, weight, count)
        self.begun = self.begun._replace(scale=self._backend.world_size / self.weight)
        self._in_backward = True  # in all of them
        self._short = self._short if self._in_rounds else []  # else nobody has to be told
        for each in self._all:
            if isinstance(each, DDP):
                each.answer(JoinPhase.FORWARD)  # the leader's buffers

    def _synchronize(self) -> None:
        for each in self._all:
            each.passes.synchronize = each.in_rounds

    def _finish(self) -> None:
        self._done = self._counts[self._backend.rank]
        self._losses = [torch.tensor(self.scaled / self.begun.scale, dtype=torch.float64)]
        super()._finish()

    def _average_rest(self) -> None:
        self._short = []  # all replicas do it by themselves
        for each in self._all:
            if isinstance(each, DDP) and each.passes.owes:
                each.sync_gradients()
            elif isinstance(each, DDP):
                each.answer(JoinPhase.CATCHING_UP)
