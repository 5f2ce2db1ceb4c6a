"""ShardedOptimizer over FSDP: whole matrices, each on its owner, out of shards and back."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from clusters import Cooperative, SharedMemory, Tcp
from ddp_models import loss_of, mlp, vectors
from ddp_runs import Watched, assert_close, assert_same_bits, outcome_of, rows_of
from fsdp_runs import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, on_ranks
from sharded_runs import FACTORIES, Make, optimizers, plainly, train, whole_values
from torch import Tensor, nn

from phalanx import (
    DDP,
    FSDP,
    Backend,
    GradScaler,
    MisuseError,
    ShardedOptimizer,
    ShardingStrategy,
    clip_grad_norm_,
)

AdamW, SGD, Muon = torch.optim.AdamW, torch.optim.SGD, torch.optim.Muon
COOPERATIVE = Cooperative()
HYBRID = ShardingStrategy.hybrid(2)
every_factory = pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)


def trained(strategy: ShardingStrategy, factory: Make, **how: Any) -> Any:
    def body(model: nn.Module, backend: Backend) -> dict[str, Tensor]:
        fsdp = FSDP(model, backend, strategy=strategy)
        train(fsdp, optimizers(fsdp, factory, sharded=True), backend, **how)
        return whole_values(fsdp)

    return body


@cache
def with_ddp(factory: Make, ranks: int) -> dict[str, Tensor]:
    def body(model: nn.Module, backend: Backend) -> dict[str, Tensor]:
        ddp = DDP(model, backend, reproducible=True)
        train(ddp, optimizers(ddp, factory, sharded=False), backend)
        return whole_values(ddp)

    return on_ranks(COOPERATIVE, ranks, mlp, body)[0]


@pytest.mark.checkered
@every_factory
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_steps_give_the_bits_of_ddp(ranks: int, strategy: ShardingStrategy, factory: Make) -> None:
    found = on_ranks(COOPERATIVE, ranks, mlp, trained(strategy, factory))
    assert_same_bits([*found, with_ddp(factory, ranks)])


@pytest.mark.checkered
@every_factory
@pytest.mark.parametrize("strategy", [HYBRID, ShardingStrategy.hybrid(1)], ids=str)
def test_each_shard_group_of_a_hybrid_steps_alike(
    strategy: ShardingStrategy, factory: Make
) -> None:
    found = on_ranks(COOPERATIVE, 4, mlp, trained(strategy, factory, steps=6))
    assert_same_bits(found)
    assert_close(found[0], plainly(factory, steps=6), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("where", [Tcp(), SharedMemory()], ids=str)
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP], ids=str)
def test_ranks_that_run_freely(where: Any, strategy: ShardingStrategy) -> None:
    found = on_ranks(where, 2, mlp, trained(strategy, FACTORIES["Muon"], steps=6, clip=0.05))
    assert_same_bits(found)
    expected = plainly(FACTORIES["Muon"], steps=6, clip=0.05)
    assert_close(found[0], expected, rtol=1e-3, atol=1e-4)


def test_shards_and_gradients_are_there_again_after_a_step() -> None:
    def body(model: nn.Module, backend: Backend) -> list[int]:
        fsdp = FSDP(model, backend)
        (optimizer,) = optimizers(fsdp, FACTORIES["AdamW"], sharded=True)
        shapes = [p.shape for p in fsdp.parameters()]
        memory = [p.data_ptr() for p in fsdp.parameters()]
        for number in range(2):
            train(fsdp, [optimizer], backend, steps=1, first=number)
            assert [p.shape for p in fsdp.parameters()] == shapes
            assert [p.grad.shape for p in fsdp.parameters()] == shapes
            assert [p.data_ptr() for p in fsdp.parameters()] == memory
        whole = dict(mlp().named_parameters())
        for name, parameter in fsdp.named_parameters():
            if parameter in optimizer.state:
                assert optimizer.state[parameter]["exp_avg"].shape == whole[name].shape
        kept = [s["exp_avg"].numel() for s in optimizer.state.values()]
        sizes = [p.numel() for p in whole.values()]
        assert sum(kept) <= sum(sizes) / 3 + max(sizes)
        return kept

    found = on_ranks(COOPERATIVE, 3, mlp, body)
    assert sum(map(sum, found)) == sum(p.numel() for p in mlp().parameters())


def test_a_step_that_fails_leaves_shards() -> None:
    class Fails(SGD):
        def step(self, closure: Any = None) -> None:
            raise ArithmeticError("a bad step")

    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        optimizer = ShardedOptimizer(Fails, fsdp, lr=0.1)
        before = whole_values(fsdp)
        loss_of(fsdp(vectors(4)[0]), vectors(4)[1]).backward()
        assert isinstance(outcome_of(optimizer.step), ArithmeticError)
        assert_same_bits([before, whole_values(fsdp)])

    on_ranks(COOPERATIVE, 2, mlp, body)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_sends_at_most_the_parameters_bytes_more_than_an_elementwise_one(
    ranks: int,
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(96, 96) for _ in range(6)))

    def sent(sharded: bool) -> list[int]:
        def body(model: nn.Module, backend: Backend) -> int:
            fsdp = FSDP(model, backend)
            given: Any = [fsdp] if sharded else [fsdp.parameters()]
            make: Any = (lambda m: ShardedOptimizer(AdamW, m)) if sharded else AdamW
            optimizer = make(*given)
            watched = Watched(backend)
            fsdp(torch.ones(2, 96)).sum().backward()
            watched.clear()
            optimizer.step()
            return watched.bytes_sent

        return on_ranks(Tcp(), ranks, build, body)

    count = sum(p.nbytes for p in build().parameters())
    more = [mine - plain for mine, plain in zip(sent(True), sent(False), strict=True)]
    assert max(more) <= count
    expected = 3 * (ranks - 1) / ranks**2 * count
    assert sum(more) / ranks == pytest.approx(expected, rel=0.02)


def test_closures_scalers_and_groups_that_come_later() -> None:
    def body(model: nn.Module, backend: Backend) -> dict[str, Tensor]:
        fsdp = FSDP(model, backend)
        named = dict(fsdp.named_parameters())
        first, *rest = [p for name, p in named.items() if name.endswith("weight")]
        optimizer = ShardedOptimizer(Muon, fsdp, groups=[first], lr=0.02)
        scaler = GradScaler(backend, init_scale=8.0, growth_interval=100)
        for number in range(4):
            if number == 2:
                optimizer.add_param_group({"params": rest, "lr": 0.01})
            inputs, targets = (rows_of(each, backend) for each in vectors(60, seed=number))
            if number % 2:

                def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                    optimizer.zero_grad()
                    loss = loss_of(fsdp(inputs), targets)
                    loss.backward()
                    return loss

                optimizer.step(closure)
            else:
                fsdp.zero_grad()
                scaler.scale(loss_of(fsdp(inputs), targets)).backward()
                scaler.unscale_(optimizer)
                clip_grad_norm_(fsdp, 1e9)
                scaler.step(optimizer)
                scaler.update()
        return whole_values(fsdp)

    plain = mlp()
    first, *rest = [p for name, p in plain.named_parameters() if name.endswith("weight")]
    optimizer = Muon([first], lr=0.02)
    for number in range(4):
        if number == 2:
            optimizer.add_param_group({"params": rest, "lr": 0.01})
        inputs, targets = vectors(60, seed=number)
        optimizer.zero_grad()
        loss_of(plain(inputs), targets).backward()
        optimizer.step()
    found = on_ranks(COOPERATIVE, 2, mlp, body)
    assert_same_bits(found)
    assert_close(found[0], whole_values(plain), rtol=1e-3, atol=1e-4)


def test_parameters_of_one_element_and_frozen_ones() -> None:
    """Where some ranks have nothing of a parameter."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 2))
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.fill_(0.3 + number)
        model[1].bias.requires_grad_(False)
        return model

    def step(model: nn.Module, optimizer: Any) -> None:
        for number in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 1), 1.0 + number)).pow(2).sum().backward()
            optimizer.step()

    def body(model: nn.Module, backend: Backend) -> dict[str, Tensor]:
        fsdp = FSDP(model, backend)
        step(fsdp, ShardedOptimizer(torch.optim.Adafactor, fsdp, lr=0.1))
        return whole_values(fsdp)

    plain = build()
    step(plain, torch.optim.Adafactor(plain.parameters(), lr=0.1))
    found = on_ranks(COOPERATIVE, 3, build, body)
    assert_same_bits(found)
    assert_close(found[0], whole_values(plain), rtol=1e-4, atol=1e-5)


def test_mixed_precision_keeps_whole_parameters_in_their_own_dtype() -> None:
    def body(model: nn.Module, backend: Backend) -> dict[str, Tensor]:
        fsdp = FSDP(model, backend, mixed_precision=torch.bfloat16)
        (optimizer,) = optimizers(fsdp, FACTORIES["Adafactor"], sharded=True)
        inputs, targets = (rows_of(each, backend) for each in vectors(60))
        loss_of(fsdp(inputs).float(), targets).backward()
        optimizer.step()
        return whole_values(fsdp)

    found = on_ranks(COOPERATIVE, 2, mlp, body)
    assert_same_bits(found)
    assert_close(found[0], plainly(FACTORIES["Adafactor"], steps=1), rtol=0.1, atol=0.05)


def test_a_plain_optimizer_on_its_parameters_is_refused() -> None:
    def body(model: nn.Module, backend: Backend) -> BaseException | None:
        fsdp = FSDP(model, backend)
        other = AdamW(fsdp.parameters())
        ShardedOptimizer(Muon, fsdp, groups=[dict(fsdp.named_parameters())["0.weight"]], lr=0.1)
        loss_of(fsdp(vectors(4)[0]), vectors(4)[1]).backward()
        return outcome_of(other.step)

    for error in on_ranks(COOPERATIVE, 2, mlp, body):
        assert isinstance(error, MisuseError)
        assert "0.weight, which belongs to another optimizer" in str(error)
