"""`clip_grad_norm_` is torch's, of the whole gradients."""

from __future__ import annotations

from typing import Any

import pytest
from clusters import Hybrid
from ddp_models import noise, seeded
from ddp_runs import assert_close, gradients, outcome_of
from fsdp_runs import (
    COMMON,
    COOPERATIVE,
    FULL_SHARD,
    MESSAGES,
    NO_SHARD,
    SHARD_GRAD_OP,
    every_way_of_ranks,
    gradient_pieces,
    joined,
    on_ranks,
)
from torch import Tensor, nn

from phalanx import FSDP, Backend, ShardingStrategy, clip_grad_norm_

WAYS = [
    (3, FULL_SHARD, COMMON),
    (3, FULL_SHARD, MESSAGES),
    (2, SHARD_GRAD_OP, COOPERATIVE),
    (2, NO_SHARD, COMMON),
    (4, ShardingStrategy.hybrid(2), COOPERATIVE),
    (4, FULL_SHARD, Hybrid()),
    (1, FULL_SHARD, COOPERATIVE),
]
way = every_way_of_ranks(WAYS)


class Model(nn.Module):
    """Two dtypes, a layer that is frozen and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 5).double()
        self.fixed = nn.Linear(5, 4).requires_grad_(False)
        self.narrow = nn.Linear(4, 3)
        self.unused = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.fixed(self.wide(x.double()).float().tanh())).tanh()


def build() -> nn.Module:
    return seeded(Model)


def backward(model: nn.Module, scale: float = 1.0) -> None:
    (model(noise(4, 6)).pow(2).sum() * scale).backward()


@pytest.mark.checkered
@way
@pytest.mark.parametrize("norm", [2, 1, 3.5, float("inf")])
def test_it_gives_the_norm_of_the_plain_model_and_scales_as_it(
    norm: float, ranks: int, strategy: Any, where: Any
):
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        found = []
        for limit in (0.1, 1e6):
            fsdp.zero_grad()
            backward(fsdp)
            total = clip_grad_norm_(fsdp, limit, norm_type=norm).item()
            found.append((total, gradient_pieces(fsdp)))
        return found

    per_rank = on_ranks(where, ranks, build, body)
    for number, limit in enumerate((0.1, 1e6)):
        plain = build()
        backward(plain)
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), limit, norm).item()
        totals = [found[number][0] for found in per_rank]
        assert set(totals) == {totals[0]}  # the same bits
        assert totals[0] == pytest.approx(wanted, rel=1e-5)
        assert_close(
            joined([found[number][1] for found in per_rank]), gradients(plain), rtol=1e-4, atol=1e-6
        )


@way
def test_a_norm_that_is_not_finite_is_an_error_if_that_was_asked_for(
    ranks: int, strategy: Any, where: Any
):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy)
        backward(fsdp, scale=float("inf"))
        error = outcome_of(lambda: clip_grad_norm_(fsdp, 1.0, error_if_nonfinite=True))
        assert isinstance(error, RuntimeError)
        assert f"rank {backend.rank}" in str(error)
        assert not clip_grad_norm_(fsdp, 1.0).isfinite()

    on_ranks(where, ranks, build, body)


def test_without_gradients_it_is_zero():
    def body(model: nn.Module, backend: Backend) -> float:
        return clip_grad_norm_(FSDP(model, backend), 1.0).item()

    assert on_ranks(COOPERATIVE, 2, build, body) == [0.0, 0.0]
