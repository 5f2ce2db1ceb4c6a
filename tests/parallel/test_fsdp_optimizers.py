"""Optimizers see ordinary parameters, the same objects from before FSDP to after it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import mlp, noise
from ddp_runs import Watched, assert_close, gradients, outcome_of, values
from fsdp_runs import (
    COMMON,
    COOPERATIVE,
    FULL_SHARD,
    MESSAGES,
    NO_SHARD,
    SHARD_GRAD_OP,
    STRATEGIES,
    every_way,
    on_ranks,
)
from torch import Tensor, nn

from phalanx import FSDP, Backend, ShardingStrategy

RANKS = 3
way = every_way()
Train = Callable[[nn.Module, list[int]], None]


def mean_loss(model: nn.Module, ranks: list[int], number: int) -> Tensor:
    losses = [model(noise(4, 6, seed=10 * number + rank)).pow(2).sum() for rank in ranks]
    return torch.stack(losses).mean()


def in_groups_by_name(model: nn.Module, ranks: list[int]) -> None:
    decay = [p for name, p in model.named_parameters() if name.endswith("weight")]
    rest = [p for name, p in model.named_parameters() if not name.endswith("weight")]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.3}, {"params": rest, "lr": 0.05, "weight_decay": 0.0}],
        lr=0.01,
        eps=1e-3,
    )
    for number in range(3):
        optimizer.zero_grad()
        mean_loss(model, ranks, number).backward()
        optimizer.step()


def two_optimizers(model: nn.Module, ranks: list[int]) -> None:
    named = dict(model.named_parameters())
    first = torch.optim.SGD([named["0.weight"], named["4.bias"]], lr=0.05, momentum=0.9)
    second = torch.optim.Adam([p for n, p in named.items() if n[0] == "2"], lr=0.05, eps=1e-3)
    for number in range(4):
        model.zero_grad()
        mean_loss(model, ranks, number).backward()
        first.step()
        if number % 2:
            second.step()


def with_schedulers(model: nn.Module, ranks: list[int]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [2])
    for number in range(4):
        optimizer.zero_grad()
        mean_loss(model, ranks, number).backward()
        optimizer.step()
        scheduler.step()


def with_a_closure(model: nn.Module, ranks: list[int]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-3)
    for number in range(3):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss = mean_loss(model, ranks, number)
            loss.backward()
            return loss

        optimizer.step(closure)


def a_group_that_is_added_later(model: nn.Module, ranks: list[int]) -> None:
    head = [p for name, p in model.named_parameters() if name[0] == "4"]
    optimizer = torch.optim.SGD(head, lr=0.1)
    for number in range(4):
        if number == 2:
            optimizer.add_param_group({"params": [dict(model.named_parameters())["0.weight"]]})
        model.zero_grad()
        mean_loss(model, ranks, number).backward()
        optimizer.step()


def a_step_that_fails(model: nn.Module, ranks: list[int]) -> None:
    """After it has written; the loop goes on."""

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            if number == 1:
                raise ArithmeticError("a bad step")

    optimizer = Fails(model.parameters(), lr=0.05)
    for number in range(4):
        optimizer.zero_grad()
        mean_loss(model, ranks, number).backward()
        try:
            optimizer.step()
        except ArithmeticError:
            assert number == 1


def saved_and_loaded(model: nn.Module, ranks: list[int]) -> None:
    def make() -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-3)

    optimizer = make()
    for number in range(4):
        optimizer.zero_grad()
        mean_loss(model, ranks, number).backward()
        optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        optimizer = make()
        optimizer.load_state_dict(torch.load(file, weights_only=True))


WORK: dict[str, Train] = {
    train.__name__.replace("_", " "): train
    for train in (
        *(in_groups_by_name, two_optimizers, with_schedulers, with_a_closure),
        *(a_group_that_is_added_later, a_step_that_fails, saved_and_loaded),
    )
}


@pytest.mark.checkered
@way
@pytest.mark.parametrize("train", WORK.values(), ids=WORK)
def test_training_is_that_of_the_plain_model(train: Train, strategy: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> dict[str, Tensor]:
        fsdp = FSDP(model, backend, strategy=strategy)
        train(fsdp, [backend.rank])
        return fsdp.full_state_dict()

    plain = mlp()
    train(plain, list(range(RANKS)))
    for state in on_ranks(where, RANKS, mlp, body):
        assert_close(state, plain.state_dict(), rtol=1e-4, atol=1e-5)


@way
def test_parameters_are_the_same_objects_for_the_whole_run(strategy: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> dict[str, Tensor]:
        before = dict(model.named_parameters())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-3)  # before FSDP
        fsdp = FSDP(model, backend, strategy=strategy)

        def check() -> None:
            now = list(fsdp.named_parameters())
            assert [name for name, _ in now] == list(before)
            assert all(p is before[name] for name, p in now)
            assert all(type(p) is nn.Parameter and p.is_leaf for _, p in now)
            whole = strategy is NO_SHARD
            assert all(p.dim() == 1 or whole for _, p in now)

        check()
        for number in range(3):
            optimizer.zero_grad()
            loss = mean_loss(fsdp, [backend.rank], number)
            check()
            loss.backward()
            check()
            optimizer.step()
            for p, state in optimizer.state.items():
                assert state["exp_avg"].shape == p.shape
        state = fsdp.full_state_dict()
        check()
        with fsdp.summon_full_params():
            check()
        plain = fsdp.unwrap()
        assert all(p is before[name] for name, p in plain.named_parameters())
        return state

    plain = mlp()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.05, eps=1e-3)
    for number in range(3):
        optimizer.zero_grad()
        mean_loss(plain, list(range(RANKS)), number).backward()
        optimizer.step()
    for state in on_ranks(where, RANKS, mlp, body):
        assert_close(state, values(plain), rtol=1e-4, atol=1e-5)


def test_the_state_of_all_ranks_together_is_as_large_as_the_model_s():
    def body(model: nn.Module, backend: Backend) -> int:
        fsdp = FSDP(model, backend)
        optimizer = torch.optim.Adam(fsdp.parameters())
        mean_loss(fsdp, [backend.rank], 0).backward()
        optimizer.step()
        return sum(state["exp_avg"].numel() for state in optimizer.state.values())

    total = sum(p.numel() for p in mlp().parameters())
    found = on_ranks(COOPERATIVE, RANKS, mlp, body)
    assert sum(found) == total
    assert max(found) - min(found) <= 3  # groups


class Lion(torch.optim.Optimizer):
    """Elementwise, and not torch's."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad.sign(), alpha=self.param_groups[0]["lr"])


class Scheduled(torch.optim.AdamW):
    """An elementwise one of torch, by another name."""


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_an_optimizer_that_is_not_known_to_be_elementwise_is_refused_on_every_rank(
    strategy: ShardingStrategy,
):
    """It names what takes such an optimizer, and what says that it is one."""

    def body(model: nn.Module, backend: Backend) -> list[BaseException | None]:
        fsdp = FSDP(model, backend, strategy=strategy)
        before = [p.detach().clone() for p in fsdp.parameters()]
        mean_loss(fsdp, [backend.rank], 0).backward()
        refused = [
            torch.optim.Adafactor(fsdp.parameters(), lr=0.1),
            Lion(fsdp.parameters(), {"lr": 0.1}),
        ]
        errors = [outcome_of(optimizer.step) for optimizer in refused]
        if strategy is not NO_SHARD:
            assert all(map(torch.equal, fsdp.parameters(), before))
        Scheduled(fsdp.parameters()).step()
        fsdp.elementwise = True
        refused[1].step()
        return errors

    for rank, errors in enumerate(on_ranks(COOPERATIVE, 2, mlp, body)):
        for error, name in zip(errors, ["Adafactor", "Lion"], strict=True):
            assert (error is None) == (strategy is NO_SHARD)
            if error is not None:
                assert str(error).startswith(f"rank {rank}: FSDP: {name} has flat shards")
                assert f"phalanx.ShardedOptimizer({name}, model" in str(error)
                assert "elementwise=True" in str(error)


@pytest.mark.parametrize("where", [COMMON, MESSAGES], ids=["common", "messages"])
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP], ids=str)
def test_values_may_be_written_by_hand_inside_writing(strategy: ShardingStrategy, where: Any):
    """Even in ways of which torch keeps no count."""

    def body(model: nn.Module, backend: Backend) -> dict[str, Tensor]:
        fsdp = FSDP(model, backend, strategy=strategy)
        for number in range(3):
            fsdp.zero_grad()
            mean_loss(fsdp, [backend.rank], number).backward()
            with fsdp.writing():
                for p in fsdp.parameters():
                    assert p.grad is not None
                    p.data.sub_(p.grad, alpha=0.05)
        with torch.no_grad():
            fsdp(noise(4, 6))
        return fsdp.full_state_dict()

    plain = mlp()
    for number in range(3):
        plain.zero_grad()
        mean_loss(plain, list(range(RANKS)), number).backward()
        with torch.no_grad():
            for p in plain.parameters():
                p.sub_(p.grad, alpha=0.05)
    for state in on_ranks(where, RANKS, mlp, body):
        assert_close(state, plain.state_dict())


@pytest.mark.parametrize("where", [COMMON, MESSAGES], ids=["common", "messages"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_values_that_torch_counts_as_written_are_noticed(strategy: ShardingStrategy, where: Any):
    def body(model: nn.Module, backend: Backend) -> Tensor:
        fsdp = FSDP(model, backend, strategy=strategy)
        fsdp(noise(4, 6))
        backend.barrier()
        with torch.no_grad():
            for p in fsdp.parameters():
                p.mul_(2)
        return fsdp(noise(4, 6)).detach()

    plain = mlp()
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(2)
    for found in on_ranks(where, RANKS, mlp, body):
        torch.testing.assert_close(found, plain(noise(4, 6)).detach())


def test_after_a_step_that_failed_the_next_one_waits_for_readers_again():
    """Where parameters are in common: ranks meet before each step, whatever became of the last."""

    def body(model: nn.Module, backend: Backend) -> list[int]:
        class Fails(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                if number == 1:
                    super().step()
                    raise ArithmeticError("a bad step")
                super().step()

        fsdp = FSDP(model, backend)
        optimizer = Fails(fsdp.parameters(), lr=0.05)
        watched = Watched(backend)
        met = []
        for number in range(4):
            mean_loss(fsdp, [backend.rank], number).backward()
            watched.clear()
            outcome_of(optimizer.step)
            met.append(len([event for event in watched.events if event.startswith("barrier")]))
        return met

    assert on_ranks(COMMON, 2, mlp, body) == [[2, 1, 2, 2]] * 2


def test_gradients_are_parts_of_the_gradients_of_the_plain_model():
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        mean_loss(fsdp, [0], 0).backward()
        plain = mlp()
        mean_loss(plain, [0], 0).backward()
        wanted, slices = gradients(plain), fsdp.slices()
        for name, p in fsdp.named_parameters():
            where = slices[name]
            part = wanted[name].flatten()[where.start : where.stop]
            assert p.grad is not None
            assert p.grad.shape == p.shape
            assert p.grad.dtype == p.dtype
            torch.testing.assert_close(p.grad, part)

    on_ranks(COOPERATIVE, RANKS, mlp, body)
