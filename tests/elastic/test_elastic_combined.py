"""What users combine with `Elastic`, while ranks crash: all comes to the oracle's end.

The oracle is training that saves a checkpoint where a generation begins, and loads it there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_script import (
    STEPS,
    WAYS,
    Model,
    Run,
    Share,
    Training,
    Way,
    filled,
    loss_of,
    number_of,
    script,
    train,
    wrapped,
)
from forms import LONG
from torch import Tensor, nn

import phalanx
from phalanx import DDP, FSDP, Backend, Elastic, ShardingStrategy
from phalanx.collectives import ReduceOp, all_reduce_, all_reduce_coalesced_

Optimizer = torch.optim.Optimizer


def with_adam(
    model: nn.Module, step: Callable[[nn.Module, Optimizer, Share], object], **others: Any
) -> Training:
    """Return a training of one model by one optimizer, the gradients of which are 0 before."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def clean(share: Share) -> None:
        optimizer.zero_grad()
        step(model, optimizer, share)

    return Training(clean, {"model": model}, [optimizer], others)


def stepped(model: nn.Module, optimizer: Optimizer, share: Share, at: int = 0) -> None:
    (loss_of(model, share, at) * share.weight).backward()
    optimizer.step()


# ------------------------------------------------------------------------------
# Modules


def with_average(backend: Backend) -> Training:
    """The moving average of the parameters is a second module."""
    model = DDP(Model(), backend)
    average = torch.optim.swa_utils.AveragedModel(
        model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    plain = with_adam(model, stepped)

    def step(share: Share) -> None:
        plain.step(share)
        average.update_parameters(model.module)

    return Training(step, {"model": model, "average": average}, plain.optimizers)


class Normed(nn.Module):
    """Batch normalization, of this rank's part or of all; its running means are buffers."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 5), norm, nn.Linear(5, 1)
        filled(self)

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) == 1:  # of which there is no variance
            inputs = torch.cat([inputs, inputs / 2])
            return self.second(self.norm(self.first(inputs)))[:1]
        return self.second(self.norm(self.first(inputs)))


def batch_norm(backend: Backend) -> Training:
    return with_adam(DDP(Normed(nn.BatchNorm1d(5)), backend), stepped)


def sync_batch_norm(backend: Backend) -> Training:
    return with_adam(DDP(Normed(phalanx.SyncBatchNorm(5, backend)), backend), stepped)


class Tied(Model):
    """The two layers have one bias, and a frozen factor."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(5, 5).double()
        self.third.weight = nn.Parameter(torch.eye(5, dtype=torch.float64), requires_grad=False)
        self.third.bias = self.first.bias

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.tanh(self.third(self.first(inputs))))


def tied(wrap: Callable[[nn.Module, Backend], nn.Module], backend: Backend) -> Training:
    return with_adam(wrap(Tied(), backend), stepped)


class Branches(Model):
    """A layer that only every other step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(1, 1).double()
        filled(self)
        self.step = 0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return self.odd(outputs) if self.step % 2 else outputs


def branches(backend: Backend) -> Training:
    module = Branches()

    def step(model: nn.Module, optimizer: Optimizer, share: Share) -> None:
        module.step = share.step
        stepped(model, optimizer, share)

    return with_adam(DDP(module, backend, find_unused_parameters=True), step)


def plain_module(backend: Backend) -> Training:
    """No wrapper: the script averages the gradients itself."""

    def step(model: nn.Module, optimizer: Optimizer, share: Share) -> None:
        (loss_of(model, share) * share.weight).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        all_reduce_coalesced_(gradients, backend, ReduceOp.MEAN)
        all_reduce_(model.seen, backend, ReduceOp.MEAN)
        optimizer.step()

    return with_adam(Model(), step)


# ------------------------------------------------------------------------------
# Steps


def two_optimizers(backend: Backend) -> Training:
    """As a GAN: collectives follow an optimizer's step, so ranks may be between two versions."""
    models = [DDP(Model(), backend), DDP(Model(), backend)]
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in models]

    def step(share: Share) -> None:
        for model, other, optimizer in zip(models, reversed(models), optimizers, strict=True):
            optimizer.zero_grad()
            with torch.no_grad():
                theirs = other.module.second(torch.tanh(other.module.first(share.inputs)))
            ((model(share.inputs) - theirs).square().mean() * share.weight).backward()
            optimizer.step()

    return Training(step, {"first": models[0], "second": models[1]}, optimizers)


def scaled(wrap: Callable[[nn.Module, Backend], nn.Module], backend: Backend) -> Training:
    """Losses are scaled, and step 1 is skipped, as one rank's gradients are infinite."""
    scaler = phalanx.GradScaler(backend, init_scale=4.0, growth_interval=1)

    def step(model: nn.Module, optimizer: Optimizer, share: Share) -> None:
        infinite = share.step == 1 and backend.rank == backend.world_size - 1
        loss = loss_of(model, share) * share.weight * (float("inf") if infinite else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        phalanx.clip_grad_norm_(model, 0.5)
        scaler.step(optimizer)
        scaler.update()

    return with_adam(wrap(Model(), backend), step, scaler=scaler)


def joined_step(wrap: Callable[[nn.Module, Backend], nn.Module], backend: Backend) -> Training:
    """`model.step()`: each rank has as many micro-batches as samples."""

    def step(model: nn.Module, optimizer: Optimizer, share: Share) -> None:
        rows = share.inputs if share.weight else share.inputs[:0]
        with model.step(len(rows), micro_batches=len(rows)) as its:  # type: ignore[operator]
            for row in rows:
                its.backward((model(row[None]) - row.sum()).square().sum())
        optimizer.step()

    return with_adam(wrap(Model(), backend), step)


def accumulated(wrap: Callable[[nn.Module, Backend], nn.Module], backend: Backend) -> Training:
    """Two backward passes, of which the first one only accumulates; and a validation."""
    validated = torch.zeros(1, dtype=torch.float64)

    def step(model: nn.Module, optimizer: Optimizer, share: Share) -> None:
        with model.no_sync():  # type: ignore[operator]
            (loss_of(model, share) * share.weight).backward()
        stepped(model, optimizer, share, 1)
        model.eval()
        with torch.no_grad():
            validated.copy_(loss_of(model, share))
        all_reduce_(validated, backend)
        model.train()

    return with_adam(wrap(Model(), backend), step)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


HYBRID = wrapped(lambda m, b: FSDP(m, b, strategy=ShardingStrategy.hybrid(2)))
COMBINED: Mapping[str, Way] = {
    "average": Way(with_average),
    "batch_norm": Way(batch_norm),
    "sync_batch_norm": Way(sync_batch_norm),
    "tied_ddp": Way(partial(tied, DDP)),
    "tied_fsdp": Way(partial(tied, FSDP)),
    "branches": Way(branches),
    "plain_module": Way(plain_module),
    "two_optimizers": Way(two_optimizers),
    "scaled_ddp": Way(partial(scaled, DDP)),
    "scaled_fsdp": Way(partial(scaled, FSDP)),
    "joined_step_ddp": Way(partial(joined_step, DDP)),
    "joined_step_fsdp": Way(partial(joined_step, FSDP)),
    "accumulated_ddp": Way(partial(accumulated, DDP)),
    "accumulated_fsdp": Way(partial(accumulated, FSDP)),
    "no_state": wrapped(DDP, sgd),
    "no_state_sharded": wrapped(FSDP, sgd),
    "shuffled": Way(WAYS["full_shard"].make, {"seed": 3}, samples=10),
    "drop_last": Way(WAYS["ddp"].make, {"drop_last": True, "seed": 1}, samples=11),
    "lengths": Way(WAYS["ddp"].make, {"lengths": [*range(13)], "pool": 2}, samples=13),
}


def crash_turns(turns: int) -> list[int]:
    """Return the turns at which to crash a process that has so many."""
    return list(range(turns)) if LONG else [turns * share // 16 for share in (7, 10, 12, 14)]


@pytest.mark.parametrize("name", COMBINED)
def test_the_end_is_that_of_checkpoints_whatever_is_combined(name: str) -> None:
    way = COMBINED[name]
    run, turns = train(way, 3)
    assert [end.counted for end in run.ends.values()] == [list(range(STEPS))] * 3
    for process in range(3):
        for turn in crash_turns(turns[process])[process % 2 :: 1 if LONG else 2]:
            run, _ = train(way, 3, {process: turn})
            assert run.ends.keys() == {0, 1, 2} - {process}
