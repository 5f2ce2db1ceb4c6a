"""Sparse gradients, of `nn.Embedding(sparse=True)`: the mean has the rows of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clusters import Cluster
from ddp_models import seeded
from ddp_runs import assert_same_bits, gradients, outcome_of, values
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx import (
    DDP,
    Backend,
    DesyncError,
    ErrorFeedback,
    MisuseError,
    TopK,
    simulate,
)

RANKS = 3


class Words(nn.Module):
    """A table with sparse gradients, a bag of them, a dense table, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4, sparse=True)
        self.bags = nn.EmbeddingBag(9, 4, sparse=True, mode="sum")
        self.places = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor, *, bags: bool = True) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        if bags:
            x = x + self.bags(tokens % 9)[:, None]
        return self.head(x)


def words() -> Words:
    return seeded(Words)


def text(rank: int, number: int = 0) -> Tensor:
    """Of another length on each rank, and with words of its own; some twice."""
    draw = torch.Generator().manual_seed(100 * rank + number)
    return torch.randint(4 * rank, 4 * rank + 8, (2 + rank, 1 + 2 * rank), generator=draw)


def loss_of(model: nn.Module, tokens: Tensor, **options: Any) -> Tensor:
    return model(tokens, **options).square().mean()


def alone(*batches: tuple[int, int], divisor: int = RANKS, build=words, **options: Any):
    """The gradients of one process, over batches (rank, number)."""
    model = build()
    for batch in batches:
        (loss_of(model, text(*batch), **options) / divisor).backward()
    return gradients(model)


def assert_close(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        grad = found[name]
        if value is None or grad is None:
            assert grad is value, name
        elif value.is_sparse:
            assert grad.is_sparse, name
            assert grad.is_coalesced(), name
            torch.testing.assert_close(grad, value.coalesce())
        else:
            torch.testing.assert_close(grad, value)


OPTIONS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "many buckets": {"bucket_size": 1},
    "unused": {"find_unused_parameters": True},
    "finite": {"skip_nonfinite": True},
    "compressed": {"compression": ErrorFeedback(TopK(1.0))},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sparse_gradients_are_the_mean(options):
    def run(backend: Backend):
        ddp = DDP(words(), backend, **options)
        found = []
        for number in range(3):
            ddp.zero_grad()
            loss_of(ddp, text(backend.rank, number)).backward()
            found.append(gradients(ddp))
        return found

    ranks = list(simulate(run, RANKS))
    for number in range(3):
        one, *others = [found[number] for found in ranks]
        assert_close(one, alone(*((rank, number) for rank in range(RANKS))))
        for other in others:
            assert_same_bits([{n: g.to_dense() for n, g in each.items()} for each in (one, other)])


def test_sparse_gradients_on_every_kind_of_backend(cluster: Cluster):
    def run(backend: Backend):
        ddp = DDP(words(), backend)
        loss_of(ddp, text(backend.rank)).backward()
        return gradients(ddp)

    for found in cluster.run(run, RANKS):
        assert_close(found, alone((0, 0), (1, 0), (2, 0)))


def test_tables_train_with_sparse_adam_and_the_rest_with_adam():
    def train(model: nn.Module, plain: Words, ranks: list[int]) -> None:
        tables = [plain.words.weight, plain.bags.weight]
        optimizers = [
            torch.optim.SparseAdam(tables, lr=0.1),
            torch.optim.Adam([*plain.places.parameters(), *plain.head.parameters()], lr=0.1),
        ]
        for number in range(4):
            model.zero_grad()
            for rank in ranks:
                (loss_of(model, text(rank, number)) / len(ranks)).backward()
            for optimizer in optimizers:
                optimizer.step()

    def run(backend: Backend):
        ddp = DDP(words(), backend)
        train(ddp, ddp.module, [backend.rank])
        return values(ddp)

    plain = words()
    train(plain, plain, list(range(RANKS)))
    ranks = list(simulate(run, RANKS))
    assert_same_bits(ranks)
    for name, value in values(plain).items():
        torch.testing.assert_close(ranks[0][name], value, rtol=1e-4, atol=1e-5)


def test_accumulated_sparse_gradients_are_averaged_once():
    def run(backend: Backend):
        ddp = DDP(words(), backend)
        with ddp.no_sync():
            loss_of(ddp, text(backend.rank, 0)).backward()
        loss_of(ddp, text(backend.rank, 1)).backward()
        first = gradients(ddp)
        loss_of(ddp, text(backend.rank, 2)).backward()  # adds to what is averaged already
        second = gradients(ddp)
        ddp.zero_grad()
        with ddp.no_sync():
            loss_of(ddp, text(backend.rank, 0)).backward()
        ddp.sync_gradients()
        return first, second, gradients(ddp)

    def all_of(*numbers: int):
        return alone(*((rank, number) for number in numbers for rank in range(RANKS)))

    for first, second, third in simulate(run, RANKS):
        assert_close(first, all_of(0, 1))
        assert_close(second, all_of(0, 1, 2))
        assert_close(third, all_of(0))


@pytest.mark.parametrize("users", [[], [1], [0, 2]], ids=str)
def test_a_table_that_ranks_leave_out_has_no_rows_of_theirs(users: list[int]):
    def run(backend: Backend):
        ddp = DDP(words(), backend, find_unused_parameters=True)
        loss_of(ddp, text(backend.rank), bags=backend.rank in users).backward()
        return gradients(ddp)

    model = words()
    for rank in range(RANKS):
        (loss_of(model, text(rank), bags=rank in users) / RANKS).backward()
    for found in simulate(run, RANKS):
        assert_close(found, gradients(model))


def test_a_table_that_a_rank_leaves_out_is_named():
    def run(backend: Backend) -> BaseException | None:
        ddp = DDP(words(), backend)
        backend.barrier()
        return outcome_of(lambda: loss_of(ddp, text(0), bags=backend.rank > 0).backward())

    for error in simulate(run, RANKS):
        assert isinstance(error, MisuseError)
        assert "no gradient came for bags.weight" in str(error)


def test_ranks_without_a_batch_answer_with_no_rows():
    """Rank r has r + 1 batches."""

    def run(backend: Backend):
        ddp, found = DDP(words(), backend), []
        with ddp.join(lambda: found.append(gradients(ddp))):
            for number in range(backend.rank + 1):
                ddp.zero_grad()
                loss_of(ddp, text(backend.rank, number)).backward()
                found.append(gradients(ddp))
        return found

    for found in simulate(run, RANKS):
        for number in range(RANKS):
            batches = [(rank, number) for rank in range(number, RANKS)]
            assert_close(found[number], alone(*batches, divisor=len(batches)))


def test_rows_that_are_not_finite_skip_the_step_and_are_named():
    def run(backend: Backend):
        ddp = DDP(words(), backend, skip_nonfinite=True)
        scale = float("inf") if backend.rank == 1 else 1.0
        ddp.module.words.weight.register_hook(lambda grad: grad * scale)
        loss_of(ddp, text(backend.rank)).backward()
        assert set(gradients(ddp).values()) == {None}
        return ddp.last_skip

    for skip in simulate(run, RANKS):
        assert skip.parameters == {1: "words.weight"}


class Tied(nn.Module):
    """The table is the output layer, too: its gradient is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 4, sparse=True)

    def forward(self, tokens: Tensor, *, out: bool = True) -> Tensor:
        x = self.words(tokens)
        return F.linear(x, self.words.weight) if out else x


@pytest.mark.parametrize("users", [[0, 1, 2], [1]], ids=str)
def test_where_a_rank_has_a_dense_gradient_the_mean_is_dense(users: list[int]):
    def run(backend: Backend):
        ddp = DDP(seeded(Tied), backend)
        loss_of(ddp, text(backend.rank), out=backend.rank in users).backward()
        return gradients(ddp)

    model = seeded(Tied)
    for rank in range(RANKS):
        (loss_of(model, text(rank), out=rank in users) / RANKS).backward()
    for found in simulate(run, RANKS):
        assert_close(found, gradients(model))


def test_tables_may_be_frozen_and_unfrozen():
    def run(backend: Backend):
        ddp = DDP(words(), backend)
        found = []
        for frozen in (False, True, False):
            ddp.module.words.requires_grad_(not frozen)
            ddp.zero_grad()
            loss_of(ddp, text(backend.rank)).backward()
            found.append(gradients(ddp))
        return found

    expected = alone((0, 0), (1, 0), (2, 0))
    for first, second, third in simulate(run, RANKS):
        assert_close(first, expected)
        assert_close(second, {**expected, "words.weight": None})
        assert_close(third, expected)


def test_only_rows_are_sent():
    def run(backend: Backend) -> int:
        ddp = DDP(nn.Embedding(10_000, 4, sparse=True), backend)
        ddp(torch.tensor([[7, 8, 7]])).sum().backward()
        return ddp.bytes_sent

    count, rows, values_ = 8, 2 * 8, 2 * 4 * 4
    assert simulate(run, RANKS) == [(RANKS - 1) * (count + rows + values_)] * RANKS


def test_ranks_that_differ_in_what_is_sparse_are_told():
    def run(backend: Backend) -> BaseException | None:
        table = nn.Embedding(5, 4, sparse=backend.rank == 1)
        return outcome_of(lambda: DDP(table, backend))

    for error in simulate(run, 2):
        assert isinstance(error, DesyncError)
        assert "rank 1 has sparse=['weight']" in str(error)
