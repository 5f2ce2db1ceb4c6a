"""Activation checkpointing: parts of the forward pass run again inside the backward pass."""

from __future__ import annotations

import pytest
import torch
from ddp_models import noise, seeded
from ddp_runs import (
    Gradients,
    assert_close,
    assert_same_bits,
    gradients,
    naive_gradients,
    outcome_of,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx import DDP, Backend, MisuseError, simulate

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.last = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(lambda y, b=block: torch.tanh(b(y)), x, use_reentrant=self.reentrant)
        return self.last(x)


class Recurrent(nn.Module):
    """The same layer in two checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layer = nn.Linear(6, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=self.reentrant)
        return self.last(x)


class InList(list):
    """A container that nobody looks into."""


def loss(model: nn.Module, seed: int) -> Tensor:
    return model(noise(4, 6, seed=seed).requires_grad_()).pow(2).sum()


def without_checkpoints(kind: type[nn.Module], world_size: int, *seeds: int) -> Gradients:
    def step(model: nn.Module, rank: int) -> None:
        for seed in seeds:
            loss(model, seed + rank).backward()

    return naive_gradients(lambda: seeded(lambda: kind(False)), world_size, step)


@pytest.mark.parametrize("bucket_size", [1, 150, 1 << 20])
@REENTRANT
def test_gradients_are_those_without_checkpoints(reentrant: bool, bucket_size: int):
    def run(backend: Backend) -> Gradients:
        ddp = DDP(seeded(lambda: Checkpointed(reentrant)), backend, bucket_size=bucket_size)
        for number in range(3):
            ddp.zero_grad()
            loss(ddp, 10 * number + backend.rank).backward()
        return gradients(ddp)

    ranks = list(simulate(run, 3))
    assert_same_bits(ranks)
    assert_close(ranks[0], without_checkpoints(Checkpointed, 3, 20))


@REENTRANT
def test_accumulation_works_with_checkpoints(reentrant: bool):
    def run(backend: Backend) -> Gradients:
        ddp = DDP(seeded(lambda: Checkpointed(reentrant)), backend, bucket_size=1)
        for _ in range(2):
            ddp.zero_grad()
            with ddp.no_sync():
                loss(ddp, backend.rank).backward()
            loss(ddp, backend.rank + 10).backward()
        return gradients(ddp)

    expected = without_checkpoints(Checkpointed, 2, 0, 10)
    for found in simulate(run, 2):
        assert_close(found, expected)


@pytest.mark.parametrize("bucket_size", [1, 1 << 20])
@REENTRANT
def test_a_layer_in_two_checkpoints_is_averaged_whole_or_refused(reentrant, bucket_size):
    """Reentrant checkpoints deliver its gradient in two parts, the first of which is not final."""

    def run(backend: Backend) -> Gradients | BaseException:
        ddp = DDP(seeded(lambda: Recurrent(reentrant)), backend, bucket_size=bucket_size)
        backend.barrier()
        for number in range(3):
            ddp.zero_grad()
            seed = 10 * number + backend.rank
            error = outcome_of(lambda seed=seed: loss(ddp, seed).backward())
            if error is not None:
                return error
        return gradients(ddp)

    expected = without_checkpoints(Recurrent, 2, 20)
    for found in simulate(run, 2):
        if isinstance(found, BaseException):
            assert reentrant
            assert isinstance(found, MisuseError)
            assert "layer." in str(found)
        else:
            assert_close(found, expected)


@REENTRANT
def test_the_whole_ddp_may_be_checkpointed(reentrant: bool):
    def whole(ddp: nn.Module, seed: int) -> Tensor:
        x = noise(4, 6, seed=seed).requires_grad_()
        return checkpoint(ddp, x, use_reentrant=reentrant).pow(2).sum()

    def run(backend: Backend) -> Gradients:
        ddp = DDP(seeded(lambda: Checkpointed(False)), backend, bucket_size=1)
        for number in range(3):
            ddp.zero_grad()
            whole(ddp, 10 * number + backend.rank).backward()
        return gradients(ddp)

    expected = without_checkpoints(Checkpointed, 2, 20)
    for found in simulate(run, 2):
        assert_close(found, expected)


@REENTRANT
def test_outputs_in_a_container_of_the_user_s_own_work_with_checkpoints(reentrant: bool):
    class Wrapped(Checkpointed):
        def forward(self, x: Tensor) -> InList:
            return InList([super().forward(x)])

    def run(backend: Backend) -> Gradients:
        ddp = DDP(seeded(lambda: Wrapped(reentrant)), backend, bucket_size=1)
        for number in range(2):
            ddp.zero_grad()
            x = noise(4, 6, seed=10 * number + backend.rank).requires_grad_()
            ddp(x)[0].pow(2).sum().backward()
        return gradients(ddp)

    expected = without_checkpoints(Checkpointed, 2, 10)
    for found in simulate(run, 2):
        assert_close(found, expected)
