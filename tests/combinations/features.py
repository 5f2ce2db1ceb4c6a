"""The columns of the table: what a program does with a wrapped model. A new feature is one row here.

A feature has methods for the points of the program where it does something else (`job.Job`), on
ranks and in one process alike. `lacks` says why there is nothing to ask of a way to split a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from job import Job
from models import (
    WIDTH,
    Checkpointed,
    Complex,
    Counter,
    Doubles,
    Functional,
    Narrow,
    Unused,
    Words,
    parametrized,
)
from torch import Tensor, nn
from wrappers import Way

Inner = Callable[..., Any]
PIPELINE = "a pipeline calls its layers, and goes back, by itself"
NO_DATA = "no rank has a part of a batch for itself"
BY_ITSELF = "ranks train by themselves between two syncs"


class Feature:
    """What a program does beside the plainest one.

    tolerance   relative and absolute, of what is compared; 1e-9 where arithmetic is exact
    joined      one process computes the joined batch at once, and not part by part
    tags        features with a tag in common do not fit together; nor do those that one is `against`
    slow        takes seconds
    """

    name: str = ""
    section: str = ""
    tolerance: ClassVar[tuple[float, float]] = (1e-9, 1e-10)
    joined: ClassVar[bool] = False
    slow: ClassVar[bool] = False
    tags: frozenset[str] = frozenset()
    against: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name

    def lacks(self, way: Way) -> str:
        """Why there is nothing to ask of this way; "" if there is."""
        return ""

    def prepare(self, job: Job) -> None:
        """Before the model is built."""

    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        """Add layers to the model, or change some."""

    def training(self, job: Job) -> Any:
        """A context around all steps."""
        return nothing()

    def has_batch(self, job: Job, part: int) -> bool:
        """Whether a part has a batch in this step."""
        return True


@contextmanager
def nothing() -> Iterator[None]:
    yield


FEATURES: list[Feature] = []


def feature(name: str, section: str, *, tags: str = "", against: str = "") -> Callable[[Any], Any]:
    """Put a feature into the table; of a class with arguments, call it for each row."""

    def put(kind: Any) -> Any:
        one = kind()
        one.name, one.section = name, section
        one.tags, one.against = frozenset(tags.split()), frozenset(against.split())
        FEATURES.append(one)
        return kind

    return put


def fits(one: Feature, other: Feature) -> bool:
    """Whether a program can do both."""
    if one is other or one.tags & other.tags:
        return False
    return not (one.against & other.tags or other.against & one.tags)


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

    def passes(self, job: Job, inner: Inner, rows: slice) -> None:
        inner(slice(0, 2))
        inner(slice(2, 4))


@feature("state_dict while accumulating", "training", tags="passes")
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


@feature("join", "training", tags="data", against="count")
class JoinFeature(Feature):
    """The last rank has one batch less."""

    def lacks(self, way: Way) -> str:
        if way.pipeline or way.kind != "ddp":
            return "`join` is DDP's"
        return ""

    def has_batch(self, job: Job, part: int) -> bool:
        return part == 0 or job.number < 2

    @contextmanager
    def training(self, job: Job) -> Iterator[None]:
        if job.alone:
            yield
            return
        job.steps -= job.part

        def step() -> None:
            job.through("update", job.update)
            job.through("after_step", lambda: None)
            job.zero_grad()

        with job.model.join(step):
            yield


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


class Scaled(Feature):
    overflows = False

    def started(self, job: Job, inner: Inner) -> None:
        import phalanx

        inner()
        made: Any = torch.amp.GradScaler
        options: dict[str, Any] = {"device": "cpu", "init_scale": 16.0}
        if job.backend is not None:
            made = phalanx.GradScaler
            options["backend"] = job.backend
        job.kept["scaler"] = made(**options)

    def loss(self, job: Job, inner: Inner, out: Tensor, y: Tensor) -> Tensor:
        loss = inner(out, y)
        part = 0 if job.way.local or not job.data else 1
        if job.alone:
            part = 0 if job.way.local or job.way.parts == 1 else 1
        if self.overflows and job.number == 1 and (job.part == part or job.way.local):
            loss = loss * torch.tensor(float("inf"), dtype=loss.dtype)
        return job.kept["scaler"].scale(loss)  # type: ignore[no-any-return]

    def update(self, job: Job, inner: Inner) -> None:
        for optimizer in job.optimizers:
            job.kept["scaler"].unscale_(optimizer)
        inner()
        if job.optimizers:
            job.kept["scaler"].update()
        elif not job.alone:
            job.kept["scaler"].update()

    def optimizer_step(self, job: Job, inner: Inner, optimizer: Any) -> None:
        job.kept["scaler"].step(optimizer)


@feature("GradScaler", "gradients", tags="scaler", against="steps")
class ScaledFinite(Scaled):
    pass


@feature("GradScaler, a step skipped", "gradients", tags="scaler count", against="steps nonfinite")
class ScaledOverflow(Scaled):
    """The gradients of one rank overflow in the second step; no rank takes it."""

    overflows = True

    def finish(self, job: Job, inner: Inner) -> None:
        job.check(job.kept["scaler"].get_scale() == 8.0, "the scale did not go down")
        inner()

    def optimizer_step(self, job: Job, inner: Inner, optimizer: Any) -> None:
        job.kept["scaler"].step(optimizer)
        if job.number == 1:
            job.taken -= 1  # which `update` counts


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
        return inner(out, y) + job.kept.pop("penalty") * job.factor  # type: ignore[no-any-return]


@feature("autograd.grad for parameters", "gradients", tags="second parts", against="unnamed")
class ParameterGradient(Feature):
    """The norm of a rank's own gradient is a part of its loss: a backward of a backward."""

    def lacks(self, way: Way) -> str:
        return PIPELINE if way.pipeline else ""

    def loss(self, job: Job, inner: Inner, out: Tensor, y: Tensor) -> Tensor:
        loss = inner(out, y)
        weights = [p for p in job.model.parameters() if p.requires_grad and p.is_floating_point()]
        found = torch.autograd.grad(loss, weights[-2:], create_graph=True)
        return loss + 0.1 * sum(g.square().sum() for g in found)  # type: ignore[no-any-return]


@feature("backward(create_graph=True)", "gradients", tags="backward")
class CreateGraph(Feature):
    def lacks(self, way: Way) -> str:
        return PIPELINE if way.pipeline else ""

    def backward(self, job: Job, inner: Inner, loss: Tensor, **options: Any) -> None:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inner(loss, create_graph=True)
        for parameter in job.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach()


@feature("backward(retain_graph=True)", "gradients", tags="backward once")
class RetainGraph(Feature):
    """The same loss goes back twice."""

    def lacks(self, way: Way) -> str:
        return PIPELINE if way.pipeline else ""

    def backward(self, job: Job, inner: Inner, loss: Tensor, **options: Any) -> None:
        inner(loss, retain_graph=True)
        inner(loss)


# Dtypes -------------------------------------------------------------------------------------------


@feature("autocast", "precision", tags="dtype rounding")
class Autocast(Feature):
    tolerance = (5e-2, 2e-2)

    def prepare(self, job: Job) -> None:
        job.dtype = torch.float32

    def passes(self, job: Job, inner: Inner, rows: slice) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            inner(rows)


@feature("mixed_precision", "precision", tags="dtype")
class Mixed(Feature):
    """Computes in float32, and keeps shards in float64."""

    tolerance = (1e-4, 1e-5)

    def lacks(self, way: Way) -> str:
        return "" if way.sharded else "`mixed_precision` is FSDP's"

    def options(self, job: Job, inner: Inner) -> dict[str, Any]:
        import phalanx

        mixed = phalanx.MixedPrecision(torch.float32, reduce_dtype=torch.float64)
        return {**inner(), "mixed_precision": mixed}

    def loss(self, job: Job, inner: Inner, out: Tensor, y: Tensor) -> Tensor:
        return inner(out.to(y.dtype), y)  # type: ignore[no-any-return]


@feature("bf16 parameters", "parameters", tags="rounding")
class Bf16(Feature):
    tolerance = (2e-2, 2e-2)

    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        layers["narrow"] = Narrow()


# Parameters -----------------------------------------------------------------------------------


@feature("shared parameters", "parameters", tags="shared")
class Shared(Feature):
    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        layers["tied_a"], layers["tied_b"] = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        layers["tied_b"].weight = layers["tied_a"].weight


@feature("frozen parameters", "parameters", tags="frozen")
class Frozen(Feature):
    def build(self, job: Job, inner: Inner) -> nn.Module:
        model: nn.Module = inner()
        for name, parameter in model.named_parameters():
            if name.startswith("first."):
                parameter.requires_grad_(False)
        return model


@feature("unfreezing", "parameters", tags="frozen", against="unnamed")
class Unfreezing(Frozen):
    """A layer is frozen in the first step, and trained afterwards."""

    def after_step(self, job: Job, inner: Inner) -> None:
        inner()
        if job.number == 0:
            for name, parameter in job.model.named_parameters():
                if name.startswith("first."):
                    parameter.requires_grad_(True)


@feature("unused parameters", "parameters", tags="unused zeros")
class UnusedEverywhere(Feature):
    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        layers["unused"] = Unused(lambda: False)

    def options(self, job: Job, inner: Inner) -> dict[str, Any]:
        more = {"find_unused_parameters": True} if job.way.kind == "ddp" else {}
        return {**inner(), **more}


@feature("unused on one rank", "parameters", tags="unused parts")
class UnusedOnOne(UnusedEverywhere):
    def lacks(self, way: Way) -> str:
        return NO_DATA if way.parts == 1 else ""

    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        layers["unused"] = Unused(lambda: job.part != 1)


@feature("sparse gradients", "parameters", tags="sparse optimizer", against="dense")
class Sparse(Feature):
    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        layers["words"] = Words()

    def make_optimizers(self, job: Job, inner: Inner, given: list[Any]) -> Any:
        return [torch.optim.SGD(given, lr=job.rate)]


@feature("complex parameters", "parameters", tags="complex")
class ComplexParameters(Feature):
    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        layers["complex"] = Complex()


# Layers ---------------------------------------------------------------------------------------


@feature("SyncBatchNorm", "layers", against="parts data")
class SyncBatchNorm(Feature):
    joined = True

    def lacks(self, way: Way) -> str:
        if way.pipeline:
            return "a batch norm in a pipeline sees micro-batches"
        if way.parts == 1:
            return NO_DATA
        return BY_ITSELF if way.local else ""

    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        layers["norm"] = nn.BatchNorm1d(WIDTH)

    def build(self, job: Job, inner: Inner) -> nn.Module:
        import phalanx

        model: nn.Module = inner()
        return model if job.data is None else phalanx.convert_sync_batchnorm(model, job.data)


@feature("buffers", "layers")
class Buffers(Feature):
    """DDP takes rank 0's in each pass; FSDP leaves them alone; LocalSGD takes their mean."""

    def lacks(self, way: Way) -> str:
        return "a buffer in a pipeline sees micro-batches" if way.pipeline else ""

    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        def grows() -> float:
            if job.alone and not job.way.local:  # once, when all parts are through
                return float(job.joined or job.part == job.parts[-1])
            return 1.0 + (job.part if job.way.buffers != "own" else 0)

        layers["counter"] = Counter(grows)


@feature("checkpointing, reentrant", "layers", tags="checkpointing", against="second twice")
class Reentrant(Feature):
    use_reentrant = True

    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        layers["again"] = Checkpointed(nn.Linear(WIDTH, WIDTH), use_reentrant=self.use_reentrant)


@feature("checkpointing", "layers", tags="checkpointing")
class NonReentrant(Reentrant):
    use_reentrant = False


@feature("torch.compile", "layers", tags="compiled")
class Compile(Feature):
    slow = True

    def lacks(self, way: Way) -> str:
        return "a pipeline is not called; compile its layers" if way.pipeline else ""

    def ready(self, job: Job, inner: Inner) -> None:
        inner()
        job.call = torch.compile(job.model, backend="aot_eager")


@feature("Module.compile of a layer", "layers", tags="compiled")
class CompileLayer(Feature):
    slow = True

    def build(self, job: Job, inner: Inner) -> nn.Module:
        model: nn.Module = inner()
        model.get_submodule("first").compile(backend="aot_eager")
        return model


@feature("functional_call", "layers")
class FunctionalCall(Feature):
    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        layers["functional"] = Functional()


@feature("parametrize", "layers")
class Parametrize(Feature):
    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        layers["parametrized"] = parametrized()


# Hooks --------------------------------------------------------------------------------------------


@feature("hooks of modules", "hooks")
class ModuleHooks(Feature):
    def build(self, job: Job, inner: Inner) -> nn.Module:
        model: nn.Module = inner()
        layer = model.get_submodule("second")
        layer.register_forward_pre_hook(lambda _, given: (given[0] + 0.1,))
        layer.register_forward_hook(lambda _, given, out: 1.1 * out)
        layer.register_full_backward_hook(lambda _, gradients, __: (1.2 * gradients[0],))
        return model


@feature("hooks of tensors", "hooks")
class TensorHooks(Feature):
    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        layers["doubles"] = Doubles()


@feature("register_hook before wrapping", "hooks", tags="hooked")
class HooksBefore(Feature):
    """A hook on a parameter doubles its gradient."""

    def build(self, job: Job, inner: Inner) -> nn.Module:
        model: nn.Module = inner()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: 2 * gradient)
        return model


@feature("register_hook after wrapping", "hooks", tags="hooked")
class HooksAfter(Feature):
    def ready(self, job: Job, inner: Inner) -> None:
        inner()
        for parameter in job.model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: 2 * gradient)


@feature("register_post_accumulate_grad_hook", "hooks", against="passes backward unused frozen")
class PostAccumulate(Feature):
    """Called once for each parameter in each step."""

    def ready(self, job: Job, inner: Inner) -> None:
        inner()
        calls = job.kept["calls"] = [0, 0]
        for parameter in job.model.parameters():
            if parameter.requires_grad:
                calls[1] += 1
                parameter.register_post_accumulate_grad_hook(self._counts(calls))

    def _counts(self, calls: list[int]) -> Callable[[Tensor], None]:
        def count(parameter: Tensor) -> None:
            assert parameter.grad is not None
            calls[0] += 1

        return count

    def update(self, job: Job, inner: Inner) -> None:
        calls = job.kept["calls"]
        passes = 2 if job.way.pipeline else 1  # micro-batches
        job.check(
            calls[0] in (calls[1], passes * calls[1]),
            f"hooks were called {calls[0]} times for {calls[1]} parameters",
        )
        calls[0] = 0
        inner()


@feature("optimizers in hooks", "hooks", tags="optimizer steps", against="passes backward parts")
class OptimizersInHooks(Feature):
    """Each parameter's optimizer steps in its hook, and its gradient goes at once."""

    joined = True

    def lacks(self, way: Way) -> str:
        return "a pipeline's micro-batches accumulate" if way.pipeline else ""

    def make_optimizers(self, job: Job, inner: Inner, given: list[Any]) -> Any:
        own = {p: torch.optim.SGD([p], lr=job.rate) for p in given if p.requires_grad}

        def step(parameter: Any) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        for parameter in own:
            parameter.register_post_accumulate_grad_hook(step)
        return []


# Optimizers ---------------------------------------------------------------------------------------


@feature("Adam", "optimizers", tags="optimizer nonlinear", against="steps")
class Adam(Feature):
    def make_optimizers(self, job: Job, inner: Inner, given: list[Any]) -> Any:
        return [torch.optim.Adam(given, lr=0.01, eps=1e-3)] if given else []


@feature("several optimizers", "optimizers", tags="optimizer", against="steps")
class Several(Feature):
    def make_optimizers(self, job: Job, inner: Inner, given: list[Any]) -> Any:
        last = {id(p) for n, p in job.model.named_parameters() if n.startswith("head")}
        halves = [p for p in given if id(p) not in last], [p for p in given if id(p) in last]
        rates = job.rate, 0.5 * job.rate
        return [torch.optim.SGD(h, lr=r) for h, r in zip(halves, rates, strict=True) if h]


@feature("schedulers", "optimizers", against="steps")
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
