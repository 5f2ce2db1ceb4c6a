"""Columns of the table: copies, checkpoints, evaluation, loaders, errors, what watches a job."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from multiprocessing.context import BaseContext
from threading import Thread
from typing import Any

import torch
from feature import Feature, Inner, feature
from job import Job
from models import Fails, Steps, data_of
from processes import fork_server
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from typing_extensions import override
from wrappers import Way

import phalanx
from phalanx.torch_internals import copy_hooks

try:  # not in a cell: it takes longer than ranks wait for each other
    import peft  # type: ignore[import-not-found]
except ImportError:
    peft = None

PARTS = "ranks with the same part of a tensor-parallel layer have a checkpoint of their own"
ROWS = 4


def evaluated(job: Job, model: Any) -> Tensor:
    """What a model makes of rows that all ranks have."""
    x, y = data_of(0, 7, ROWS, job.dtype)
    if job.way.pipeline and not job.alone:
        return model.evaluate(x, y, F.mse_loss)  # type: ignore[no-any-return]
    model.eval()
    try:
        out: Tensor = model(x).to(job.dtype)
    finally:
        model.train()
    return F.mse_loss(out, y) if job.way.pipeline else out


# Evaluation and copies ----------------------------------------------------------------------------


@feature("evaluation", "programs", tags="noted")
class Evaluation(Feature):
    """Before each step, in eval mode and without gradients."""

    mode: Any = torch.no_grad

    def step(self, job: Job, inner: Inner) -> None:
        with self.mode():
            job.note("evaluated", evaluated(job, job.call).clone())
        inner()


@feature("inference_mode", "programs", tags="noted")
class InferenceMode(Evaluation):
    mode = torch.inference_mode


@feature("deepcopy", "programs", tags="noted")
class Deepcopy(Feature):
    def step(self, job: Job, inner: Inner) -> None:
        if job.number == 1:
            copy = deepcopy(job.model)
            inner()
            with torch.no_grad():  # of what was before the step
                job.note("the copy", evaluated(job, copy))
        else:
            inner()


@feature("AveragedModel", "programs", tags="average", against="join")
class Averaged(Feature):
    """A moving average of the parameters, by torch.

    When a rank has no more batches, `join` steps for it, and it averages no more.
    """

    def started(self, job: Job, inner: Inner) -> None:
        inner()
        job.kept["average"] = AveragedModel(job.model, avg_fn=lambda old, new, _: 0.5 * (old + new))

    def step(self, job: Job, inner: Inner) -> None:
        job.kept["average"].update_parameters(job.model)
        inner()

    def finish(self, job: Job, inner: Inner) -> None:
        inner()
        job.kept["average"].update_parameters(job.model)
        job.states["average"] = job.whole(job.kept["average"].module)


# Checkpoints --------------------------------------------------------------------------------------


def alone_again(job: Job, seed: int) -> Job:
    """One process with the model that this job has, before it is wrapped."""
    twin = Job(job.way, job.features, job.folder)
    for one in job.features:
        one.prepare(twin)
    twin.begin(seed)
    return twin


@feature("checkpoint", "programs", tags="rebuilds", against="several average hooked-steps")
class Checkpoint(Feature):
    """After the first step it is saved, and another model goes on from there."""

    def save(self, job: Job, **options: Any) -> None:
        place = job.way.saves_with(job)
        (optimizer,) = job.optimizers or [None]
        phalanx.save_checkpoint(
            **place, model=job.model, optimizer=optimizer, step=job.number, **options
        ).wait()

    def load(self, job: Job) -> None:
        (optimizer,) = job.optimizers or [None]
        place = job.way.saves_with(job)
        phalanx.load_checkpoint(**place, model=job.model, optimizer=optimizer)

    def after_step(self, job: Job, inner: Inner) -> None:
        inner()
        if job.number == 0 and not job.alone:
            self.save(job)
            job.begin(11 if not job.way.tensor and not job.way.pipeline else 12)
            self.load(job)


@feature("checkpoint, async", "programs", tags="rebuilds", against="several average hooked-steps")
class AsyncCheckpoint(Checkpoint):
    def save(self, job: Job, **options: Any) -> None:
        super().save(job, async_save=True)


@feature("checkpoint to one process", "programs", tags="saves", against="several hooked-steps")
class CheckpointElsewhere(Checkpoint):
    """In the end it is saved, and one process loads it."""

    def lacks(self, way: Way) -> str:
        return PARTS if way.tensor else ""

    def after_step(self, job: Job, inner: Inner) -> None:
        inner()

    def finish(self, job: Job, inner: Inner) -> None:
        inner()
        if job.alone:
            job.states["loaded"] = job.whole(job.model)
            return
        self.save(job)
        if job.backend is not None and job.backend.rank == 0:
            twin = alone_again(job, 11)
            (optimizer,) = twin.optimizers or [None]
            folder = job.way.saves_with(job)["folder"]
            phalanx.load_checkpoint(folder, model=twin.model, optimizer=optimizer)
            job.states["loaded"] = twin.whole(twin.model)


@feature("checkpoint of one process", "programs", tags="loads", against="several hooked-steps")
class CheckpointOfOne(Feature):
    """One process has saved it before its first step; ranks load it into models of another seed."""

    def lacks(self, way: Way) -> str:
        return PARTS if way.tensor else ""

    def prepare(self, job: Job) -> None:
        job.shift = 11

    def write(self, job: Job) -> None:
        twin = alone_again(job, 0)
        phalanx.save_checkpoint(job.folder / "one", model=twin.model, step=0).wait()

    def load(self, job: Job) -> None:
        assert job.backend is not None
        place = job.way.saves_with(job)
        phalanx.load_checkpoint(job.folder / "one", model=job.model, backend=place["backend"])

    def ready(self, job: Job, inner: Inner) -> None:
        if job.backend is not None and job.number == 0:
            if job.backend.rank == 0:
                self.write(job)
            job.backend.barrier()
            self.load(job)
        inner()


@feature("load_pretrained", "programs", tags="loads", against="complex")
class Pretrained(CheckpointOfOne):
    def lacks(self, way: Way) -> str:
        return ""

    def write(self, job: Job) -> None:
        from safetensors.torch import save_file

        state = alone_again(job, 0).plain.state_dict()
        (job.folder / "one").mkdir(exist_ok=True)
        values = {name: value.contiguous().clone() for name, value in state.items()}
        save_file(values, job.folder / "one" / "model.safetensors")

    def load(self, job: Job) -> None:
        phalanx.load_pretrained(job.folder / "one", job.model, backend=job.backend)


@feature("meta device", "programs", tags="loads", against="complex buffered frozen stateful shared")
class Meta(Pretrained):
    """Built on the meta device, wrapped, and loaded from files."""

    def prepare(self, job: Job) -> None:
        job.shift = 11
        if not job.alone:
            job.device = "meta"

    def options(self, job: Job, inner: Inner) -> dict[str, Any]:
        def initialize(module: nn.Module) -> None:
            with torch.no_grad():
                for parameter in module.parameters(recurse=False):
                    parameter.zero_()  # until it is loaded

        return {**inner(), **({"initialize": initialize} if job.way.sharded else {})}

    def ready(self, job: Job, inner: Inner) -> None:
        if not job.alone and any(p.is_meta for p in job.model.parameters()):
            before = dict(job.model.named_parameters())
            job.model.to_empty(device="cpu")
            for name, parameter in job.model.named_parameters():  # to_empty of torch drops hooks
                copy_hooks(before[name], parameter, keep=lambda _: True)
        super().ready(job, inner)


# Processes and threads ----------------------------------------------------------------------------


@feature("threads", "programs", tags="thread", against="compiled")
class Threads(Feature):
    """Passes run in a thread of their own."""

    free = True

    def passes(self, job: Job, inner: Inner, rows: slice) -> None:
        errors: list[BaseException] = []

        def run() -> None:
            try:
                inner(rows)
            except BaseException as error:
                errors.append(error)

        thread = Thread(target=run)
        thread.start()
        thread.join()
        for error in errors:
            raise error


class Workers(Feature):
    """Batches come from a process of a DataLoader.

    By default a fork, as torch has it; but not where ranks are threads of this process. A fork has
    the locks that other threads hold at that moment, and nobody to release them.
    """

    def context(self, job: Job) -> BaseContext:
        if not isinstance(job.backend, phalanx.SimulatedBackend):
            return multiprocessing.get_context("fork")
        return fork_server()

    @contextmanager
    def training(self, job: Job) -> Iterator[None]:
        """Its process has ended with the last step, or with an error.

        Were it left to the garbage collector, whichever rank's thread that runs in would wait for
        it, 5 s for each process: collected in a cycle, an iterator cannot tell its process to end.
        """
        if job.alone:
            yield
            return
        steps = Steps(job.part, ROWS, job.steps, job.dtype)
        loader: Any = DataLoader(
            steps, batch_size=None, num_workers=1, multiprocessing_context=self.context(job)
        )
        job.kept["loader"], job.kept["loaded"] = iter(loader), []
        try:
            yield
        finally:
            del job.kept["loader"]

    def batch_of(self, job: Job, inner: Inner, part: int) -> Any:
        if job.alone:
            return inner(part)
        loaded = job.kept["loaded"]
        while len(loaded) <= job.number:
            loaded.append(next(job.kept["loader"]))
        return loaded[job.number]


@feature("DataLoader", "programs", tags="loader")
class ByDefault(Workers):
    pass


@feature("DataLoader, spawn", "programs", tags="loader")
class Spawned(Workers):
    slow = True

    @override
    def context(self, job: Job) -> BaseContext:
        if job.backend.rank:  # one that imports torch anew is enough: it takes seconds
            return super().context(job)
        return multiprocessing.get_context("spawn")


# Errors -------------------------------------------------------------------------------------------


class Bad(Feature):
    """An error in forward or backward of a batch."""

    where = "forward"

    def bad(self, job: Job) -> bool:
        """Whether it is raised now."""
        return bool(job.kept.get("bad"))

    def build(self, job: Job, inner: Inner) -> nn.Module:
        model: nn.Module = inner()

        def raises(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if not self.bad(job):
                return None
            if self.where == "forward":
                raise ArithmeticError("a bad batch")
            return (Fails.apply(given[0]),)  # type: ignore[no-untyped-call]

        model.get_submodule("head").register_forward_pre_hook(raises)
        return model


@feature("an error in forward, caught", "errors", tags="bad", against="stateful data")
class BadForward(Bad):
    """On every rank; then comes the same step again."""

    def lacks(self, way: Way) -> str:
        return "an error in a layer ends a pipeline's group" if way.pipeline else ""

    def step(self, job: Job, inner: Inner) -> None:
        if job.number == 1:
            job.kept["bad"] = True
            try:
                inner()
            except ArithmeticError:
                job.kept["bad"] = False
            else:
                raise AssertionError("the error was lost")
        inner()


@feature("an error in backward, caught", "errors", tags="bad halfway", against="stateful data")
class BadBackward(BadForward):
    where = "backward"


class OneFails(Bad):
    """The last rank raises in the second step. It gets its own error, the others one that names it.

    Its program ends there, as that of a rank that raises does.
    """

    fails = True

    def bad(self, job: Job) -> bool:
        if job.backend is None or job.number != 1 or not torch.is_grad_enabled():
            return False
        return job.backend.rank == job.way.ranks - 1


@feature("one rank fails in forward", "errors", tags="bad fails", against="stateful compiled")
class FailsInForward(OneFails):
    pass


@feature("one rank fails in backward", "errors", tags="bad fails", against="stateful compiled")
class FailsInBackward(OneFails):
    where = "backward"


@feature(
    "one rank fails in step", "errors", tags="bad fails", against="stateful compiled steps scaler"
)
class FailsInStep(OneFails):
    where = "step"

    def build(self, job: Job, inner: Inner) -> nn.Module:
        return inner()  # type: ignore[no-any-return]

    def optimizer_step(self, job: Job, inner: Inner, optimizer: Any) -> None:
        if self.bad(job):
            raise ArithmeticError("a bad batch")
        inner(optimizer)


# What watches a job -------------------------------------------------------------------------------


@feature("Notice", "programs", against="data")
class NoticeGiven(Feature):
    """The last rank gets one in the first step; all hear of it at one step."""

    @contextmanager
    def training(self, job: Job) -> Iterator[None]:
        if job.backend is None:
            yield
            return
        with phalanx.Notice(job.backend, signals=(), every=0) as notice:
            job.kept["notice"] = notice
            yield

    def after_step(self, job: Job, inner: Inner) -> None:
        inner()
        if job.backend is None:
            return
        if job.number == 0 and job.backend.rank == job.way.ranks - 1:
            job.kept["notice"].give()
        given = torch.tensor([float(job.kept["notice"].given())])
        everywhere = phalanx.all_reduce(given, job.backend)
        job.check(everywhere.item() in (0, job.way.ranks), "ranks hear of it at different steps")
        job.kept["heard"] = bool(everywhere.item())

    def finish(self, job: Job, inner: Inner) -> None:
        inner()
        job.check(job.alone or job.kept["heard"], "no rank has heard of it")


@feature("tracing", "programs")
class Tracing(Feature):
    """`PHALANX_TRACE`: each rank writes what it does."""

    traced = True

    def finish(self, job: Job, inner: Inner) -> None:
        inner()
        if job.backend is not None:
            found = list((job.folder / "traces").glob(f"rank-{job.backend.rank}-*.json"))
            job.check(bool(found) and "ph" in found[0].read_text(), "there is no trace")


@feature("counters", "programs", against="steps passes once twice data bad")
class CountersRead(Feature):
    """Steps are counted by themselves, and operations."""

    def started(self, job: Job, inner: Inner) -> None:
        inner()
        if job.backend is not None:
            job.backend.counters()  # from now on

    def finish(self, job: Job, inner: Inner) -> None:
        inner()
        if job.backend is None:
            return
        counts = job.backend.counters()
        job.check(bool(counts.operations), "no operation was counted")
        if job.way.kind or job.way.pipeline:
            latest = job.backend.progress.latest
            job.check(latest.number >= 0, "no step was counted")


# Other packages -----------------------------------------------------------------------------------


@feature("LoRA by peft", "layers", tags="frozen lora", against="complex")
class Lora(Feature):
    def lacks(self, way: Way) -> str:
        if peft is None:
            return "peft is not installed"
        if way.tensor:
            return "parallel layers are no nn.Linear"
        return "a peft model is no list of layers" if way.pipeline else ""

    def build(self, job: Job, inner: Inner) -> nn.Module:
        logging.getLogger("peft").setLevel(logging.ERROR)
        options = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
        model: nn.Module = peft.get_peft_model(inner(), options)
        return model.to(job.dtype)
