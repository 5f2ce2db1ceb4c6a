"""Columns of the table: what a model consists of, in what precision, and its hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from feature import BY_ITSELF, NO_DATA, Feature, Inner, feature
from job import Job
from models import (
    WIDTH,
    Checkpointed,
    Complex,
    Counter,
    Doubles,
    Functional,
    Narrow,
    PartlyUnused,
    Unused,
    Words,
    parametrized,
)
from torch import Tensor, nn
from wrappers import Way

import phalanx

# Dtypes -------------------------------------------------------------------------------------------


@feature("autocast", "precision", tags="dtype rounding")
class Autocast(Feature):
    tolerance = (1e-4, 1e-3)
    rounds = True

    def prepare(self, job: Job) -> None:
        job.dtype = torch.float32

    def passes(self, job: Job, inner: Inner, rows: slice) -> None:
        # Ranks that are threads have one cache, which each of them empties when it leaves.
        cache = not isinstance(job.backend, phalanx.SimulatedBackend)
        with torch.autocast("cpu", torch.bfloat16, enabled=not job.exact, cache_enabled=cache):
            inner(rows)


@feature("mixed_precision", "precision", tags="dtype")
class Mixed(Feature):
    """Computes in float32, and keeps shards in float64."""

    tolerance = (1e-4, 1e-5)

    def lacks(self, way: Way) -> str:
        return "" if way.sharded else "`mixed_precision` is FSDP's"

    def options(self, job: Job, inner: Inner) -> dict[str, Any]:
        mixed = phalanx.MixedPrecision(torch.float32, reduce_dtype=torch.float64)
        return {**inner(), "mixed_precision": mixed}

    def loss(self, job: Job, inner: Inner, out: Tensor, y: Tensor) -> Tensor:
        return inner(out.to(y.dtype), y)  # type: ignore[no-any-return]


@feature("bf16 parameters", "parameters", tags="rounding")
class Bf16(Feature):
    tolerance = (2e-2, 2e-2)
    rounds = True

    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        layers["narrow"] = Narrow().to(torch.float32 if job.exact else torch.bfloat16)


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


@feature("unfreezing", "parameters", tags="frozen")
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
        layers["unused"] = Unused(lambda: job.part != 1 or not torch.is_grad_enabled())


@feature("unused in a group", "parameters", tags="unused parts")
class UnusedInGroup(UnusedOnOne):
    """Unused on the first rank, which has its shard, beside parameters that all use."""

    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        layers["unused"] = PartlyUnused(lambda: job.part != 0 or not torch.is_grad_enabled())


@feature("sparse gradients", "parameters", tags="sparse optimizer", against="dense")
class Sparse(Feature):
    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        # First, for behind another layer rounding would choose other words.
        others = dict(layers)
        layers.clear()
        layers.update(words=Words(), **others)

    def make_optimizers(self, job: Job, inner: Inner, given: list[Any]) -> Any:
        return [torch.optim.SGD(given, lr=job.rate)]


@feature("complex parameters", "parameters", tags="complex", against="compressed scaler")
class ComplexParameters(Feature):
    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        layers["complex"] = Complex()


# Layers ---------------------------------------------------------------------------------------


@feature("SyncBatchNorm", "layers", tags="stateful", against="parts data second twice")
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
        model: nn.Module = inner()
        return model if job.data is None else phalanx.convert_sync_batchnorm(model, job.data)


@feature("buffers", "layers", tags="stateful buffered", against="noted twice bad passes")
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


@feature(
    "register_post_accumulate_grad_hook",
    "hooks",
    against="passes backward unused frozen join bad twice second",
)
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


@feature(
    "optimizers in hooks",
    "hooks",
    tags="optimizer steps",
    against="passes backward parts halfway",
)
class OptimizersInHooks(Feature):
    """Each parameter's optimizer steps in its hook, and its gradient goes at once.

    A pass that fails halfway is no step to be tried again: in one process some have stepped in it.
    With FSDP none has, and LocalSGD refuses a sync inside the next one: they have tests of that.
    """

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
