"""A short elastic training in simulated processes, and its oracle: checkpoints, saved and loaded.

What a generation begins with is what a checkpoint of its first step gives on its ranks. So the
oracle trains each generation that a process has seen in a simulation of its own, saves, and loads
the checkpoint with the next one's number of ranks. All is compared bit for bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import phalanx
from phalanx import (
    DDP,
    FSDP,
    Backend,
    BatchSampler,
    DiLoCo,
    Elastic,
    ErrorFeedback,
    LocalSGD,
    ShardedOptimizer,
    ShardingStrategy,
    SimulatedBackend,
    TopK,
)
from phalanx.collectives import chunk_ranges

STEPS, SAMPLES, BATCH = 4, 14, 4


class Model(nn.Module):
    """Sizes that do not divide, and a buffer that the forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 1)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        filled(self)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += inputs.sum()
        return self.second(torch.tanh(self.first(inputs)))


def filled(module: nn.Module) -> nn.Module:
    """Give a module the same values everywhere."""
    module.double()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / 8 + number)
    return module


# ------------------------------------------------------------------------------
# Ways to train


@dataclass(frozen=True)
class Share:
    """A rank's part of a joined batch.

    step   the number of the step
    """

    inputs: Tensor
    weight: float
    step: int

    @property
    def targets(self) -> Tensor:
        return self.inputs.sum(dim=1, keepdim=True)


@dataclass(frozen=True)
class Training:
    """What a rank trains, and how it takes a step. `others` are kept, too."""

    step: Callable[[Share], object]
    modules: Mapping[str, nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kept(self) -> dict[str, Any]:
        several = {f"optimizer{at}": each for at, each in enumerate(self.optimizers)}
        return {**self.modules, **several, **self.others}

    @property
    def model(self) -> nn.Module:
        """All modules as one."""
        modules = dict(self.modules)
        return modules.popitem()[1] if len(modules) == 1 else nn.ModuleDict(modules)

    def tensors(self) -> list[Tensor]:
        """Return copies of all that this rank has."""
        state = [
            value
            for optimizer in self.optimizers
            for of in optimizer.state.values()
            for value in (of.values() if isinstance(of, dict) else [torch.tensor(of)])
        ]
        tensors = [*self.model.parameters(), *self.model.buffers(), *state]
        return [each.detach().clone() for each in tensors if isinstance(each, Tensor)]


@dataclass(frozen=True, eq=False)
class Way:
    """How a rank trains on a backend, and on which batches."""

    make: Callable[[Backend], Training]
    batches: Mapping[str, Any] = field(default_factory=lambda: {"shuffle": False})
    samples: int = SAMPLES


def loss_of(model: nn.Module, share: Share, at: int = 0) -> Tensor:
    return (model(share.inputs + at) - share.targets).square().mean()


def wrapped(
    wrap: Callable[[nn.Module, Backend], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.Adam(
        model.parameters(), lr=0.1
    ),
    parts: int = 1,
) -> Way:
    """Return the plainest way, with so many optimizer's steps in a block."""

    def make(backend: Backend) -> Training:
        model = wrap(Model(), backend)
        its = optimizer(model)
        schedule = torch.optim.lr_scheduler.StepLR(its, 2, gamma=0.5)

        def step(share: Share) -> None:
            for part in range(parts):
                its.zero_grad()
                (loss_of(model, share, part) * share.weight).backward()
                its.step()
            schedule.step()

        return Training(step, {"model": model}, [its], {"schedule": schedule})

    return Way(make)


def outer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


WAYS: Mapping[str, Way] = {
    "ddp": wrapped(DDP),
    "full_shard": wrapped(FSDP),
    "shard_grad_op": wrapped(lambda m, b: FSDP(m, b, strategy=ShardingStrategy.SHARD_GRAD_OP)),
    "no_shard": wrapped(lambda m, b: FSDP(m, b, strategy=ShardingStrategy.NO_SHARD)),
    "top_k": wrapped(lambda m, b: DDP(m, b, compression=ErrorFeedback(TopK(0.5)))),
    "sharded_optimizer": wrapped(
        DDP,
        lambda model: ShardedOptimizer(torch.optim.Adam, model, lr=0.1),  # type: ignore[arg-type]
    ),
    "local_sgd": wrapped(lambda m, b: LocalSGD(m, b, every=2), parts=2),
    "diloco": wrapped(lambda m, b: DiLoCo(m, b, every=2, outer=outer), parts=2),
}


# ------------------------------------------------------------------------------
# The training


@dataclass
class End:
    """What a process has come to, by its `rank` at the end."""

    rank: int
    counted: list[int]
    redone: int
    tensors: list[Tensor]
    epoch: int
    job: Elastic


@dataclass
class Run:
    """What a simulated training has come to.

    ends          by process: of those that came to the last step
    left          by process: the exit codes of the others
    generations   by number: the first step and the number of ranks
    """

    ends: dict[int, End] = field(default_factory=dict)
    left: dict[int, object] = field(default_factory=dict)
    generations: dict[int, tuple[int, int]] = field(default_factory=dict)

    def note(self, job: Elastic) -> None:
        """Note the generations that a process has been in; some have no step."""
        for each in job.history:
            self.generations[each.number] = each.first_step, each.world_size


def number_of(backend: Backend) -> int:
    assert isinstance(backend, SimulatedBackend)
    assert backend.process is not None
    return backend.process.number


def script(
    way: Way,
    size: int,
    run: Run,
    *,
    steps: int = STEPS,
    after: Callable[[Elastic, int], object] = lambda job, process: None,
    **options: Any,
) -> Callable[[Backend], None]:
    """Return the training of at most `size` ranks.

    after   is called with the job and the process in each step's block, behind all else
    """

    def train(backend: Backend) -> None:
        process, job = number_of(backend), Elastic(backend, max_ranks=size, **options)
        training = way.make(job.backend)
        batches = job.sampler(way.samples, batch_size=BATCH, **way.batches)
        job.keep(**training.kept)
        counted = []
        for step in job.steps(steps):
            run.note(job)
            with step:
                numbers = batches.take()
                training.step(Share(inputs_of(numbers), step.weight, step.number))
                after(job, process)
            if step.done:
                counted.append(step.number)
        run.note(job)
        redone, rank = sum(each.redone for each in job.history), job.backend.rank
        run.ends[process] = End(rank, counted, redone, training.tensors(), batches.epoch, job)

    def leaves(backend: Backend) -> None:
        try:
            train(backend)
        except SystemExit as error:
            run.left[number_of(backend)] = error.code

    return leaves


def inputs_of(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None] * torch.tensor([0.1, -0.2, 0.3])


# ------------------------------------------------------------------------------
# The oracle


def joined_batches(samples: int, **options: Any) -> Iterator[list[int]]:
    """Yield the batches of one process that trains alone, epoch after epoch."""
    sampler = BatchSampler(samples, SimulatedBackend.create_group(1)[0], **options)
    while True:
        yield from sampler


class Oracle:
    """One rank's training in generation after generation, each of which loads and saves.

    folder   has a folder for each step at which a generation begins, and that for each optimizer
    """

    def __init__(self, way: Way, folder: Path, backend: Backend) -> None:
        self._training, self._folder, self._backend = way.make(backend), folder, backend
        self._batches = joined_batches(way.samples, batch_size=BATCH, **way.batches)

    def load(self, step: int) -> None:
        training = self._training
        for at, optimizer in enumerate(training.optimizers):
            loaded = phalanx.load_checkpoint(
                self._folder / str(step) / str(at),
                model=training.model,
                optimizer=optimizer,
                backend=self._backend,
            )
            for name, each in training.others.items() if at == 0 else ():
                each.load_state_dict(loaded.extra[name])

    def save(self, step: int) -> None:
        training = self._training
        for at, optimizer in enumerate(training.optimizers):
            phalanx.save_checkpoint(
                self._folder / str(step) / str(at),
                model=training.model,
                optimizer=optimizer,
                step=step,
                extra={name: each.state_dict() for name, each in training.others.items()},
                backend=self._backend,
            )

    def train(self, first: int, end: int, saved: Sequence[int]) -> list[Tensor]:
        """Take these steps, and save before each step of `saved`, and at the end."""
        rank, size = self._backend.rank, self._backend.world_size
        for step in range(end):
            joined = next(self._batches)
            if step < first:
                continue
            if step > first and step in saved:
                self.save(step)
            begin, stop = chunk_ranges(len(joined), size)[rank]
            weight = (stop - begin) * size / len(joined)
            inputs = inputs_of(joined[begin:stop] or joined[:1])
            self._training.step(Share(inputs, weight, step))
        self.save(end)
        return self._training.tensors()


@cache
def oracle(
    way: Way, generations: tuple[tuple[int, int], ...], steps: int = STEPS
) -> list[list[Tensor]]:
    """Return what all ranks of the last generation have at the end."""
    firsts = [first for first, _ in generations]
    with tempfile.TemporaryDirectory() as folder:

        def train(backend: Backend, number: int) -> list[Tensor]:
            its = Oracle(way, Path(folder), backend)
            first, end = firsts[number], [*firsts[1:], steps][number]
            if number:
                its.load(first)
            return its.train(first, end, firsts)

        result: Any = None
        for number, (_, size) in enumerate(generations):
            result = phalanx.simulate(lambda backend, at=number: train(backend, at), size)
    return list(result)


def check(way: Way, run: Run, *, redone: bool = False, steps: int = STEPS) -> None:
    """Compare what each process has come to with the oracle, bit for bit."""
    generations = tuple(run.generations[number] for number in sorted(run.generations))
    for end in run.ends.values():
        expected = oracle(way, generations, steps)[end.rank]
        assert len(expected) == len(end.tensors)
        for ours, theirs in zip(end.tensors, expected, strict=True):
            assert torch.equal(ours, theirs), (generations, ours, theirs)
        assert redone or end.counted == sorted(set(end.counted))
        assert redone or end.redone == 0


def train(
    way: Way,
    size: int,
    crashes: Mapping[int, int] | None = None,
    arrivals: Sequence[int] = (),
    seed: int = 0,
    *,
    most: int = 0,
    redone: bool = False,
    **options: Any,
) -> tuple[Run, list[int]]:
    """Train; each process that comes to the last step has the oracle's state.

    most   ranks; by default all processes
    """
    run, steps = Run(), options.get("steps", STEPS)
    function = script(way, most or size + len(arrivals), run, **options)
    turns = phalanx.simulate(function, size, seed, crashes=crashes, arrivals=arrivals).turns
    check(way, run, redone=redone, steps=steps)
    return run, turns
