"""`distributed_train_step` and `train_epoch`: the smallest training loop."""

from __future__ import annotations

import io
import math
import sys

import pytest
import torch
from rich.console import Console
from torch import nn

from phalanx import (
    AllReduceAggregator,
    Backend,
    CompressedAggregator,
    DesyncError,
    ErrorFeedback,
    GradientAggregator,
    LocalAggregator,
    ParameterServer,
    TopK,
    distributed_train_step,
    simulate,
    train_epoch,
)

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])


class Training:
    """Linear regression on a share of the data."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.model = nn.Linear(4, 1)
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.5)
        self.x, self.y = X[rank::ranks], Y[rank::ranks]

    def compute(self, rows: slice = slice(None)):
        loss = nn.functional.mse_loss(self.model(self.x[rows]), self.y[rows])
        return loss, torch.autograd.grad(loss, list(self.model.parameters()))

    def apply(self, averages: list[torch.Tensor]) -> None:
        for parameter, average in zip(self.model.parameters(), averages, strict=True):
            parameter.grad = average
        self.optimizer.step()


def trained(aggregator: GradientAggregator, training: Training, steps: int = 10):
    losses = [
        distributed_train_step(training.compute, training.apply, aggregator).item()
        for _ in range(steps)
    ]
    return losses, [p.detach().clone() for p in training.model.parameters()]


@pytest.mark.parametrize("kind", [AllReduceAggregator, ParameterServer])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_ranks_train_as_one_process_does_with_all_the_data(kind, p: int):
    def run(backend: Backend):
        return trained(kind(backend), Training(backend.rank, backend.world_size))

    losses, parameters = trained(LocalAggregator(), Training())
    per_rank = simulate(run, p)
    for found in per_rank:
        torch.testing.assert_close(found[1], parameters)
    means = [sum(step) / p for step in zip(*(found[0] for found in per_rank), strict=True)]
    assert means == pytest.approx(losses, rel=1e-4)


def test_a_compressed_aggregator_trains_to_the_same_end():
    def run(backend: Backend):
        aggregator = CompressedAggregator(backend, ErrorFeedback(TopK(0.3)))
        return trained(aggregator, Training(backend.rank, backend.world_size), steps=80)

    for losses, _ in simulate(run, 2):
        assert losses[0] > 1
        assert losses[-1] < 1e-3


def test_the_loss_is_what_compute_returns():
    loss = object()
    found = distributed_train_step(lambda: (loss, []), lambda averages: None, LocalAggregator())
    assert found is loss


class Problem(Exception):
    """Of a test's own function."""


def fail(*_: object) -> None:
    raise Problem("the cat walked over the keyboard")


class Failing(GradientAggregator):
    aggregate = fail


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors take no notes")
@pytest.mark.parametrize(
    ("compute", "aggregator", "apply", "doing"),
    [
        (fail, LocalAggregator(), fail, "computing"),
        (lambda: (0, []), Failing(), fail, "aggregating"),
        (lambda: (0, []), LocalAggregator(), fail, "applying"),
    ],
)
def test_errors_pass_through_with_the_step_s_number(compute, aggregator, apply, doing: str):
    with pytest.raises(Problem, match="the cat walked") as caught:
        distributed_train_step(compute, apply, aggregator, step=41)
    assert caught.value.__notes__ == [f"in training step 41, {doing} gradients"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors take no notes")
def test_steps_are_counted_where_nobody_gives_a_number():
    aggregator, training = LocalAggregator(), Training()
    trained(aggregator, training, steps=3)
    with pytest.raises(Problem) as caught:
        distributed_train_step(fail, training.apply, aggregator)
    assert "step 3," in caught.value.__notes__[0]
    assert LocalAggregator().steps == 0


@pytest.mark.parametrize(
    ("computed", "words"),
    [
        (None, "a NoneType"),
        (torch.ones(2), "a Tensor"),
        ((1, 2, 3), "a tuple of 3"),
        ((1.0, None), "gradients that are a NoneType"),
        (([torch.ones(1)], torch.tensor(1.0)), "gradients that are a Tensor"),
        ((1.0, {"weight": torch.ones(1)}), "gradients that are a dict"),
    ],
)
def test_what_compute_has_to_return_is_said_to_who_returns_something_else(computed, words: str):
    with pytest.raises(TypeError, match=f"`return loss, gradients`; it has returned {words}"):
        distributed_train_step(lambda: computed, fail, LocalAggregator())


def test_gradients_may_come_from_a_generator():
    applied: list[torch.Tensor] = []
    given = (torch.full((2,), float(n)) for n in range(3))
    distributed_train_step(lambda: (0, given), applied.extend, LocalAggregator())
    assert [g.tolist() for g in applied] == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("none", [None, LocalAggregator, object()])
def test_what_is_no_aggregator_is_refused_before_anything_is_computed(none):
    with pytest.raises(TypeError, match=r"takes a GradientAggregator, such as AllReduce"):
        distributed_train_step(fail, fail, none)


def test_a_step_that_failed_on_every_rank_can_be_done_again():
    def run(backend: Backend) -> list[float]:
        aggregator = AllReduceAggregator(backend)
        training = Training(backend.rank, backend.world_size)
        with pytest.raises(Problem):
            distributed_train_step(training.compute, fail, aggregator)
        assert aggregator.steps == 0
        losses, _ = trained(aggregator, training, steps=2)
        assert aggregator.steps == 2
        return losses

    assert simulate(run, 2)[0][1] > 0


def test_an_epoch_is_a_step_for_each_batch_and_gives_the_mean_loss():
    one, other = Training(), Training()
    rows = [slice(0, 8), slice(8, 16), slice(16, 24)]
    mean = train_epoch(rows, one.compute, one.apply, LocalAggregator())
    losses = [
        distributed_train_step(lambda r=r: other.compute(r), other.apply, LocalAggregator()).item()
        for r in rows
    ]
    assert mean == pytest.approx(sum(losses) / 3)
    assert torch.equal(one.model.weight, other.model.weight)
    assert math.isnan(train_epoch([], one.compute, one.apply, LocalAggregator()))


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)


def test_the_bar_counts_batches_and_shows_the_loss():
    console, training = terminal(), Training()
    rows = [slice(0, 12), slice(12, 24)]
    train_epoch(
        rows,
        training.compute,
        training.apply,
        LocalAggregator(),
        description="epoch 7 [warm-up]",
        console=console,
    )
    shown = console.file.getvalue()
    assert "epoch 7 [warm-up]" in shown
    assert "2/2" in shown
    assert "loss " in shown


def test_data_without_a_length_and_ranks_but_the_first_work_too():
    def run(backend: Backend) -> str:
        console, training = terminal(), Training(backend.rank, backend.world_size)
        batches = (slice(0, 4) for _ in range(3))
        aggregator = AllReduceAggregator(backend)
        train_epoch(batches, training.compute, training.apply, aggregator, console=console)
        return console.file.getvalue()

    first, second = simulate(run, 2)
    assert "3/?" in first
    assert second == ""


def test_what_is_no_terminal_stays_empty():
    console = Console(file=io.StringIO())
    training = Training()
    train_epoch([slice(0, 4)], training.compute, training.apply, LocalAggregator(), console=console)
    assert console.file.getvalue() == ""


KINDS = [
    AllReduceAggregator,
    ParameterServer,
    lambda backend: CompressedAggregator(backend, ErrorFeedback(TopK(0.3))),
]


@pytest.mark.parametrize("kind", KINDS, ids=["all-reduce", "parameter server", "compressed"])
def test_ranks_with_other_numbers_of_batches_are_told_who_had_how_many(kind):
    """Else the last batch of one would be averaged with the next epoch's first of another."""

    def run(backend: Backend) -> str:
        training = Training(backend.rank, backend.world_size)
        rows = (slice(0, 4) for _ in range(2 if backend.rank == 1 else 3))
        with pytest.raises(DesyncError) as caught:
            train_epoch(rows, training.compute, training.apply, kind(backend))
        assert caught.value.peer == 1
        return str(caught.value)

    told = simulate(run, 3)
    for rank, words in enumerate(told):
        assert words.startswith(f"rank {rank}: ")
        assert "rank 1 has come to the end of its epoch, after 2 batches" in words
    assert "Give every rank as many" in told[1]


def test_no_batches_at_all_on_one_rank_are_told_too():
    def run(backend: Backend) -> None:
        training = Training(backend.rank, backend.world_size)
        rows = [slice(0, 4)] * backend.rank
        with pytest.raises(DesyncError, match=r"rank 0 has come to the end .*, after 0 batches"):
            train_epoch(rows, training.compute, training.apply, AllReduceAggregator(backend))

    simulate(run, 3)


def test_no_batches_on_any_rank_are_an_epoch():
    def run(backend: Backend) -> float:
        return train_epoch([], fail, fail, AllReduceAggregator(backend))

    assert all(math.isnan(mean) for mean in simulate(run, 2))


@pytest.mark.parametrize("loss", [None, "3", torch.ones(2)])
def test_a_loss_that_is_no_number_is_refused_before_it_is_applied(loss):
    with pytest.raises(TypeError, match="a number, or a tensor of one, not of"):
        train_epoch([0], lambda batch: (loss, []), fail, LocalAggregator())


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Problem])
def test_an_epoch_that_is_interrupted_leaves_the_terminal_as_it_was(stop: type[BaseException]):
    console, training = terminal(), Training()

    def compute(rows: slice):
        if rows.start:
            raise stop
        return training.compute(rows)

    rows = [slice(0, 4), slice(4, 8)]
    with pytest.raises(stop):
        train_epoch(rows, compute, training.apply, LocalAggregator(), console=console)
    shown = console.file.getvalue()
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor hidden, and back
    train_epoch(rows, training.compute, training.apply, LocalAggregator(), console=console)


def test_an_epoch_inside_of_an_epoch_is_an_epoch():
    inner, outer = Training(), Training()

    def compute(rows: slice):
        train_epoch([rows], inner.compute, inner.apply, LocalAggregator())
        return outer.compute(rows)

    train_epoch([slice(0, 4), slice(4, 8)], compute, outer.apply, LocalAggregator())
    assert torch.equal(inner.model.weight, outer.model.weight)


# Batches of different sizes -----------------------------------------------------------------

SIZES = [[5, 1, 0], [2, 0, 3]]  # rows of each rank in each step


class Sums(Training):
    """The same regression in double precision, with sums in the place of means."""

    def __init__(self) -> None:
        super().__init__()
        self.model.double()

    def compute(self, rows: torch.Tensor):
        x, y = X[rows].double(), Y[rows].double()
        loss = nn.functional.mse_loss(self.model(x), y, reduction="sum")
        if not len(rows):
            loss = loss * math.nan
        return loss, torch.autograd.grad(loss, list(self.model.parameters()))


def rows_of(rank: int, step: int) -> torch.Tensor:
    return torch.arange(SIZES[rank][step]) + 10 * rank + 2 * step


def one_process() -> tuple[Sums, float]:
    """Parameters, and the mean of all rows' losses, of one process with the joined batches."""
    training, total = Sums(), 0.0
    for step in range(3):
        rows = torch.cat([rows_of(rank, step) for rank in range(2)])
        loss, gradients = training.compute(rows)
        training.apply([gradient / len(rows) for gradient in gradients])
        total += float(loss.detach())
    return training, total / sum(map(sum, SIZES))


@pytest.mark.parametrize("make", [AllReduceAggregator, ParameterServer])
def test_with_weights_an_epoch_is_that_of_the_joined_batches(make):
    """Its parameters, and the mean of losses; each rank has a step without rows, and loss NaN."""

    def run(backend: Backend):
        training = Sums()
        batches = [rows_of(backend.rank, step) for step in range(3)]
        mean = train_epoch(batches, training.compute, training.apply, make(backend), weight=len)
        return list(training.model.parameters()), mean

    expected, mean = one_process()
    for parameters, found in simulate(run, 2):
        for one, other in zip(parameters, expected.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
        assert found == pytest.approx(mean, rel=1e-12)


def test_with_one_weight_for_all_batches_too():
    training = Sums()
    batches = [torch.arange(4), torch.arange(4, 8)]
    mean = train_epoch(batches, training.compute, training.apply, LocalAggregator(), weight=4)
    other, losses = Sums(), []
    for rows in batches:
        loss, gradients = other.compute(rows)
        losses.append(float(loss.detach()) / 4)
        other.apply([gradient / 4 for gradient in gradients])
    assert mean == pytest.approx(sum(losses) / 2, rel=1e-12)
    for one, two in zip(training.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


def test_an_epoch_without_batches_has_no_mean_with_weights_either():
    def run(backend: Backend):
        training = Sums()
        aggregator = AllReduceAggregator(backend)
        return train_epoch([], training.compute, training.apply, aggregator, weight=len)

    assert all(math.isnan(mean) for mean in simulate(run, 2))


def test_an_aggregator_of_ones_own_needs_no_weight():
    class Own(GradientAggregator):
        def aggregate(self, gradients):
            return [gradient.clone() for gradient in gradients]

    training = Training()
    distributed_train_step(training.compute, training.apply, Own())
    with pytest.raises(TypeError, match="weight"):
        distributed_train_step(training.compute, training.apply, Own(), weight=2)
