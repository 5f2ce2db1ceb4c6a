"""`join`: ranks with fewer batches, or none, answer those that have more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clusters import Cluster
from ddp_models import Branches, DefinedBackwards, Fails, loss_of, mlp, noise, seeded, vectors
from ddp_runs import Watched, assert_close, assert_same_bits, gradients, outcome_of, values
from torch import Tensor, nn

from phalanx import DDP, Backend, DesyncError, MisuseError, PeerLostError, simulate
from phalanx.parallel import convert_sync_batchnorm

COUNTS = [(3, 1), (0, 2), (2, 0), (4, 2, 3), (0, 0, 2), (2, 2, 2), (0, 0), (1, 5, 0, 2), (3,)]
EXACT = {"rtol": 1e-11, "atol": 1e-13}


def build() -> nn.Module:
    return mlp().double()


def batch(rank: int, number: int, rows: int = 3) -> tuple[Tensor, Tensor]:
    x, y = vectors(rows, 100 * rank + number)
    return x.double(), y.double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(ddp: DDP, rank: int, count: int, **options: Any) -> None:
    optimizer = optimizer_of(ddp)
    with ddp.join(**options):
        for number in range(count):
            optimizer.zero_grad()
            x, y = batch(rank, number)
            loss_of(ddp(x), y).backward()
            optimizer.step()


def reference(counts: tuple[int, ...], divide_by_all: bool = False) -> dict[str, Tensor]:
    """One process that in each step has the batches of the ranks that have one."""
    model = build()
    optimizer = optimizer_of(model)
    for number in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if number < count]
        optimizer.zero_grad()
        for rank in active:
            x, y = batch(rank, number)
            (loss_of(model(x), y) / (len(counts) if divide_by_all else len(active))).backward()
        optimizer.step()
    return values(model)


@pytest.mark.checkered
@pytest.mark.parametrize("bucket_size", [1, 1 << 20])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_parameters_are_those_of_training_on_the_joined_batches(counts, bucket_size, seed):
    def run(backend: Backend) -> dict[str, Tensor]:
        ddp = DDP(build(), backend, bucket_size=bucket_size)
        train(ddp, backend.rank, counts[backend.rank])
        return values(ddp)

    found = list(simulate(run, len(counts), seed))
    assert_same_bits(found)
    assert_close(found[0], reference(counts), **EXACT)


@pytest.mark.parametrize("counts", [(3, 1), (0, 2, 4)], ids=str)
def test_sums_may_be_divided_by_the_number_of_all_ranks(counts: tuple[int, ...]):
    def run(backend: Backend) -> dict[str, Tensor]:
        ddp = DDP(build(), backend)
        train(ddp, backend.rank, counts[backend.rank], divide_by_initial_world_size=True)
        return values(ddp)

    for found in simulate(run, len(counts)):
        assert_close(found, reference(counts, divide_by_all=True), **EXACT)


def test_it_works_on_every_kind_of_backend(cluster: Cluster):
    counts = (2, 0, 3)
    models = [build() for _ in counts]

    def run(backend: Backend) -> dict[str, Tensor]:
        ddp = DDP(models[backend.rank], backend, bucket_size=1)
        train(ddp, backend.rank, counts[backend.rank])
        return values(ddp)

    for found in cluster.run(run, 3):
        assert_close(found, reference(counts), **EXACT)


@pytest.mark.parametrize("divide_by_all", [True, False])
def test_weighted_losses_of_the_ranks_that_have_one_are_those_of_their_joined_batch(divide_by_all):
    counts, rows = (2, 0, 3), (1, 9, 4)

    def run(backend: Backend) -> dict[str, Tensor]:
        ddp = DDP(build(), backend)
        optimizer = optimizer_of(ddp)
        with ddp.join(divide_by_initial_world_size=divide_by_all):
            for number in range(counts[backend.rank]):
                optimizer.zero_grad()
                x, y = batch(backend.rank, number, rows[backend.rank])
                ddp.weighted(loss_of(ddp(x), y), len(x)).backward()
                optimizer.step()
        return values(ddp)

    model = build()
    optimizer = optimizer_of(model)
    for number in range(3):
        own = [batch(r, number, rows[r]) for r in range(3) if number < counts[r]]
        optimizer.zero_grad()
        loss_of(model(torch.cat([x for x, _ in own])), torch.cat([y for _, y in own])).backward()
        optimizer.step()
    for found in simulate(run, 3):
        assert_close(found, values(model), **EXACT)


class Counting(nn.Module):
    """A buffer that counts forward passes, and starts with the rank's own number."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("passes", torch.tensor(float(start)))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        return self.layer(x)


@pytest.mark.parametrize("counts", [(1, 4), (0, 2, 3), (3, 0)], ids=str)
def test_buffers_are_those_of_a_rank_that_still_has_batches(counts: tuple[int, ...]):
    def run(backend: Backend) -> float:
        ddp = DDP(Counting(100 * backend.rank), backend)
        with ddp.join():
            for _ in range(counts[backend.rank]):
                ddp.zero_grad()
                ddp(noise(2, 6)).sum().backward()
        return ddp.module.passes.item()

    assert list(simulate(run, len(counts))) == [max(counts)] * len(counts)


def test_forward_passes_in_eval_mode_concern_nobody():
    def run(backend: Backend) -> None:
        ddp = DDP(Counting(0), backend)
        with ddp.join():
            for _ in range(backend.rank + 1):
                ddp(noise(2, 6)).sum().backward()
                ddp.eval()
                with torch.no_grad():
                    ddp(noise(2, 6))
                ddp.train()

    simulate(run, 3)


def test_a_second_epoch_and_training_without_join_go_on_from_equal_parameters():
    def run(backend: Backend) -> dict[str, Tensor]:
        ddp = DDP(build(), backend, check_replicas_every=1)
        for epoch in range(2):
            train(ddp, backend.rank, 1 + (backend.rank + epoch) % 3)  # a new optimizer each time
        x, y = batch(backend.rank, 50)
        loss_of(ddp(x), y).backward()
        return gradients(ddp)

    assert_same_bits(list(simulate(run, 3)))


@pytest.mark.parametrize("epochs", [[(3, 1, 0), (1, 2, 4)], [(0, 2, 2), (3, 3, 3), (1, 0, 0)]])
def test_with_step_the_optimizers_and_schedules_of_all_ranks_stay_the_same(epochs):
    def prepared(model: nn.Module):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

        def step() -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

        return optimizer, step

    def run(backend: Backend) -> tuple[dict[str, Tensor], Any]:
        ddp = DDP(build(), backend, check_replicas_every=1)
        optimizer, step = prepared(ddp)
        for counts in epochs:
            with ddp.join(step):
                for number in range(counts[backend.rank]):
                    x, y = batch(backend.rank, number)
                    loss_of(ddp(x), y).backward()
                    step()
        state = optimizer.state_dict()
        return values(ddp), {f"{i} {k}": v for i, s in state["state"].items() for k, v in s.items()}

    model = build()
    _, step = prepared(model)
    for counts in epochs:
        for number in range(max(counts)):
            active = [rank for rank in range(3) if number < counts[rank]]
            for rank in active:
                x, y = batch(rank, number)
                (loss_of(model(x), y) / len(active)).backward()
            step()
    ranks = list(simulate(run, 3))
    assert_same_bits([parameters for parameters, _ in ranks])
    assert_same_bits([state for _, state in ranks])
    assert_close(ranks[0][0], values(model), rtol=1e-9, atol=1e-11)


def test_momentum_that_stayed_behind_is_found_by_the_comparison_of_replicas():
    def run(backend: Backend) -> BaseException | None:
        ddp = DDP(build(), backend, check_replicas_every=1)
        optimizer = optimizer_of(ddp)

        def epochs() -> None:
            for count in (1 + 2 * backend.rank, 2):
                with ddp.join():  # and no step
                    for number in range(count):
                        optimizer.zero_grad()
                        x, y = batch(backend.rank, number)
                        loss_of(ddp(x), y).backward()
                        optimizer.step()

        return outcome_of(epochs)

    for error in simulate(run, 3):
        assert isinstance(error, DesyncError)


def test_where_rank_0_has_no_batch_buckets_take_another_rank_s_order():
    def run(backend: Backend) -> list[list[str]]:
        ddp = DDP(seeded(DefinedBackwards), backend, bucket_size=1)
        watched, orders = Watched(backend), []
        with ddp.join():
            for number in range(2 * backend.rank):
                watched.clear()
                ddp(noise(4, 6, seed=number)).sum().backward()
                orders.append(watched.sizes())
        return orders

    _, orders = simulate(run, 2)
    last, first, middle = ["[3]", "[15]"], ["[4]", "[24]"], ["[5]", "[20]"]
    assert orders == [middle + first + last, last + middle + first]


@pytest.mark.parametrize("how", ["backward", "sync_gradients"])
def test_accumulation_works_inside(how: str):
    counts = (2, 1, 3)

    def run(backend: Backend) -> dict[str, Tensor]:
        ddp = DDP(build(), backend)
        optimizer = optimizer_of(ddp)
        with ddp.join():
            for number in range(counts[backend.rank]):
                optimizer.zero_grad()
                x, y = batch(backend.rank, number)
                with ddp.no_sync():
                    loss_of(ddp(x[:1]), y[:1]).div(3).backward()
                    if how == "sync_gradients":
                        loss_of(ddp(x[1:]), y[1:]).mul(2 / 3).backward()
                if how == "sync_gradients":
                    ddp.sync_gradients()
                else:
                    loss_of(ddp(x[1:]), y[1:]).mul(2 / 3).backward()
                optimizer.step()
        return values(ddp)

    for found in simulate(run, 3):
        assert_close(found, reference(counts), **EXACT)


def test_gradients_that_a_rank_leaves_accumulated_are_dropped():
    def run(backend: Backend) -> dict[str, Tensor | None]:
        ddp = DDP(build(), backend)
        with ddp.join():
            if backend.rank == 0:
                with ddp.no_sync():
                    loss_of(ddp(batch(0, 9)[0]), batch(0, 9)[1]).backward()
            else:
                x, y = batch(1, 0)
                loss_of(ddp(x), y).backward()
        ddp.sync_gradients()
        return gradients(ddp)

    plain = build()
    loss_of(plain(batch(1, 0)[0]), batch(1, 0)[1]).backward()
    for found in simulate(run, 2):
        assert_close(found, gradients(plain), **EXACT)


def test_unused_parameters_are_those_that_no_rank_with_a_batch_has_used():
    def run(backend: Backend) -> set[str]:
        ddp = DDP(seeded(Branches), backend, find_unused_parameters=True)
        unused = []
        with ddp.join():
            for number in range(2 + backend.rank):
                ddp.zero_grad()
                ddp(noise(2, 6, seed=number), "left").sum().backward()
                unused.append({name for name, grad in gradients(ddp).items() if grad is None})
        return unused

    for unused in simulate(run, 3):
        assert all(names == {"right.weight", "right.bias"} for names in unused)


def test_steps_that_are_not_finite_are_skipped_and_counted_by_ranks_without_a_batch_too():
    def run(backend: Backend) -> Any:
        ddp = DDP(build(), backend, skip_nonfinite=True)
        with ddp.join():
            for number in range(1 + backend.rank):
                ddp.zero_grad()
                x, y = batch(backend.rank, number)
                (loss_of(ddp(x), y) * (torch.inf if number == 2 else 1)).backward()
        return ddp.skipped_steps, ddp.last_skip

    assert list(simulate(run, 3)) == [(1, (2, {2: "0.weight"}))] * 3


def test_replicas_are_compared_among_the_ranks_that_have_a_batch():
    def run(backend: Backend) -> str:
        ddp = DDP(build(), backend, check_replicas_every=1)
        optimizer = optimizer_of(ddp)

        def train() -> None:
            with ddp.join():
                for number in range((1, 5, 5, 5)[backend.rank]):
                    if number == 4 and backend.rank == 2:
                        next(ddp.parameters()).data.view(-1)[0] += 1
                    x, y = batch(backend.rank, number)
                    optimizer.zero_grad()
                    loss_of(ddp(x), y).backward()
                    optimizer.step()

        return str(outcome_of(train))

    for text in simulate(run, 4):
        assert "after 5 backward passes" in text
        assert "0.weight of rank 2 is not that of the majority" in text


@pytest.mark.parametrize("counts", [(2, 3), (0, 1, 1), (4, 1, 3)], ids=str)
@pytest.mark.parametrize("buffers", [True, False])
def test_with_throw_every_rank_is_told_who_ran_out_first(counts: tuple[int, ...], buffers: bool):
    first = [rank for rank, count in enumerate(counts) if count == min(counts)]

    def run(backend: Backend) -> tuple[BaseException | None, int]:
        ddp = DDP(Counting(0) if buffers else mlp(), backend)
        done = []

        def train() -> None:
            with ddp.join(throw_on_early_termination=True):
                for number in range(counts[backend.rank]):
                    ddp(noise(2, 6, seed=number)).sum().backward()
                    done.append(number)

        return outcome_of(train), len(done)

    for error, done in simulate(run, len(counts)):
        assert isinstance(error, MisuseError)
        assert f"{', '.join(map(str, first))} ran out of batches" in str(error)
        assert error.peer == first[0]
        assert done == min(counts)


def test_with_throw_equal_numbers_of_batches_are_trained_to_the_end():
    def run(backend: Backend) -> dict[str, Tensor]:
        ddp = DDP(build(), backend)
        train(ddp, backend.rank, 3, throw_on_early_termination=True)
        return values(ddp)

    for found in simulate(run, 3):
        assert_close(found, reference((3, 3, 3)), **EXACT)


def test_a_model_with_sync_batch_norm_is_refused_unless_it_is_to_throw():
    def run(backend: Backend) -> BaseException | None:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        ddp = DDP(convert_sync_batchnorm(model, backend), backend, broadcast_buffers=False)
        with pytest.raises(MisuseError, match="1, a SyncBatchNorm"), ddp.join():
            pass

        def train() -> None:
            with ddp.join(throw_on_early_termination=True):
                for number in range(2 + backend.rank):
                    with ddp.no_sync():
                        ddp(noise(3, 6, seed=number)).sum().backward()

        return outcome_of(train)

    for error in simulate(run, 2):
        assert isinstance(error, MisuseError)
        assert "rank 0 ran out of batches" in str(error)


def test_a_step_costs_one_message_of_16_bytes_more():
    def run(backend: Backend) -> list[tuple[list[str], int]]:
        ddp = DDP(mlp(), backend)
        ddp(noise(2, 6)).sum().backward()
        watched = Watched(backend)

        def step() -> tuple[list[str], int]:
            watched.clear()
            ddp(noise(2, 6)).sum().backward()
            return [event.split()[0] for event in watched.events], watched.bytes_sent

        _, without = step()
        with ddp.join():
            names, sent = step()
        assert names == ["all_gather", "all_reduce"]
        return sent - without

    assert list(simulate(run, 2)) == [16, 16]


def test_an_error_inside_leaves_the_block_as_it_is_and_join_may_be_entered_again():
    def run(backend: Backend) -> dict[str, Tensor]:
        ddp = DDP(build(), backend)
        with pytest.raises(KeyError), ddp.join():
            raise KeyError
        train(ddp, backend.rank, 1 + backend.rank)
        return values(ddp)

    for found in simulate(run, 2):
        assert_close(found, reference((1, 2)), **EXACT)


def test_a_rank_that_waits_learns_that_another_is_lost():
    def run(backend: Backend) -> BaseException | None:
        ddp = DDP(build(), backend)
        if backend.rank == 1:
            backend.barrier()
            backend.abort()
            return None

        def wait() -> None:
            with ddp.join():
                backend.barrier()

        return outcome_of(wait)

    for rank, error in enumerate(simulate(run, 3)):
        if rank != 1:
            assert isinstance(error, PeerLostError)
            assert error.peer == 1


def test_join_inside_join_is_refused():
    def run(backend: Backend) -> None:
        ddp = DDP(build(), backend)
        with ddp.join(), pytest.raises(MisuseError, match="inside"), ddp.join():
            pass

    simulate(run, 2)


def test_ranks_that_do_different_things_inside_are_told():
    def run(backend: Backend) -> BaseException | None:
        ddp = DDP(build(), backend)
        x, y = batch(0, 0)

        def train() -> None:
            with ddp.join():
                loss = loss_of(ddp(x), y)
                (loss if backend.rank else ddp.weighted(loss, 3)).backward()

        return outcome_of(train)

    for error in simulate(run, 2):
        assert isinstance(error, DesyncError)
        assert "rank 0 weights a loss while rank 1 begins a backward pass" in str(error)


def test_a_rank_that_does_not_enter_is_told_and_so_are_the_others():
    def run(backend: Backend) -> BaseException | None:
        ddp = DDP(build(), backend)
        backend.barrier()
        if backend.rank:
            return outcome_of(lambda: train(ddp, backend.rank, 1))
        return outcome_of(lambda: loss_of(ddp(batch(0, 0)[0]), batch(0, 0)[1]).backward())

    for error in simulate(run, 2):
        assert isinstance(error, DesyncError)


def test_a_rank_that_leaves_after_a_backward_pass_that_failed_everywhere_answers():
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 3)])

        def forward(self, x: Tensor, fail: bool) -> Tensor:
            x = self.layers[0](x)
            return self.layers[1](Fails.apply(x) if fail else x)

    def run(backend: Backend) -> dict[str, Tensor | None]:
        ddp = DDP(seeded(Fragile), backend, bucket_size=1)
        with ddp.join():
            with pytest.raises(ArithmeticError):
                ddp(noise(2, 6), True).sum().backward()
            ddp.zero_grad()
            for number in range(2 * backend.rank):
                ddp.zero_grad()
                ddp(noise(2, 6, seed=number), False).sum().backward()
        return gradients(ddp)

    plain = seeded(Fragile)
    plain(noise(2, 6, seed=1), False).sum().backward()
    for found in simulate(run, 2):
        assert_close(found, gradients(plain))
