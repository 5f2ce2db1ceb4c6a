"""Train a small GPT on text, bytes in and bytes out, on as many ranks as there are.

    python examples/train_language_model.py                     one rank
    phalanx run -n 2 examples/train_language_model.py           two, each with its part of the text
    torchrun --nproc-per-node 2 examples/train_language_model.py       the same

Four lines are different from a script for one process; they are marked with an arrow. What else
there is about ranks: each evaluates its share of the held-out text, and rank 0 alone talks and
writes files.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from language_model.history import HeldOutPoint
from language_model.options import Options
from language_model.progress import TrainingProgress
from language_model.recorder import Recorder
from language_model.setup import Run, prepare
from language_model.story import conclude, introduce, save_files
from torch import nn

import phalanx as px

HELD_OUT_WINDOWS = 256  # how many are looked at for one held-out loss
WARM_UP = 0.05  # of all steps; after it the learning rate falls to a tenth, along a cosine
INTERRUPTED = 130


def train(run: Run, backend: px.Backend, progress: TrainingProgress) -> None:
    """Take the steps that are left. `run` holds the result: the model and its history."""
    options, history = run.options, run.history
    model = px.DDP(run.model, backend)  # <- every rank has the model of rank 0
    tokens = options.batch_size * options.context * backend.world_size
    recorder = Recorder(history, backend, tokens_per_step=tokens)
    if not history.held_out:
        progress.evaluated(evaluate(run, backend))
    for step in range(len(history.steps), options.steps):
        recorder.begin()
        inputs, targets = run.training.take(run.sampler.numbers(step))  # <- this rank's windows
        rate = set_learning_rate(run.optimizer, options, step)
        loss = model(inputs, targets)
        run.optimizer.zero_grad()
        loss.backward()  # <- when it returns, gradients are averaged over all ranks
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        run.optimizer.step()
        recorder.end(loss, rate)

        done = step + 1
        progress.advance()
        log, look, save = (
            done == options.steps or (every > 0 and done % every == 0)
            for every in (options.log_every, options.eval_every, options.checkpoint_every)
        )
        if log or look or save:
            recorder.collect()
        if log:
            progress.trained(history.last(options.log_every))
        if look:
            progress.evaluated(evaluate(run, backend))
        if save and backend.rank == 0:
            save_files(run, backend)


@torch.no_grad()
def evaluate(run: Run, backend: px.Backend) -> HeldOutPoint:
    """The loss on text that is held out, each rank looking at its share; noted in the history."""
    count = min(HELD_OUT_WINDOWS, len(run.held_out))
    spread = torch.arange(count) * len(run.held_out) // count
    mine = spread[backend.rank :: backend.world_size]
    total = torch.zeros(2, dtype=torch.float64)
    for numbers in torch.split(mine, 32):
        loss = run.model(*run.held_out.take(numbers))
        total += torch.tensor([loss.item() * len(numbers), len(numbers)])
    px.all_reduce_(total, backend)
    point = HeldOutPoint(len(run.history.steps), (total[0] / total[1]).item())
    run.history.held_out.append(point)
    return point


def set_learning_rate(optimizer: torch.optim.Optimizer, options: Options, step: int) -> float:
    """Warm-up, then a cosine down to a tenth of the peak."""
    warm = min(1.0, (step + 1) / (WARM_UP * options.steps))
    cosine = (1 + math.cos(math.pi * step / options.steps)) / 2
    rate = options.learning_rate * warm * (0.1 + 0.9 * cosine)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def run_on(backend: px.Backend, arguments: Sequence[str] | None = None) -> Run:
    """Prepare, train, and say what came of it."""
    run = prepare(arguments, backend)
    done = len(run.history.steps)
    with TrainingProgress(run.options.steps, done=done, visible=backend.rank == 0) as progress:
        progress.say(introduce(run, backend))
        train(run, backend, progress)
    if backend.rank == 0:
        progress.say(conclude(run, backend))
    return run


def main() -> int:
    """Run the command line; return the exit code."""
    with px.init() as backend:  # <- this process's place among the ranks
        try:
            run_on(backend)
        except KeyboardInterrupt:
            if backend.rank == 0:
                print(
                    "interrupted: --resume goes on from the last checkpoint, if any",
                    file=sys.stderr,
                )
            return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
