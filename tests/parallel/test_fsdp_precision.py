"""Mixed precision: what is in which dtype, and that it trains as plain mixed precision does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clusters import Hybrid
from ddp_models import mlp, noise, seeded
from ddp_runs import Watched, assert_close
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

from phalanx import FSDP, Backend, MixedPrecision, ShardingStrategy
from phalanx.fsdp.unsharded import UnshardedParameter

WAYS = [
    (2, FULL_SHARD, COMMON),
    (3, FULL_SHARD, MESSAGES),
    (3, SHARD_GRAD_OP, COMMON),
    (2, SHARD_GRAD_OP, MESSAGES),
    (2, NO_SHARD, COOPERATIVE),
    (4, ShardingStrategy.hybrid(2), COMMON),
    (2, FULL_SHARD, Hybrid()),
    (1, FULL_SHARD, COOPERATIVE),
]
way = every_way_of_ranks(WAYS)
BF16 = torch.bfloat16


def loss_of(model: nn.Module, rank: int, number: int = 0) -> Tensor:
    return model(noise(4, 6, seed=10 * number + rank)).float().pow(2).sum()


def train_emulated(ranks: int) -> tuple[Any, Any]:
    """float32 masters by hand: bfloat16 copies compute, their gradients are averaged in float32."""
    master, narrow = mlp(), mlp().bfloat16()
    optimizer = torch.optim.SGD(master.parameters(), lr=0.05, momentum=0.5)
    for number in range(3):
        optimizer.zero_grad()
        with torch.no_grad():
            for p, m in zip(narrow.parameters(), master.parameters(), strict=True):
                p.copy_(m)
        for rank in range(ranks):
            narrow.zero_grad()
            narrow(noise(4, 6, seed=10 * number + rank).bfloat16()).float().pow(2).sum().backward()
            for p, m in zip(narrow.parameters(), master.parameters(), strict=True):
                share = p.grad.float() / ranks
                m.grad = share if m.grad is None else m.grad + share
        optimizer.step()
    return dict(master.state_dict()), {name: p.grad for name, p in master.named_parameters()}


@way
def test_it_trains_as_masters_and_copies_by_hand_do(ranks: int, strategy: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy, mixed_precision=BF16)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.05, momentum=0.5)
        for number in range(3):
            optimizer.zero_grad()
            loss_of(fsdp, backend.rank, number).backward()
            optimizer.step()
        return fsdp.full_state_dict(), gradient_pieces(fsdp)

    values, grads = train_emulated(ranks)
    found = on_ranks(where, ranks, mlp, body)
    for state, _ in found:
        assert_close(state, values, rtol=1e-3, atol=1e-3)
    assert_close(joined([pieces for _, pieces in found]), grads, rtol=0.02, atol=0.02)


class Looks(nn.Module):
    """Notes the dtypes that it is given and computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.whole_numbers = nn.Parameter(torch.tensor([1, 2, 3]), requires_grad=False)
        self.register_buffer("shift", torch.zeros(3))
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor, *, index: Tensor, more: list[Tensor]) -> Tensor:
        self.seen = {
            name: value.dtype
            for name, value in {
                "x": x,
                "index": index,
                "more": more[0],
                "weight": self.layer.weight,
                "wide": self.wide,
                "numbers": self.whole_numbers,
                "shift": self.shift,
            }.items()
        }
        output = self.layer(x) * self.wide
        self.seen["output"] = output.dtype
        return output


@pytest.mark.checkered
@way
@pytest.mark.parametrize("cast", [True, False])
def test_what_is_in_which_dtype(cast: bool, ranks: int, strategy: Any, where: Any):
    def body(model: Any, backend: Backend) -> None:
        precision = MixedPrecision(BF16, reduce_dtype=torch.float32, cast_inputs=cast)
        fsdp = FSDP(model, backend, strategy=strategy, mixed_precision=precision)
        given = noise(4, 6) if cast else noise(4, 6).bfloat16()
        fsdp(given, index=torch.tensor([1]), more=[noise(2)]).sum().backward()
        assert model.seen == {
            "x": BF16,
            "index": torch.int64,
            "more": BF16 if cast else torch.float32,
            "weight": BF16,
            "wide": BF16,
            "numbers": torch.int64,
            "shift": torch.float32,
            "output": BF16,
        }
        kept = {"wide": torch.float64, "whole_numbers": torch.int64}
        optimizer = torch.optim.Adam([p for p in fsdp.parameters() if p.requires_grad])
        optimizer.step()
        for name, p in fsdp.named_parameters():
            assert p.dtype is kept.get(name, torch.float32)
            if p.requires_grad:
                assert p.grad is not None
                assert p.grad.dtype is p.dtype
                assert optimizer.state[p]["exp_avg"].dtype is p.dtype
        for name, value in fsdp.full_state_dict().items():
            assert value.dtype is kept.get(name, torch.float32)

    on_ranks(where, ranks, lambda: seeded(Looks), body)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, BF16, torch.float64])
def test_all_gathers_move_the_computing_dtype_and_reductions_theirs(reduce_dtype: torch.dtype):
    def body(model: nn.Module, backend: Backend) -> list[str]:
        precision = MixedPrecision(BF16, reduce_dtype=reduce_dtype)
        fsdp = FSDP(model, backend, mixed_precision=precision)
        watched = Watched(backend)
        loss_of(fsdp, backend.rank).backward()
        return [" ".join(e.split()[:2]) for e in watched.events if "gather" in e or "scatter" in e]

    name = str(reduce_dtype).removeprefix("torch.")
    for events in on_ranks(MESSAGES, 2, mlp, body):
        assert set(events) == {"all_gather bfloat16", f"reduce_scatter {name}"}


def test_small_updates_are_not_lost_in_the_masters():
    """An update that bfloat16 would round away adds up."""

    def body(model: nn.Module, backend: Backend) -> Tensor:
        fsdp = FSDP(model, backend, mixed_precision=BF16)
        for _ in range(3):
            for p in fsdp.parameters():
                p.grad = torch.full_like(p, -1e-4)
            torch.optim.SGD(fsdp.parameters(), lr=1.0).step()
        return fsdp.full_state_dict()["weight"]

    def ones() -> nn.Module:
        model = nn.Linear(4, 4, bias=False)
        nn.init.ones_(model.weight)
        return model

    for where in (COMMON, MESSAGES):
        for found in on_ranks(where, 2, ones, body):
            torch.testing.assert_close(found, torch.full((4, 4), 1.0003))


@pytest.mark.parametrize("given", ["bfloat16", 16, torch.int64, torch.bool])
def test_anything_but_a_floating_point_dtype_is_refused(given: Any):
    def body(model: nn.Module, backend: Backend) -> None:
        with pytest.raises(TypeError, match=r"mixed_precision|compute_dtype"):
            FSDP(model, backend, mixed_precision=given)

    on_ranks(COOPERATIVE, 1, mlp, body)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.complex64])
def test_dtypes_in_which_nothing_is_computed_or_added_are_refused(dtype: torch.dtype):
    for name in ("compute_dtype", "reduce_dtype"):
        with pytest.raises(TypeError, match=f"{name} is float16, bfloat16, float32 or float64"):
            MixedPrecision(**{name: dtype})


def test_the_model_may_be_narrow_itself_and_sums_are_in_its_dtype():
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model.bfloat16(), backend)
        fsdp(noise(4, 6, seed=backend.rank).bfloat16()).float().pow(2).sum().backward()
        assert all(p.grad.dtype is BF16 for p in fsdp.parameters())
        return gradient_pieces(fsdp)

    plain = [mlp().bfloat16() for _ in range(2)]
    for rank, model in enumerate(plain):
        model(noise(4, 6, seed=rank).bfloat16()).float().pow(2).sum().backward()
    named = [dict(model.named_parameters()) for model in plain]
    wanted = {name: (p.grad + named[1][name].grad) / 2 for name, p in named[0].items()}
    for where in (COMMON, MESSAGES):
        found = joined(on_ranks(where, 2, mlp, body))
        assert_close(found, wanted, rtol=0.02, atol=0.02)


def test_full_parameters_say_what_they_are():
    def body(model: nn.Module, backend: Backend) -> str:
        seen = []
        fsdp = FSDP(model, backend, mixed_precision=BF16)
        model[0].register_forward_hook(lambda m, *_: seen.append(m.weight))
        fsdp(noise(4, 6))
        assert isinstance(seen[0], UnshardedParameter)
        return repr(seen[0])

    assert (
        on_ranks(COOPERATIVE, 2, mlp, body) == ["UnshardedParameter(0.weight: [8, 6], sharded)"] * 2
    )


def batch_norm() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))


@way
def test_batch_norm_computes_in_the_dtype_of_its_statistics(ranks: int, strategy: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy, mixed_precision=BF16)
        output = fsdp(noise(4, 6, seed=backend.rank))
        output.float().pow(2).sum().backward()
        norm = model[1]
        assert norm.running_mean.dtype == norm.weight.dtype == torch.float32
        return output.detach(), norm.running_mean.clone(), gradient_pieces(fsdp)

    def alone(rank: int) -> tuple[Tensor, Tensor, nn.Module]:
        plain = batch_norm()
        for layer in (plain[0], plain[2]):
            layer.bfloat16()
        output = plain(noise(4, 6, seed=rank).bfloat16())
        output.float().pow(2).sum().backward()
        return output.detach(), plain[1].running_mean, plain

    found = on_ranks(where, ranks, batch_norm, body)
    models = []
    for rank, (output, mean, _) in enumerate(found):
        expected, expected_mean, plain = alone(rank)
        assert torch.equal(output, expected)
        assert torch.equal(mean, expected_mean)
        models.append(plain)
    named = [dict(model.named_parameters()) for model in models]
    expected = {n: sum(m[n].grad.float() for m in named) / ranks for n in named[0]}
    assert_close(joined([pieces for *_, pieces in found]), expected)
