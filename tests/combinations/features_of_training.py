"""Columns of the table: passes, batches, gradients and optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from feature import PIPELINE, Feature, Inner, feature
from job import STEPS, Job
from models import Overflows
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from wrappers import Way

import phalanx
from phalanx.compression import ErrorFeedback, Half, RandomK

NO_STEP = "`step` and `join` are of what averages gradients in backward passes"

# Nothing else -----------------------------------------------------------------------------------


@feature("plain", "training")
class Plain(Feature):
    pass


# Passes and batches -----------------------------------------------------------------------------


@feature("no_sync", "training", tags="passes")
class NoSync(Feature):
    """Two backward passes of half a batch each, of which the first only accumulates."""

    def passes(self, job: Job, inner: Inner, rows: slice) -> None:
        with job.no_sync():
            inner(slice(0, 2))
        inner(slice(2, 4))


@feature("two passes", "training", tags="passes", against="once")
class TwoPasses(Feature):
    """Two backward passes that are both averaged, and add up."""

    def prepare(self, job: Job) -> None:
        job.averages *= 2

    def passes(self, job: Job, inner: Inner, rows: slice) -> None:
        inner(slice(0, 2))
        inner(slice(2, 4))


@feature("state_dict while accumulating", "training", tags="passes gathers")
class StateWhileAccumulating(Feature):
    def passes(self, job: Job, inner: Inner, rows: slice) -> None:
        with job.no_sync():
            inner(slice(0, 2))
        job.model.state_dict()
        job.whole(job.model)
        inner(slice(2, 4))


@feature("zero_grad(set_to_none=False)", "training", against="zeros")
class ZeroGrad(Feature):
    def zero_grad(self, job: Job, inner: Inner) -> None:
        inner(set_to_none=False)


# A rank that waits takes part in passes, and not in what collects FSDP's whole state.
@feature(
    "join", "training", tags="data join", against="count noted rebuilds saves buffered gathers"
)
class JoinFeature(Feature):
    """The last rank has one batch less."""

    def lacks(self, way: Way) -> str:
        return NO_STEP if way.pipeline or not way.averages else ""

    def has_batch(self, job: Job, part: int) -> bool:
        return job.number < self.batches_of(job, part)

    def batches_of(self, job: Job, part: int) -> int:
        return STEPS - (part > 0 and part == job.way.parts - 1)

    @contextmanager
    def training(self, job: Job) -> Iterator[None]:
        if job.alone:
            yield
            return
        job.steps -= STEPS - self.batches_of(job, job.part)
        passes = count(1)

        def step() -> None:
            if next(passes) % job.averages:  # the others go on with this step
                return
            job.through("update", job.update)
            job.through("after_step", lambda: None)
            job.zero_grad()

        with job.model.join(step):
            yield


@feature("step", "training", tags="passes parts", against="once count noted halfway")
class Step(Feature):
    """Ranks have batches of different sizes; the first one has two micro-batches, others one."""

    def lacks(self, way: Way) -> str:
        return NO_STEP if way.pipeline or not way.averages else ""

    def batch_of(self, job: Job, inner: Inner, part: int) -> tuple[Tensor, Tensor]:
        x, y = inner(part)
        return x[: 4 - part], y[: 4 - part]

    def passes(self, job: Job, inner: Inner, rows: slice) -> None:
        if job.alone:
            inner(rows)
            return
        micro_batches = [slice(0, 1), slice(1, 4)] if job.part == 0 else [rows]
        with job.model.step(4 - job.part, micro_batches=len(micro_batches)) as job.under_way:
            for some in micro_batches:
                inner(some)
        job.under_way = None


@feature("weighted", "training", tags="data parts")
class Weighted(Feature):
    """Ranks have batches of different sizes."""

    def lacks(self, way: Way) -> str:
        if way.pipeline or way.kind != "ddp":
            return "`weighted` is DDP's"
        return ""

    def batch_of(self, job: Job, inner: Inner, part: int) -> tuple[Tensor, Tensor]:
        x, y = inner(part)
        return x[: 4 - part], y[: 4 - part]

    def loss(self, job: Job, inner: Inner, out: Tensor, y: Tensor) -> Tensor:
        loss = inner(out, y)
        return loss if job.alone else job.model.weighted(loss, len(y))  # type: ignore[no-any-return]


# Gradients ----------------------------------------------------------------------------------------


@feature("GradScaler", "gradients", tags="scaler", against="steps")
class Scaled(Feature):
    def started(self, job: Job, inner: Inner) -> None:
        inner()
        options: dict[str, Any] = {"device": "cpu", "init_scale": 16.0}
        if job.backend is None:
            job.kept["scaler"] = torch.amp.GradScaler(**options)
        else:
            job.kept["scaler"] = phalanx.GradScaler(job.backend, **options)

    def loss(self, job: Job, inner: Inner, out: Tensor, y: Tensor) -> Tensor:
        return job.kept["scaler"].scale(inner(out, y))  # type: ignore[no-any-return]

    def update(self, job: Job, inner: Inner) -> None:
        for optimizer in job.optimizers:
            job.kept["scaler"].unscale_(optimizer)
        inner()
        scale = job.kept["scaler"].get_scale()
        job.kept["scaler"].update()
        factor = job.kept["scaler"].get_scale() / scale
        for part in job.model.modules():  # what is left over of gradients has that scale
            if factor != 1 and isinstance(getattr(part, "compression", None), ErrorFeedback):
                part.compression.scale_(factor)

    def optimizer_step(self, job: Job, inner: Inner, optimizer: Any) -> None:
        job.kept["scaler"].step(optimizer)


@feature("GradScaler, a step skipped", "gradients", tags="scaler count", against="steps lora")
class ScaledOverflow(Scaled):
    """One element of one gradient overflows on one rank in the second step; no rank takes it.

    Of several optimizers the others step. LoRA freezes that parameter.
    """

    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        def now() -> bool:
            return job.number == 1 and (
                job.way.local or job.part == job.way.parts - 1 or job.joined
            )

        layers["overflows"] = Overflows(now)

    def update(self, job: Job, inner: Inner) -> None:
        super().update(job, inner)
        if job.number == 1 and len(job.optimizers) == 1:
            job.taken -= 1

    def finish(self, job: Job, inner: Inner) -> None:
        job.check(job.kept["scaler"].get_scale() == 8.0, "the scale did not go down")
        inner()


@feature("clip_grad_norm_", "gradients", tags="nonlinear", against="steps")
class Clip(Feature):
    def update(self, job: Job, inner: Inner) -> None:
        norm = job.clip(0.3)
        if not job.way.local:
            job.note("norm", norm.double())
        inner()


@feature("clip_grad_value_", "gradients", tags="nonlinear", against="steps")
class ClipValue(Feature):
    def update(self, job: Job, inner: Inner) -> None:
        nn.utils.clip_grad_value_(list(job.model.parameters()), 0.05)
        inner()


@feature("autograd.grad for the input", "gradients", tags="twice")
class InputGradient(Feature):
    """An adversarial example: the gradient for the input moves it; then comes the loss."""

    def lacks(self, way: Way) -> str:
        return PIPELINE if way.pipeline else ""

    def forward(self, job: Job, inner: Inner, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(inner(x).sum(), x)
        return inner(x.detach() + 0.1 * gradient)  # type: ignore[no-any-return]


@feature("gradient penalty", "gradients", tags="second")
class Penalty(Feature):
    def lacks(self, way: Way) -> str:
        return PIPELINE if way.pipeline else ""

    def forward(self, job: Job, inner: Inner, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = inner(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        job.kept["penalty"] = gradient.square().sum(1).mean()
        return out  # type: ignore[no-any-return]

    def loss(self, job: Job, inner: Inner, out: Tensor, y: Tensor) -> Tensor:
        # As small as lets training converge: rounding grows with what grows without bound.
        penalty: Tensor = 0.1 * job.kept.pop("penalty")
        return inner(out, y) + penalty * job.factor  # type: ignore[no-any-return]


@feature("autograd.grad for parameters", "gradients", tags="second parts", against="lora")
class ParameterGradient(Feature):
    """The norm of a rank's own gradient is a part of its loss: a backward of a backward."""

    def lacks(self, way: Way) -> str:
        return PIPELINE if way.pipeline else ""

    def loss(self, job: Job, inner: Inner, out: Tensor, y: Tensor) -> Tensor:
        loss = inner(out, y)
        weights = [p for p in job.model.parameters() if p.requires_grad and p.is_floating_point()]
        found = torch.autograd.grad(loss, weights[-2:], create_graph=True)
        return loss + 0.1 * sum(g.square().sum() for g in found)  # type: ignore[no-any-return]


class KeepsGraph(Feature):
    """Goes back through a graph that is kept.

    A compiled graph may then have no memory that the backward pass takes over ("donated buffers"),
    as torch's words say. Whether it has some depends on all of it, and ranks have other graphs.
    """

    def training(self, job: Job) -> Any:
        return functorch_config.patch(donated_buffer=False)


@feature("backward(create_graph=True)", "gradients", tags="backward")
class CreateGraph(KeepsGraph):
    def lacks(self, way: Way) -> str:
        return PIPELINE if way.pipeline else ""

    def backward(self, job: Job, inner: Inner, loss: Tensor, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inner(loss, create_graph=True)
        for parameter in job.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach()


@feature("backward(retain_graph=True)", "gradients", tags="backward once")
class RetainGraph(KeepsGraph):
    """The same loss goes back twice."""

    def prepare(self, job: Job) -> None:
        job.averages *= 2

    def lacks(self, way: Way) -> str:
        return PIPELINE if way.pipeline else ""

    def backward(self, job: Job, inner: Inner, loss: Tensor, **options: Any) -> None:
        inner(loss, retain_graph=True)
        inner(loss)


# Optimizers ---------------------------------------------------------------------------------------


@feature("Adam", "optimizers", tags="optimizer nonlinear", against="steps")
class Adam(Feature):
    """With a large eps: of a gradient that is zero but for rounding it makes no whole step."""

    def make_optimizers(self, job: Job, inner: Inner, given: list[Any]) -> Any:
        return [torch.optim.Adam(given, lr=0.1, eps=0.1)] if given else []


@feature("ShardedOptimizer", "optimizers", tags="optimizer nonlinear", against="steps")
class Sharded(Feature):
    """Each rank steps on its share of the parameters: on whole ones, but for what layers cut."""

    def lacks(self, way: Way) -> str:
        return "" if way.averages and not way.pipeline else "it is for a DDP or an FSDP"

    def make_optimizers(self, job: Job, inner: Inner, given: list[Any]) -> Any:
        if job.alone or not given:
            return [torch.optim.Adam(given, lr=0.1, eps=0.1)] if given else []
        adam, model = torch.optim.Adam, job.model
        return [phalanx.ShardedOptimizer(adam, model, groups=given, lr=0.1, eps=0.1)]


@feature("several optimizers", "optimizers", tags="optimizer several", against="steps")
class Several(Feature):
    def make_optimizers(self, job: Job, inner: Inner, given: list[Any]) -> Any:
        last = {id(p) for n, p in job.model.named_parameters() if n.startswith("head")}
        halves = [p for p in given if id(p) not in last], [p for p in given if id(p) in last]
        # All ranks of a pipeline have both, as scalers ask; on some one has no parameters.
        every = [half for half in halves if half or job.way.pipeline]
        return [
            torch.optim.SGD([{"params": half}], lr=job.rate * 0.5**number)
            for number, half in enumerate(every)
        ]


@feature("schedulers", "optimizers", tags="scheduled", against="steps")
class Schedulers(Feature):
    def started(self, job: Job, inner: Inner) -> None:
        inner()
        job.kept["schedulers"] = [
            torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in job.optimizers
        ]

    def update(self, job: Job, inner: Inner) -> None:
        inner()
        for scheduler in job.kept["schedulers"]:
            scheduler.step()


# Compressors --------------------------------------------------------------------------------------


class Compressed(Feature):
    """All that was left out is sent in the end. With a small rate the sum of gradients is known:
    what the gradients change by while some are left over is the square of it.

    rests   steps without gradients, in which what error feedback has left over is sent
    """

    of_change = 0.03
    made: Any = None
    rests = 8

    def lacks(self, way: Way) -> str:
        return "" if way.kind else "it averages nothing"

    def flushes(self, job: Job) -> int:
        """Steps after those of training; DiLoCo's outer steps are after every second one."""
        return 2 * self.rests if job.way.name == "DiLoCo" else self.rests

    def prepare(self, job: Job) -> None:
        job.steps += self.flushes(job)
        job.rate, job.outer_momentum = 5e-4, False

    def options(self, job: Job, inner: Inner) -> dict[str, Any]:
        return {**inner(), "compression": phalanx.ErrorFeedback(self.made())}

    def make_optimizers(self, job: Job, inner: Inner, given: list[Any]) -> Any:
        return [torch.optim.SGD(given, lr=job.rate)] if given else []

    def step(self, job: Job, inner: Inner) -> None:
        job.factor = float(job.number < STEPS)
        inner()


def compressor(name: str, made: Any, **more: Any) -> None:
    tags, against = "compressed optimizer data", "nonlinear rounding noted scheduled"
    kind = type("Row", (Compressed,), {"made": staticmethod(made), **more})
    feature(name, "compression", tags=tags, against=against)(kind)


compressor("TopK", lambda: phalanx.TopK(0.5))
# Half of the values are drawn in half of the steps only: 8 steps may well leave one out of 250.
compressor("RandomK", lambda: RandomK(0.75), rests=24)
compressor("PowerSGD", lambda: phalanx.PowerSGD(4))
compressor("Quantized", lambda: phalanx.Quantized(bits=8))
compressor("Half", Half)
