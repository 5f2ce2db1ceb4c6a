"""One run: the language-model example, trained in one of the ways that are compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
import xxhash
from language_model.history import History
from language_model.model import GPT
from language_model.options import Options
from language_model.setup import Run as Example
from language_model.text import Text, read_text
from language_model.windows import Windows, batches, make_sampler, split_text
from torch import Tensor, nn
from train_language_model import evaluate, make_optimizer, set_learning_rate

import phalanx as px
from compressed_training.rows import Row
from compressed_training.runs import Run
from phalanx.core.posted import PostedSend

FIRST = 2  # steps in which ranks also agree on the order of buckets
SHAPE = ("layers", "width", "heads", "context")


class Lesson(NamedTuple):
    """What is learned from."""

    text: Text
    training: Windows
    held_out: Windows


class Spoken:
    """Counts the bytes of the messages that a backend is given."""

    def __init__(self, backend: px.Backend) -> None:
        self.nbytes = 0
        self._transport = backend.engine.transport

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in here."""
        transmit = self._transport.send

        def counted(send: PostedSend) -> None:
            self.nbytes += len(send.view)
            transmit(send)

        self._transport.send = counted  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._transport.send


def read_lesson(options: Options) -> Lesson:
    """The example's text, or that of `options.data`, in windows."""
    text = read_text(options.data)
    return Lesson(text, *split_text(text.content, options.context))


def make_model(options: Options) -> GPT:
    """The example's model, with its first values: the same on every rank."""
    torch.manual_seed(options.seed)
    return GPT(**{name: getattr(options, name) for name in SHAPE})


def prepare(options: Options, lesson: Lesson, backend: px.Backend) -> Example:
    """The example, ready to train on a rank of several."""
    sampler = make_sampler(len(lesson.training), options.batch_size, options.seed, backend)
    model = make_model(options)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Example(
        *(options, lesson.text, lesson.training, lesson.held_out, sampler),
        *(model, parameters, History(), None, {}),
    )


def optimizer_of(row: Row, model: nn.Module) -> torch.optim.Optimizer:
    """The example's, with the row's betas."""
    optimizer = make_optimizer(model)
    if row.betas is not None:
        for group in optimizer.param_groups:
            group["betas"] = row.betas
    return optimizer


def step_once(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    example: Example,
    data: Iterator[tuple[Tensor, Tensor]],
    step: int,
    row: Row,
) -> float:
    """One step of training; its loss on this rank."""
    inputs, targets = next(data)
    set_learning_rate(optimizer, example.options, step)
    loss = model(inputs, targets)
    optimizer.zero_grad()
    loss.backward()
    if row.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), row.clip)
    optimizer.step()
    value: float = loss.item()
    return value


def train(
    name: str,
    row: Row,
    options: Options,
    lesson: Lesson,
    backend: px.Backend,
    advanced: Callable[[], None] = lambda: None,
) -> Run:
    """Train on all ranks; the same on each. `advanced` is called after each step."""
    options = replace(options, learning_rate=options.learning_rate * row.rate)
    example = prepare(options, lesson, backend)
    model = row.wrap(example.model, backend)
    optimizer = optimizer_of(row, model)
    data = batches(example.training, example.sampler)
    spoken, counted_before = Spoken(backend), 0
    steps, held_out, sent = [], [], []
    losses: list[float] = []
    seconds: list[float] = []

    def look(step: int) -> None:
        if row.syncs and step == options.steps:
            with spoken.counting():
                model.sync()
        steps.append(step)
        held_out.append(evaluate(example, model).loss)
        sent.append(float(model.bytes_sent))

    look(0)
    for step in range(options.steps):
        if step <= FIRST:
            spoken.nbytes, counted_before = 0, model.bytes_sent
        began = perf_counter()
        with spoken.counting():
            losses.append(step_once(model, optimizer, example, data, step, row))
        seconds.append(perf_counter() - began)
        advanced()
        done = step + 1
        if done == options.steps or (options.eval_every > 0 and done % options.eval_every == 0):
            look(done)

    if options.steps <= FIRST:
        spoken.nbytes, counted_before = 0, model.bytes_sent
    figures = torch.tensor(
        [spoken.nbytes, sent[-1] - counted_before, statistics.median(seconds), *sent, *losses],
        dtype=torch.float64,
    )
    wire, counted, median, *rest = px.all_reduce(figures, backend, px.ReduceOp.MEAN).tolist()
    return Run(
        row=name,
        what=str(row),
        seed=options.seed,
        steps=steps,
        held_out=held_out,
        bytes_sent=rest[: len(sent)],
        training=rest[len(sent) :],
        seconds=median,
        wire=wire,
        counted=counted,
        identical=len(set(px.all_gather_object(digest(example.model), backend))) == 1,
    )


def plain_losses(options: Options, lesson: Lesson, ranks: int, steps: int) -> list[float]:
    """The losses of so many steps of one process that has all ranks' batches as one."""
    joined = replace(options, batch_size=options.batch_size * ranks)
    [alone] = px.SimulatedBackend.create_group(1)
    example = prepare(joined, lesson, alone)
    data = batches(example.training, example.sampler)
    optimizer = make_optimizer(example.model)
    plain = Row(wrap=lambda model, _: model)
    return [
        step_once(example.model, optimizer, example, data, step, plain) for step in range(steps)
    ]


def digest(model: nn.Module) -> str:
    """A hash of all parameters' bits."""
    hashed = xxhash.xxh3_128()
    for parameter in model.parameters():
        hashed.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def settings_of(options: Options, ranks: int) -> dict[str, Any]:
    """What all runs that are compared have in common."""
    names = (*SHAPE, "steps", "batch_size", "learning_rate", "eval_every", "data")
    return {name: getattr(options, name) for name in names} | {"ranks": ranks}
