"""Steps of several ways to train, in turn, and what they took.

A round is some steps of each, one way after the other; so what the machine does besides meets all
alike. A step's time is that of the slower rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import torch
from language_model.options import Options
from language_model.windows import batches
from linked_hosts import bytes_out
from torch import nn

import phalanx as px
from compressed_training.rows import Row
from compressed_training.training import Lesson, digest, optimizer_of, prepare, step_once

ALONE = "no communication"
PROBE = 4 << 20  # bytes by which the link is measured


class Course:
    """A model that is trained in one way; it goes on where it was."""

    def __init__(self, row: Row, options: Options, lesson: Lesson, backend: px.Backend) -> None:
        self._row = row
        self._example = prepare(options, lesson, backend)
        self._model = row.wrap(self._example.model, backend)
        self._optimizer = optimizer_of(row, self._model)
        self._data = batches(self._example.training, self._example.sampler)
        self._step = 0

    def go(self, steps: int) -> float:
        """Train so many steps; the last one's loss on this rank."""
        loss = 0.0
        for _ in range(steps):
            loss = step_once(
                *(self._model, self._optimizer, self._example, self._data, self._step, self._row)
            )
            self._step += 1
        return loss

    def end(self) -> None:
        """Training is over."""
        if self._row.syncs:
            self._model.sync()

    def digest(self) -> str:
        """A hash of the parameters' bits."""
        return digest(self._example.model)


@dataclass(frozen=True)
class Timed:
    """What one way to train took.

    seconds   of a step in each round, on the slower rank
    busy      seconds of a step in which a rank computed, on the one that did so longer; median
    nbytes    that left a host in a step, headers and all; median
    begun     the hash of all parameters after the first steps, on each rank
    ended     at the end
    loss      of the last step, mean over the ranks
    """

    seconds: list[float]
    busy: float
    nbytes: float
    begun: list[str]
    ended: list[str]
    loss: float


def time_all(
    table: Mapping[str, Row],
    options: Options,
    lesson: Lesson,
    backend: px.Backend,
    *,
    rounds: int,
    steps: int,
    first: int,
    advanced: Callable[[], None] = lambda: None,
    bytes_out: Callable[[], int] = bytes_out,
) -> dict[str, Timed]:
    """Time all of them; the same on every rank. `first` steps of each are not timed."""
    courses = {name: Course(row, options, lesson, backend) for name, row in table.items()}
    begun = {}
    for name, course in courses.items():
        course.go(first)
        begun[name] = from_all(course.digest(), backend)
    figures: dict[str, list[list[float]]] = {name: [] for name in courses}
    losses = {}
    for _ in range(rounds):
        for name, course in courses.items():
            backend.barrier()
            before = [perf_counter(), process_time(), bytes_out()]
            losses[name] = course.go(steps)
            after = [perf_counter(), process_time(), bytes_out()]
            mine = torch.tensor([after, before], dtype=torch.float64)
            taken = px.all_reduce((mine[0] - mine[1]) / steps, backend, px.ReduceOp.MAX)
            figures[name].append(taken.tolist())
            advanced()
    for course in courses.values():
        course.end()
    return {
        name: Timed(
            seconds=[seconds for seconds, _, _ in figures[name]],
            busy=statistics.median(busy for _, busy, _ in figures[name]),
            nbytes=statistics.median(nbytes for _, _, nbytes in figures[name]),
            begun=begun[name],
            ended=from_all(course.digest(), backend),
            loss=px.all_reduce(torch.tensor(losses[name]), backend, px.ReduceOp.MEAN).item(),
        )
        for name, course in courses.items()
    }


def from_all(word: str, backend: px.Backend) -> list[str]:
    """What each rank says."""
    return [str(one) for one in px.all_gather_object(word, backend)]


def in_one_process(row: Row, options: Options, lesson: Lesson, ranks: int, steps: int) -> list[str]:
    """The hash of each rank's parameters after so many steps on simulated ranks."""

    def run(backend: px.Backend) -> str:
        course = Course(row, options, lesson, backend)
        course.go(steps)
        return course.digest()

    return list(px.simulate(run, ranks))


def link_speed(backend: px.Backend, nbytes: int = PROBE) -> float:
    """Megabits a second of payload, one way, while as much goes the other way."""
    mine, theirs = torch.zeros(2, nbytes, dtype=torch.uint8)
    peer = 1 - backend.rank
    backend.barrier()
    began = perf_counter()
    px.sendrecv(mine, backend, peer, theirs, peer)
    return 8e-6 * nbytes / (perf_counter() - began)


def times_faster(plain: Sequence[float], other: Sequence[float]) -> float:
    """How many times less time a step takes than a plain one: the median of the rounds' ratios."""
    return statistics.median(ours / theirs for ours, theirs in zip(plain, other, strict=True))


def alone(model: nn.Module, _: px.Backend) -> Any:
    """Trains by itself, and sends nothing."""
    return model
