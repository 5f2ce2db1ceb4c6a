"""`check_replicas_every`: parameters that differ by one bit are found, and whose it is."""

from __future__ import annotations

import pytest
import torch
from clusters import Cluster
from ddp_models import mlp, noise, vectors
from ddp_runs import Watched, outcome_of
from forms import sizes
from torch import nn

from phalanx import DDP, Backend, DesyncError, simulate

NAMES = [name for name, _ in mlp().named_parameters()]


def backward(ddp: nn.Module, rank: int) -> None:
    ddp.zero_grad()
    ddp(noise(4, 6, seed=rank)).sum().backward()


def flip_a_bit(parameter: torch.Tensor, place: int, bit: int) -> None:
    flat = parameter.data.view(-1).view(torch.int32)
    flat[place % len(flat)] ^= 1 << bit


@pytest.mark.checkered
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", sizes([2, 5], [2, 3, 4, 5]))
def test_one_bit_of_one_parameter_on_each_rank_in_turn_is_found(world_size: int, name: str):
    for culprit in range(world_size):

        def run(backend: Backend, culprit: int = culprit) -> BaseException | None:
            ddp = DDP(mlp(), backend, check_replicas_every=2)
            backward(ddp, backend.rank)
            backward(ddp, backend.rank)
            if backend.rank == culprit:
                flip_a_bit(ddp.get_parameter(f"module.{name}"), place=5, bit=culprit)
            backward(ddp, backend.rank)  # not looked at
            return outcome_of(lambda: backward(ddp, backend.rank))

        for rank, error in enumerate(simulate(run, world_size)):
            assert isinstance(error, DesyncError)
            assert (error.rank, error.op) == (rank, "DDP")
            assert "after 4 backward passes" in str(error)
            if world_size == 2:
                assert f"{name} is not the same on ranks 0, 1" in str(error)
                assert error.peer == 1 - rank
            else:
                assert f"{name} of rank {culprit} is not that of the majority" in str(error)
                assert error.peer == culprit


def test_it_works_on_every_kind_of_backend(cluster: Cluster):
    models = [mlp() for _ in range(3)]

    def run(backend: Backend) -> str:
        ddp = DDP(models[backend.rank], backend, check_replicas_every=1)
        backward(ddp, backend.rank)
        if backend.rank == 1:
            flip_a_bit(ddp.get_parameter("module.2.bias"), 0, 0)
        return str(outcome_of(lambda: backward(ddp, backend.rank)))

    for text in cluster.run(run, 3):
        assert "2.bias of rank 1 is not that of the majority" in text


def test_the_first_parameter_that_differs_is_named_and_the_others_are_counted():
    def run(backend: Backend) -> str:
        ddp = DDP(mlp(), backend, check_replicas_every=1)
        if backend.rank == 2:
            for parameter in list(ddp.parameters())[2:5]:
                flip_a_bit(parameter, 0, 3)
        return str(outcome_of(lambda: backward(ddp, 0)))

    for text in simulate(run, 4):
        assert "2.weight of rank 2" in text
        assert "2 parameters more" in text


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        ([0, 1, 1, 0, 0], "of ranks 1, 2 are not that of the majority"),
        ([1, 1, 0, 0], "on ranks 0, 1, 2, 3, and no majority"),
        ([0, 1, 2], "on ranks 0, 1, 2, and no majority"),
        ([0, 1, 2, 0], "of ranks 1, 2 are not that of the majority"),
    ],
)
def test_the_majority_decides_who_is_wrong_if_there_is_one(bits: list[int], words: str):
    def run(backend: Backend) -> str:
        ddp = DDP(mlp(), backend, check_replicas_every=1)
        flip_a_bit(ddp.get_parameter("module.0.weight"), 0, bits[backend.rank])
        return str(outcome_of(lambda: backward(ddp, 0)))

    for text in simulate(run, len(bits)):
        assert words in text


def test_frozen_parameters_are_compared_and_buffers_are_not():
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
        model[0].bias.requires_grad_(False)
        return model

    def run(backend: Backend) -> str:
        ddp = DDP(build(), backend, check_replicas_every=1)
        for _ in range(3):
            backward(ddp, backend.rank)  # each rank has its own running statistics afterwards
        if backend.rank == 0:
            flip_a_bit(ddp.module[0].bias, 0, 0)
        return str(outcome_of(lambda: backward(ddp, 0)))

    for text in simulate(run, 3):
        assert "0.bias of rank 0 is not that of the majority" in text


def test_training_goes_on_after_the_parameters_were_made_equal_again():
    def run(backend: Backend) -> None:
        ddp = DDP(mlp(), backend, check_replicas_every=1)
        if backend.rank == 1:
            flip_a_bit(next(ddp.parameters()), 0, 0)
        with pytest.raises(DesyncError):
            backward(ddp, backend.rank)
        ddp.broadcast_parameters()
        backward(ddp, backend.rank)

    simulate(run, 3)


def test_an_optimizer_that_steps_on_one_rank_only_is_found():
    def run(backend: Backend) -> BaseException | None:
        ddp = DDP(mlp(), backend, check_replicas_every=5)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

        def train() -> None:
            for number in range(5):
                optimizer.zero_grad()
                backward(ddp, backend.rank)
                if not (number == 2 and backend.rank == 2):
                    optimizer.step()

        return outcome_of(train)

    for error in simulate(run, 3):
        assert isinstance(error, DesyncError)
        assert "0.weight of rank 2" in str(error)


def test_equal_parameters_raise_nothing_and_cost_one_message_of_8_bytes_when_it_is_time():
    def run(backend: Backend) -> list[int]:
        ddp = DDP(mlp(), backend, check_replicas_every=3)
        optimizer = torch.optim.Adam(ddp.parameters())
        watched, sent = Watched(backend), []
        for _ in range(7):
            watched.clear()
            optimizer.zero_grad()
            backward(ddp, backend.rank)
            optimizer.step()
            sent.append(watched.bytes_sent)
        return [count - sent[1] for count in sent[1:]]

    assert list(simulate(run, 2)) == [[0, 8, 0, 0, 8, 0]] * 2


def test_passes_under_no_sync_are_not_counted():
    def run(backend: Backend) -> list[str]:
        ddp = DDP(mlp(), backend, check_replicas_every=2)
        backward(ddp, 0)
        with ddp.no_sync():
            backward(ddp, 0)
        watched = Watched(backend)
        x, _ = vectors(4)
        ddp(x).sum().backward()
        return [event.split()[0] for event in watched.events]

    assert list(simulate(run, 2)) == [["all_reduce", "all_gather"]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_every_dtype_is_compared_by_its_bits(dtype: torch.dtype):
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(2, 3, dtype=dtype).t())
            self.empty = nn.Parameter(torch.empty(0, dtype=dtype))
            self.one = nn.Parameter(torch.ones((), dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = (self.scale * x).sum() + self.empty.sum() + self.one
            return loss.real if loss.is_complex() else loss

    def run(backend: Backend) -> str:
        ddp = DDP(Scale(), backend, check_replicas_every=1)
        ddp(torch.ones((), dtype=dtype)).backward()
        if backend.rank == 1:
            ddp.module.scale.data.mul_(-1)  # -0.0 is another number of the same size
        return str(outcome_of(lambda: ddp(torch.ones((), dtype=dtype)).backward()))

    for text in simulate(run, 3):
        assert "scale of rank 1" in text


def test_an_impossible_interval_is_refused():
    def run(backend: Backend) -> None:
        with pytest.raises(ValueError, match="check_replicas_every"):
            DDP(mlp(), backend, check_replicas_every=-1)

    simulate(run, 1)
