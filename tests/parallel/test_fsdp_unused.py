"""Parameters that a backward pass does not reach: on every rank, or on some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import Branches, noise, seeded
from ddp_runs import Gradients, assert_close, gradients, mean_of, outcome_of
from fsdp_runs import (
    BATON,
    COMMON,
    FULL_SHARD,
    MESSAGES,
    NO_SHARD,
    SHARD_GRAD_OP,
    every_way,
    gradient_pieces,
    joined,
    on_ranks,
)
from torch import Tensor, nn

from phalanx import FSDP, Backend, DesyncError

Plan = list[list[list[str]]]  # for each step, for each rank, the branches that it uses

PLANS: dict[str, Plan] = {
    "one on no rank": [[["left"]] * 3] * 2,
    "one on rank 0 only": [[["left", "right"], ["left"], ["left"]]] * 2,
    "another on each rank": [[["left"], ["right"], []]] * 2,
    "none on any rank": [[[], [], []]] * 2,
    "another in each step": [[["left"]] * 3, [["right"]] * 3, [["left", "right"]] * 3],
}
WAYS = [(FULL_SHARD, COMMON), (FULL_SHARD, MESSAGES), (SHARD_GRAD_OP, BATON), (NO_SHARD, COMMON)]
way = every_way(WAYS)


def step(model: nn.Module, rank: int, number: int, names: list[str]) -> None:
    model(noise(4, 6, seed=10 * number + rank), *names).pow(2).sum().backward()


@pytest.mark.checkered
@way
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_inside_a_group_they_count_as_zeros_and_stay_none_where_no_rank_used_them(
    plan: Plan, strategy: Any, where: Any
):
    def body(model: nn.Module, backend: Backend) -> list[Any]:
        fsdp = FSDP(model, backend, strategy=strategy, unit=lambda m: m is model)
        found = []
        for number, names in enumerate(plan):
            fsdp.zero_grad()
            step(fsdp, backend.rank, number, names[backend.rank])
            found.append(gradient_pieces(fsdp))
        return found

    build = lambda: seeded(Branches)  # noqa: E731
    ranks = on_ranks(where, 3, build, body)
    for number, names in enumerate(plan):
        plain = [build() for _ in range(3)]
        for rank, model in enumerate(plain):
            step(model, rank, number, names[rank])
        wanted = mean_of([gradients(model) for model in plain])
        assert_close(joined([found[number] for found in ranks]), wanted)


@way
def test_a_group_that_no_rank_uses_is_not_moved_by_the_optimizer(strategy: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> bool:
        fsdp = FSDP(model, backend, strategy=strategy)
        optimizer = torch.optim.AdamW(fsdp.parameters(), lr=0.1, weight_decay=0.5)
        before = fsdp.full_state_dict()
        for number in range(2):
            optimizer.zero_grad()
            step(fsdp, backend.rank, number, ["left"])
            optimizer.step()
        after = fsdp.full_state_dict()
        assert not torch.equal(before["left.weight"], after["left.weight"])
        return torch.equal(before["right.weight"], after["right.weight"])

    assert on_ranks(where, 2, lambda: seeded(Branches), body) == [True, True]


class Two(nn.Module):
    """Two layers, of which the second is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return torch.tanh(self.a(x) + (self.b(x) if both else 0))


class Chain(nn.Module):
    """A group's output is the next one's input, the very same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Two() for _ in range(4))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        for layer in self.layers:
            x = layer(x, both)
        return x


class Reads(Two):
    """Takes what every layer takes, too; one of these is a parameter of the model."""

    def forward(self, x: Tensor, memory: Tensor, shift: Tensor, both: bool) -> Tensor:
        return torch.tanh(self.a(x) + memory + shift + (self.b(memory) if both else 0))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Reads() for _ in range(4))
        self.shift = nn.Parameter(torch.randn(6))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        memory = self.encode(x)
        for layer in self.layers:
            x = layer(x, memory, self.shift, both)
        return x * self.scale if both else x


class Towers(nn.Module):
    """Groups whose inputs need no gradients, so that no gradient tells where they end."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Two() for _ in range(3))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return torch.stack([tower(x, both) for tower in self.towers]).sum(0)


class Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = Two()
        self.two = Two()

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.one(self.two(self.one(self.one(x, both), both), both), both)


@pytest.mark.checkered
@way
@pytest.mark.parametrize("kind", [Chain, Decoder, Towers, Repeats])
def test_groups_are_reduced_in_one_order_though_not_all_ranks_have_all_gradients(
    kind: Callable[[], nn.Module], strategy: Any, where: Any
):
    """A rank that lacks one could only tell at the end; the others do not wait until then."""

    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(noise(4, 6, seed=rank), rank == 0).pow(2).sum()

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        for _ in range(2):
            fsdp.zero_grad()
            loss(fsdp, backend.rank).backward()
        return gradient_pieces(fsdp)

    build = lambda: seeded(kind)  # noqa: E731
    found: Gradients = joined(on_ranks(where, 3, build, body))
    plain = [build() for _ in range(3)]
    for rank, model in enumerate(plain):
        loss(model, rank).backward()
    assert_close(found, mean_of([gradients(model) for model in plain]))


@pytest.mark.parametrize(("strategy", "where"), [WAYS[1], WAYS[2]], ids=["messages", "baton"])
def test_ranks_that_use_other_groups_are_told_which(strategy: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> BaseException | None:
        fsdp = FSDP(model, backend, strategy=strategy)
        names = ["left"] if backend.rank else ["left", "right"]
        error = outcome_of(lambda: step(fsdp, backend.rank, 0, names))
        return error or outcome_of(backend.barrier)

    for error in on_ranks(where, 2, lambda: seeded(Branches), body):
        assert isinstance(error, DesyncError)
        assert "FSDP" in str(error)
        assert "right" in str(error)
        assert "left" in str(error)
