"""Train a small GPT on text, bytes in and bytes out, on as many ranks as there are.

    python examples/train_language_model.py                     one rank
    phalanx run -n 2 examples/train_language_model.py           two, each with its part of the text
    torchrun --nproc-per-node 2 examples/train_language_model.py       the same

Four lines are different from a script for one process; they are marked with an arrow. With FSDP
(`--strategy full_shard`, say) a rank has a part of the model only, and a fifth line is different:
the norm of gradients that are in shards. What else there is about ranks: each evaluates its share
of the held-out text, all of them write and read checkpoints together, and rank 0 alone talks.

Told to leave (SIGTERM, or SIGUSR1 as of SLURM's --signal=USR1@60), all ranks save at the same step,
and end with exit code 75: started again with --resume they go on as if nothing had been.
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Sequence

import torch
from language_model.agreement import all_can
from language_model.checkpoint import make_extra
from language_model.history import HeldOutPoint
from language_model.model import GPT, Block
from language_model.options import Options
from language_model.progress import TrainingProgress
from language_model.recorder import Recorder
from language_model.setup import ANOTHER, Run, prepare
from language_model.story import conclude, introduce, save_log
from language_model.strategies import (
    DDP,
    Distributed,
    alike,
    is_periodic,
    periodic,
    strategy_of,
)
from language_model.windows import batches
from torch import nn

import phalanx as px

HELD_OUT_WINDOWS = 256  # how many are looked at for one held-out loss
HELD_OUT_BATCH = 32  # how many at a time
WARM_UP = 0.05  # of all steps; after it the learning rate falls to a tenth, along a cosine
INTERRUPTED = 130


def train(
    run: Run, backend: px.Backend, progress: TrainingProgress, notice: px.Notice | None = None
) -> None:
    """Take the steps that are left, or until a `notice` to leave.

    `run` holds the result: the plain model and its history.
    """
    options, history = run.options, run.history
    model = distribute(run.model, options.strategy, backend)
    optimizer = make_optimizer(model)
    if run.checkpoint is not None:
        with all_can(backend, hint=ANOTHER):
            px.load_checkpoint(run.checkpoint, model=model, optimizer=optimizer)
    progress.say(introduce(run, model))

    tokens = options.batch_size * options.context * backend.world_size
    recorder = Recorder(history, backend, tokens_per_step=tokens)
    if not history.held_out:
        progress.evaluated(evaluate(run, model))
    data = batches(run.training, run.sampler)
    for step in range(len(history.steps), options.steps):
        recorder.begin()
        inputs, targets = next(data)  # <- this rank's windows
        rate = set_learning_rate(optimizer, options, step)
        loss = model(inputs, targets)
        optimizer.zero_grad()
        loss.backward()  # <- when it returns, gradients are averaged over all ranks
        px.clip_grad_norm_(model, max_norm=1.0)  # <- with FSDP a rank has parts: the norm of all
        optimizer.step()
        recorder.end(loss, rate)

        done = step + 1
        leaving = notice is not None and notice.given()  # <- on all ranks at the same step
        if done == options.steps and isinstance(model, px.LocalSGD | px.DiLoCo):
            model.sync()  # ranks that have trained by themselves come to one model
        progress.advance()
        log, look, save = (
            done == options.steps or (every > 0 and done % every == 0)
            for every in (options.log_every, options.eval_every, options.checkpoint_every)
        )
        save |= leaving
        if log or look or save:
            recorder.collect()
        if log:
            progress.trained(history.last(options.log_every))
        if look:
            progress.evaluated(evaluate(run, model))
        if save:
            save_all(run, model, optimizer, done)
        if leaving:
            progress.say(f"Told to leave after step {done}: --resume goes on from there.")
            break
    if isinstance(model, px.FSDP):
        model.unwrap()  # `run.model` is a plain one again, whole on every rank


def save_all(run: Run, model: Distributed, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save a checkpoint, of which each rank writes what it has, and the log."""
    extra = make_extra(run.identity, run.history, run.sampler)
    with all_can(model.backend):  # on any number of ranks it loads
        px.save_checkpoint(
            run.options.checkpoints, model=model, optimizer=optimizer, step=step, extra=extra
        )
    if model.backend.rank == 0:
        save_log(run, model.backend)


def distribute(model: GPT, strategy: str, backend: px.Backend) -> Distributed:
    """The model on all ranks, with the values that it has on rank 0."""
    if strategy == DDP:
        return px.DDP(model, backend)  # <- every rank has all of it
    if is_periodic(strategy):
        return periodic(strategy, model, backend)  # <- or all of it, and meets the others at times
    sharding = strategy_of(strategy, backend)
    return px.FSDP(model, backend, strategy=sharding, unit=Block)  # <- or a part of every block


@torch.no_grad()
def evaluate(run: Run, model: Distributed) -> HeldOutPoint:
    """The loss on text that is held out, each rank looking at its share; noted in the history."""
    backend = model.backend
    count = max(min(HELD_OUT_WINDOWS, len(run.held_out)), backend.world_size)
    spread = torch.arange(count) * len(run.held_out) // count
    sampler = px.BatchSampler.evaluation(
        spread, backend, batch_size=HELD_OUT_BATCH * backend.world_size
    )
    losses, windows = [], []
    with alike(model):
        for numbers in sampler:
            losses.append(model(*run.held_out.take(torch.tensor(numbers))).item())
            windows.append(len(numbers))
    loss = px.mean(losses, backend, weights=windows)  # of all windows, each counted once
    point = HeldOutPoint(len(run.history.steps), loss)
    run.history.held_out.append(point)
    return point


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, with weight decay for all but the norms.

    They are told apart by name: a shard has flat pieces of parameters, of one dimension all.
    """
    named = list(model.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for name, p in named if "norm" not in name], "weight_decay": 0.1},
            {"params": [p for name, p in named if "norm" in name], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, options: Options, step: int) -> float:
    """Warm-up, then a cosine down to a tenth of the peak."""
    warm = min(1.0, (step + 1) / (WARM_UP * options.steps))
    cosine = (1 + math.cos(math.pi * step / options.steps)) / 2
    rate = options.learning_rate * warm * (0.1 + 0.9 * cosine)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def run_on(
    backend: px.Backend,
    arguments: Sequence[str] | None = None,
    notice: px.Notice | None = None,
) -> Run:
    """Prepare, train, and say what came of it, unless the ranks leave before the end."""
    run = prepare(arguments, backend)
    done = len(run.history.steps)
    with TrainingProgress(run.options.steps, done=done, visible=backend.rank == 0) as progress:
        train(run, backend, progress, notice)
    if backend.rank == 0 and len(run.history.steps) == run.options.steps:
        progress.say(conclude(run, backend))
    return run


def main() -> int:
    """Run the command line; return the exit code."""
    with px.init() as backend:  # <- this process's place among the ranks
        try:
            with px.Notice(backend, signals=[signal.SIGTERM, signal.SIGUSR1]) as notice:
                run_on(backend, notice=notice)
        except KeyboardInterrupt:
            if backend.rank == 0:
                print(
                    "interrupted: --resume goes on from the last checkpoint, if any",
                    file=sys.stderr,
                )
            return INTERRUPTED
    return notice.exit_code  # 75 after a notice: "start me again"


if __name__ == "__main__":
    sys.exit(main())
