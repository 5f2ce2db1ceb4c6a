"""`join` of FSDP: ranks with fewer batches gather with those that have more, and give zeros."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from ddp_models import Branches, noise, seeded
from ddp_runs import gradients, outcome_of, values
from forms import sizes
from fsdp_runs import (
    COMMON,
    COOPERATIVE,
    FULL_SHARD,
    MESSAGES,
    NO_SHARD,
    SHARD_GRAD_OP,
    SHM,
    gradient_pieces,
    joined,
    on_ranks,
)
from joined_runs import assert_equal_to_rounding, batch, build, loss_on, sum_of_losses
from torch import Tensor, nn

import phalanx
from phalanx import DDP, FSDP, Backend, DesyncError, MisuseError, ShardingStrategy, simulate
from phalanx.parallel import convert_sync_batchnorm

HYBRID = ShardingStrategy.hybrid(2)
ROWS = 2
Counts = tuple[int, ...]


def mean_on(model: Any, rank: int, number: int) -> Tensor:
    return loss_on(model, rank, number, ROWS) / ROWS


def stepper(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """What follows a backward pass: Adam, a schedule, and a norm that is clipped."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step() -> None:
        if isinstance(model, FSDP):
            phalanx.clip_grad_norm_(model, 0.5)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return step


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05, eps=0.01)


def epoch_of_one_process(counts: Counts, epochs: int = 1, divide_by_all: bool = False) -> Any:
    model = build()
    step = stepper(model, adam(model))
    for epoch in range(epochs):
        for number in range(max(counts)):
            active = [rank for rank, count in enumerate(counts) if number < count]
            for rank in active:
                divisor = len(counts) if divide_by_all else len(active)
                (mean_on(model, rank, 50 * epoch + number) / divisor).backward()
            step()
    return values(model)


def uneven_epochs(
    model: nn.Module,
    backend: Backend,
    counts: Counts,
    strategy: Any,
    epochs: int = 1,
    **options: Any,
) -> dict[str, Tensor]:
    fsdp = FSDP(model, backend, strategy=strategy)
    step = stepper(fsdp, adam(fsdp))
    for epoch in range(epochs):
        with fsdp.join(step, **options):
            for number in range(counts[backend.rank]):
                mean_on(fsdp, backend.rank, 50 * epoch + number).backward()
                step()
    return fsdp.full_state_dict()


# Against one process ------------------------------------------------------------------------------

WAYS = [(FULL_SHARD, 3), (SHARD_GRAD_OP, 3), (NO_SHARD, 2), (HYBRID, 4)]


@pytest.mark.checkered
@pytest.mark.parametrize("where", [SHM, MESSAGES], ids=str)
@pytest.mark.parametrize(("strategy", "ranks"), WAYS, ids=str)
def test_an_epoch_in_which_rank_r_has_r_1_times_the_batches_is_that_of_one_process(
    strategy: ShardingStrategy, ranks: int, where: Any
):
    """The norm is clipped in the step, by ranks that wait, too."""
    for repeated in range(sizes(1, 20)):
        times = 1 + repeated % 2
        counts = tuple(times * (rank + 1) for rank in range(ranks))

        def body(model: nn.Module, backend: Backend, counts: Counts = counts) -> Any:
            return uneven_epochs(model, backend, counts, strategy)

        for state in on_ranks(where, ranks, build, body):
            assert_equal_to_rounding(state, epoch_of_one_process(counts), 1e-10)


@pytest.mark.checkered
@pytest.mark.parametrize("counts", [(3, 1), (0, 2, 0), (2, 0, 4, 1), (0, 0), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD], ids=str)
def test_any_ranks_may_be_through_first_and_a_second_epoch_follows(counts: Counts, strategy: Any):
    def body(model: nn.Module, backend: Backend) -> Any:
        return uneven_epochs(model, backend, counts, strategy, 2)

    expected = epoch_of_one_process(counts, 2)
    for state in on_ranks(COOPERATIVE, len(counts), build, body):
        assert_equal_to_rounding(state, expected, 1e-10)


def test_sums_may_be_divided_by_the_number_of_all_ranks():
    def body(model: nn.Module, backend: Backend) -> Any:
        options = {"divide_by_initial_world_size": True}
        return uneven_epochs(model, backend, (2, 0, 3), FULL_SHARD, **options)

    for state in on_ranks(COMMON, 3, build, body):
        assert_equal_to_rounding(state, epoch_of_one_process((2, 0, 3), 1, True), 1e-10)


@pytest.mark.checkered
@pytest.mark.parametrize("zeroed", ["in the loop", "by step", "never"])
@pytest.mark.parametrize("where", [COOPERATIVE, MESSAGES], ids=str)
def test_old_gradients_of_a_rank_that_waits_are_those_of_the_others(zeroed: str, where: Any):
    """Zero where theirs are, and added to where theirs are."""
    counts = (3, 1, 2)

    def train(model: Any, parts: Callable[[int], Any], joining: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step() -> None:
            optimizer.step()
            if zeroed == "by step":
                optimizer.zero_grad()

        with joining(step):
            for number in range(parts(-1)):
                if zeroed == "in the loop":
                    optimizer.zero_grad()
                parts(number)
                step()

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp, rank = FSDP(model, backend), backend.rank

        def part(number: int) -> Any:
            return mean_on(fsdp, rank, number).backward() if number >= 0 else counts[rank]

        train(fsdp, part, fsdp.join)
        return fsdp.full_state_dict()

    plain = build()

    def every(number: int) -> Any:
        active = [rank for rank, count in enumerate(counts) if number < count]
        for rank in active if number >= 0 else ():
            (mean_on(plain, rank, number) / len(active)).backward()
        return max(counts)

    train(plain, every, lambda step: nullcontext())
    for state in on_ranks(where, 3, build, body):
        assert_equal_to_rounding(state, values(plain), 1e-10)


@pytest.mark.checkered
@pytest.mark.parametrize("how", ["backward", "sync_gradients"])
@pytest.mark.parametrize("where", [COMMON, MESSAGES], ids=str)
def test_no_sync_inside_accumulates(how: str, where: Any):
    counts = (1, 0, 3)

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend)
        step = stepper(fsdp, adam(fsdp))
        with fsdp.join(step):
            for number in range(counts[backend.rank]):
                with fsdp.no_sync():
                    (mean_on(fsdp, backend.rank, number) / 4).backward()
                    if how == "sync_gradients":
                        (mean_on(fsdp, backend.rank, number) * 3 / 4).backward()
                if how == "sync_gradients":
                    fsdp.sync_gradients()
                else:
                    (mean_on(fsdp, backend.rank, number) * 3 / 4).backward()
                step()
        return fsdp.full_state_dict()

    for state in on_ranks(where, 3, build, body):
        assert_equal_to_rounding(state, epoch_of_one_process(counts), 1e-10)


def test_gradients_that_a_rank_leaves_accumulated_are_dropped():
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend)
        with fsdp.join(lambda: None):
            with fsdp.no_sync():
                mean_on(fsdp, backend.rank, 0).backward()
            if backend.rank:
                mean_on(fsdp, backend.rank, 1).backward()
        fsdp.sync_gradients()
        return gradient_pieces(fsdp)

    plain = build()
    mean_on(plain, 1, 0).backward()
    mean_on(plain, 1, 1).backward()
    assert_equal_to_rounding(joined(on_ranks(COOPERATIVE, 2, build, body)), gradients(plain))


def test_evaluation_several_passes_and_other_units_are_followed():
    """A rank that waits knows nothing of the passes, and takes part in each."""

    def branches() -> nn.Module:
        return seeded(Branches).double()

    def loss(model: Any, rank: int, number: int) -> Tensor:
        x, y = batch(rank, number, 2)
        with torch.no_grad():
            model(x, "left", "right")
        names = [("left",), ("right", "left"), ("right",)][number]
        return sum_of_losses(model(x, *names), y) + sum_of_losses(model(x + 1, *names), y)

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, prefetch=2)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.05)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            with fsdp.join(step):
                for number in range((1, 3, 0)[backend.rank]):
                    loss(fsdp, backend.rank, number).backward()
                    step()
        return fsdp.full_state_dict()

    plain = branches()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for _ in range(2):
        for number in range(3):
            active = [0, 1] if number == 0 else [1]
            for rank in active:
                (loss(plain, rank, number) / len(active)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for where in sizes([MESSAGES], [COOPERATIVE, MESSAGES]):
        for state in on_ranks(where, 3, branches, body):
            assert_equal_to_rounding(state, values(plain), 1e-10)


def test_optimizers_in_hooks_step_on_ranks_that_wait():
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend)
        for parameter in fsdp.parameters():
            own = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
            parameter.register_post_accumulate_grad_hook(
                lambda p, own=own: (own.step(), own.zero_grad())
            )
        with fsdp.join(lambda: None):
            for number in range(1 + 2 * backend.rank):
                mean_on(fsdp, backend.rank, number).backward()
        return fsdp.full_state_dict()

    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        active = [0, 1] if number == 0 else [1]
        for rank in active:
            (mean_on(plain, rank, number) / len(active)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in on_ranks(COOPERATIVE, 2, build, body):
        assert_equal_to_rounding(state, values(plain), 1e-10)


# What is refused, or found ------------------------------------------------------------------------


def test_without_step_it_is_refused_for_each_rank_steps_its_own_part():
    def run(backend: Backend) -> None:
        fsdp = FSDP(build(), backend)
        with pytest.raises(MisuseError, match=r"join\(\) needs step"), fsdp.join():
            pass
        mean_on(fsdp, backend.rank, 0).backward()  # nothing was begun

    simulate(run, 2)


@pytest.mark.parametrize("counts", [(2, 3), (0, 1, 1)], ids=str)
@pytest.mark.parametrize("where", [COOPERATIVE, MESSAGES], ids=str)
def test_with_throw_every_rank_is_told_who_ran_out_first(counts: Counts, where: Any):
    first = ", ".join(str(rank) for rank, count in enumerate(counts) if count == min(counts))

    def body(model: nn.Module, backend: Backend) -> tuple[BaseException | None, int]:
        fsdp, done = FSDP(model, backend), []

        def train() -> None:
            with fsdp.join(throw_on_early_termination=True):
                for number in range(counts[backend.rank]):
                    mean_on(fsdp, backend.rank, number).backward()
                    done.append(number)

        return outcome_of(train), len(done)

    for error, done in on_ranks(where, len(counts), build, body):
        assert isinstance(error, MisuseError)
        assert f"rank {first} ran out of batches" in str(error)
        assert done == min(counts)


def test_with_throw_equal_numbers_of_batches_are_trained_to_the_end():
    def body(model: nn.Module, backend: Backend) -> Any:
        options = {"throw_on_early_termination": True}
        return uneven_epochs(model, backend, (2, 2, 2), FULL_SHARD, **options)

    for state in on_ranks(COOPERATIVE, 3, build, body):
        assert_equal_to_rounding(state, epoch_of_one_process((2, 2, 2)), 1e-10)


def test_a_model_with_sync_batch_norm_is_refused():
    def run(backend: Backend) -> None:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        fsdp = FSDP(convert_sync_batchnorm(model, backend), backend)
        with pytest.raises(MisuseError, match="1, a SyncBatchNorm"), fsdp.join(lambda: None):
            pass

    simulate(run, 2)


@pytest.mark.parametrize("where", [COOPERATIVE, MESSAGES], ids=str)
def test_a_rank_that_does_not_enter_is_told_and_so_are_the_others(where: Any):
    def body(model: nn.Module, backend: Backend) -> BaseException | None:
        fsdp = FSDP(model, backend)
        backend.barrier()

        def train() -> None:
            if backend.rank:
                with fsdp.join(lambda: None):
                    mean_on(fsdp, 1, 0).backward()
            else:
                mean_on(fsdp, 0, 0).backward()

        return outcome_of(train)

    for error in on_ranks(where, 2, build, body):
        assert isinstance(error, DesyncError)


def test_an_error_inside_leaves_the_block_and_join_may_be_entered_again():
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend)
        step = stepper(fsdp, adam(fsdp))
        with pytest.raises(KeyError), fsdp.join(step):
            raise KeyError
        with fsdp.join(step):
            for number in range(1 + backend.rank):
                mean_on(fsdp, backend.rank, number).backward()
                step()
        return fsdp.full_state_dict()

    for state in on_ranks(COOPERATIVE, 2, build, body):
        assert_equal_to_rounding(state, epoch_of_one_process((1, 2)), 1e-10)


def test_buffers_stay_each_rank_s_own_as_always_with_fsdp():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("passes", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            return self.layer(x)

    def body(model: nn.Module, backend: Backend) -> float:
        fsdp = FSDP(model, backend)
        with fsdp.join(lambda: None):
            for _ in range(1 + 2 * backend.rank):
                fsdp(noise(2, 6)).sum().backward()
        return fsdp.module.passes.item()

    assert on_ranks(COOPERATIVE, 2, lambda: seeded(Counting), body) == [1.0, 3.0]


# DDP, in the same words ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", [SHM, MESSAGES], ids=str)
def test_ddp_s_epoch_in_which_rank_r_has_r_1_times_the_batches_is_that_of_one_process(where: Any):
    for _ in range(sizes(1, 20)):
        counts = (1, 2, 3)

        def body(model: nn.Module, backend: Backend, counts: Counts = counts) -> Any:
            ddp = DDP(model, backend)
            step = stepper(ddp, adam(ddp))
            with ddp.join(step):
                for number in range(counts[backend.rank]):
                    mean_on(ddp, backend.rank, number).backward()
                    step()
            return values(ddp)

        for state in on_ranks(where, 3, build, body):
            assert_equal_to_rounding(state, epoch_of_one_process(counts), 1e-10)
