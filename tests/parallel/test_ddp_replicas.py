"""Ranks whose models differ are told, all of them, which parameter differs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ddp_runs import outcome_of
from torch import nn

from phalanx import DDP, Backend, DesyncError, simulate


def frozen_bias() -> nn.Module:
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    return model


def renamed() -> nn.Module:
    model = nn.Linear(4, 3)
    model.register_parameter("offset", model.bias)
    del model.bias
    model.bias = None
    return model


def with_buffer(shape: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = nn.Linear(4, 3)
        model.register_buffer("mask", torch.zeros(shape))
        return model

    return build


def sequence(layers: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))


def plain() -> nn.Module:
    return nn.Linear(4, 3)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], list[str]]] = {
    "shape": (plain, lambda: nn.Linear(5, 3), ["weight", "[3, 4]", "[3, 5]"]),
    "dtype": (plain, lambda: nn.Linear(4, 3).double(), ["weight", "float32", "float64"]),
    "requires_grad": (plain, frozen_bias, ["bias", "frozen"]),
    "name": (plain, renamed, ["bias", "offset"]),
    "more": (sequence(2), sequence(3), ["2.weight", "no more"]),
    "fewer": (sequence(3), sequence(1), ["1.weight", "no more"]),
    "one without any": (plain, nn.Identity, ["weight", "no more"]),
    "buffer's shape": (with_buffer(2), with_buffer(3), ["buffer mask", "[2]", "[3]"]),
    "a buffer more": (plain, with_buffer(3), ["buffer mask"]),
}


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("case", CASES)
def test_a_difference_is_named_on_every_rank(case: str, world_size: int):
    common, odd, expected = CASES[case]
    culprit = world_size - 1

    def run(backend: Backend) -> BaseException | None:
        model = odd() if backend.rank == culprit else common()
        return outcome_of(lambda: DDP(model, backend))

    for rank, error in enumerate(simulate(run, world_size)):
        assert isinstance(error, DesyncError)
        assert f"rank {rank}" in str(error)
        assert f"rank {culprit} has" in str(error)
        assert (error.rank, error.peer, error.op) == (rank, culprit, "DDP")
        for part in expected:
            assert part in str(error)


def test_rank_0_may_be_the_odd_one():
    def run(backend: Backend) -> BaseException | None:
        model = nn.Linear(4 + (backend.rank == 0), 3)
        return outcome_of(lambda: DDP(model, backend))

    for error in simulate(run, 3):
        assert isinstance(error, DesyncError)
        assert "rank 0 has weight (float32 [3, 5])" in str(error)


def test_a_buffer_is_not_called_frozen():
    def run(backend: Backend) -> str:
        return str(outcome_of(lambda: DDP(with_buffer(2 + backend.rank)(), backend)))

    for text in simulate(run, 2):
        assert "mask" in text
        assert "frozen" not in text


def test_the_group_is_usable_after_the_models_were_found_to_differ():
    def run(backend: Backend) -> list[int]:
        with pytest.raises(DesyncError):
            DDP(nn.Linear(2 + backend.rank, 1), backend)
        ddp = DDP(nn.Linear(2, 1), backend)
        ddp(torch.ones(1, 2)).sum().backward()
        return list(ddp.module.weight.grad.shape)

    assert list(simulate(run, 2)) == [[1, 2]] * 2


def test_values_may_differ_and_names_need_not_be_ascii():
    class Greek(nn.Module):
        def __init__(self, value: float, size: int = 2) -> None:
            super().__init__()
            self.register_parameter("\u03c3", nn.Parameter(torch.full((size,), value)))

    def run(backend: Backend) -> tuple[float, str]:
        ddp = DDP(Greek(float(backend.rank)), backend)
        wrong = outcome_of(lambda: DDP(Greek(0.0, 2 + backend.rank), backend))
        return next(ddp.parameters())[0].item(), str(wrong)

    for value, text in simulate(run, 2):
        assert value == 0.0
        assert "\u03c3 (float32 [3])" in text


OPTIONS = {
    "bucket_size": 100,
    "broadcast_buffers": False,
    "find_unused_parameters": True,
    "skip_nonfinite": True,
    "check_replicas_every": 3,
}


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_differs_is_named_on_every_rank_at_construction(option: str, culprit: int):
    def run(backend: Backend) -> BaseException | None:
        options = {option: OPTIONS[option]} if backend.rank == culprit else {}
        return outcome_of(lambda: DDP(plain(), backend, **options))

    for rank, error in enumerate(simulate(run, 3)):
        assert isinstance(error, DesyncError)
        assert f"rank {rank}: the ranks' options" in str(error)
        assert f"rank {culprit} has {option}=" in str(error)
        assert f"{option}={OPTIONS[option]}" in str(error)
        assert error.peer == culprit


def test_several_odd_ranks_are_all_named_beside_one_of_the_majority():
    def run(backend: Backend) -> BaseException | None:
        return outcome_of(lambda: DDP(nn.Linear(2 + backend.rank % 3 % 2, 1), backend))

    for error in simulate(run, 5):
        assert isinstance(error, DesyncError)
        assert (
            "rank 1 has weight (float32 [1, 3]); rank 4 has weight (float32 [1, 3]), "
            "rank 0 has weight (float32 [1, 2])"
        ) in str(error)
