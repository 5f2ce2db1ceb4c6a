"""A short elastic training in simulated processes, and its oracle: checkpoints, saved and loaded.

What a generation begins with is what a checkpoint of its first step gives on its ranks. So the
oracle trains each generation that a process has seen in a simulation of its own, saves, and loads
the checkpoint with the next one's number of ranks. All is compared bit for bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import phalanx
from phalanx import (
    DDP,
    FSDP,
    Backend,
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
        self.double()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / 8 + number)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += inputs.sum()
        return self.second(torch.tanh(self.first(inputs)))


@dataclass(frozen=True)
class Way:
    """How a training is split, and its optimizer."""

    wrap: Callable[[nn.Module, Backend], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.Adam(
        model.parameters(), lr=0.1
    )
    parts: int = 1  # optimizer's steps in a block


def outer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


WAYS: Mapping[str, Way] = {
    "ddp": Way(DDP),
    "full_shard": Way(FSDP),
    "shard_grad_op": Way(lambda m, b: FSDP(m, b, strategy=ShardingStrategy.SHARD_GRAD_OP)),
    "no_shard": Way(lambda m, b: FSDP(m, b, strategy=ShardingStrategy.NO_SHARD)),
    "top_k": Way(lambda m, b: DDP(m, b, compression=ErrorFeedback(TopK(0.5)))),
    "sharded_optimizer": Way(
        DDP,
        lambda model: ShardedOptimizer(torch.optim.Adam, model, lr=0.1),  # type: ignore[arg-type]
    ),
    "local_sgd": Way(lambda m, b: LocalSGD(m, b, every=2), parts=2),
    "diloco": Way(lambda m, b: DiLoCo(m, b, every=2, outer=outer), parts=2),
}


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    numbers: Sequence[int],
    weight: float,
    parts: int,
) -> None:
    inputs = torch.tensor(numbers, dtype=torch.float64)[:, None] * torch.tensor([0.1, -0.2, 0.3])
    for part in range(parts):
        optimizer.zero_grad()
        loss = (model(inputs.double() + part) - inputs.sum(dim=1, keepdim=True)).square().mean()
        (loss * weight).backward()
        optimizer.step()
    schedule.step()


def all_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return copies of all that a rank has."""
    state = [value for of in optimizer.state.values() for value in of.values()]
    tensors = [*model.parameters(), *model.buffers(), *state]
    return [each.detach().clone() for each in tensors if isinstance(each, Tensor)]


@dataclass
class End:
    """What a process has come to."""

    rank: int
    counted: list[int]
    redone: int
    tensors: list[Tensor]
    epoch: int


@dataclass
class Run:
    """What a simulated training has come to.

    ends          by process: of those that came to the last step
    generations   by number: the first step and the number of ranks
    """

    ends: dict[int, End] = field(default_factory=dict)
    generations: dict[int, tuple[int, int]] = field(default_factory=dict)

    def note(self, job: Elastic) -> None:
        now = job.history[-1]
        self.generations[now.number] = now.first_step, now.world_size


def script(way: Way, size: int, run: Run, **options: Any) -> Callable[[Backend], None]:
    """Return the training; a process that comes after its end leaves nothing in `run`."""

    def train(backend: Backend) -> None:
        job = Elastic(backend, max_ranks=size, **options)
        model = way.wrap(Model(), job.backend)
        optimizer = way.optimizer(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        batches = job.sampler(SAMPLES, batch_size=BATCH, shuffle=False)
        job.keep(model=model, optimizer=optimizer, schedule=schedule)
        counted = []
        for step in job.steps(STEPS):
            run.note(job)
            with step:
                numbers = batches.take()
                take_step(model, optimizer, schedule, numbers, step.weight, way.parts)
            if step.done:
                counted.append(step.number)
        run.note(job)
        assert isinstance(backend, SimulatedBackend)
        assert backend.process is not None
        run.ends[backend.process.number] = End(
            job.backend.rank,
            counted,
            sum(each.redone for each in job.history),
            all_of(model, optimizer),
            batches.epoch,
        )

    def leaves(backend: Backend) -> None:
        with suppress(SystemExit):  # it comes after the end
            train(backend)

    return leaves


@cache
def oracle(name: str, generations: tuple[tuple[int, int], ...]) -> list[list[Tensor]]:
    """Return what all ranks of the last generation have at the end."""
    way = WAYS[name]
    ends = [*(first for first, _ in generations[1:]), STEPS]
    with tempfile.TemporaryDirectory() as folder:

        def train(backend: Backend, first: int, end: int) -> list[Tensor]:
            model = way.wrap(Model(), backend)
            optimizer = way.optimizer(model)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            if phalanx.latest_checkpoint(folder) is not None:
                loaded = phalanx.load_checkpoint(
                    folder, model=model, optimizer=optimizer, backend=backend
                )
                schedule.load_state_dict(loaded.extra)
            for step in range(first, end):
                place = BATCH * step % (BATCH * -(-SAMPLES // BATCH))
                joined = range(place, min(place + BATCH, SAMPLES))
                begin, stop = chunk_ranges(len(joined), backend.world_size)[backend.rank]
                weight = (stop - begin) * backend.world_size / len(joined)
                numbers = joined[begin:stop] or joined[:1]
                take_step(model, optimizer, schedule, numbers, weight, way.parts)
            phalanx.save_checkpoint(
                folder,
                model=model,
                optimizer=optimizer,
                step=end,
                extra=schedule.state_dict(),
                backend=backend,
            )
            return all_of(model, optimizer)

        for (first, size), end in zip(generations, ends, strict=True):
            result: Any = phalanx.simulate(
                lambda backend, first=first, end=end: train(backend, first, end), size
            )
    return list(result)


def check(name: str, run: Run) -> None:
    """Compare what each process has come to with the oracle, bit for bit."""
    generations = tuple(run.generations[number] for number in sorted(run.generations))
    for end in run.ends.values():
        expected = oracle(name, generations)[end.rank]
        assert len(expected) == len(end.tensors)
        for ours, theirs in zip(end.tensors, expected, strict=True):
            assert torch.equal(ours, theirs), (generations, ours, theirs)
        assert end.counted == sorted(set(end.counted))
        assert end.redone == 0
