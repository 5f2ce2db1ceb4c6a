"""A step that goes wrong: who is told what, and whether the group is whole afterwards."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clusters import Cluster, Tcp
from ddp_runs import outcome_of
from pipeline_runs import SCHEDULES, SIZE, batch, deep, piped
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx import (
    Backend,
    CollectiveTimeoutError,
    DesyncError,
    DistributedError,
    MisuseError,
    PeerLostError,
    Pipeline,
    SizeMismatchError,
    UnsupportedObjectError,
    simulate,
)

PATIENCE = 20.0


def told_before_anything_is_sent(size: int, step: Callable[[Backend, Pipeline], Any]) -> list[Any]:
    """The errors of a step on each rank; the next step trains as if nothing had been."""
    expected = F.mse_loss(deep()(batch(8)[0]), batch(8)[1]).item()

    def run(backend: Backend) -> BaseException | None:
        pipeline = piped(backend, deep())
        error = outcome_of(lambda: step(backend, pipeline))
        loss = pipeline.train_step(*batch(8), F.mse_loss).item()
        assert loss == pytest.approx(expected)
        return error

    return list(simulate(run, size))


def given(rank: int, inputs: Any, targets: Any, others: Any = None) -> Any:
    """A step in which one rank is given something else than the others."""

    def step(backend: Backend, pipeline: Pipeline) -> Any:
        usual = batch(8) if others is None else others
        own = (inputs, targets) if backend.rank == rank else usual
        return pipeline.train_step(*own, F.mse_loss)

    return step


X, Y = batch(8)
BAD_BATCHES = {
    "too few samples": (
        given(0, X[:3], Y[:3], (X[:3], Y[:3])),
        SizeMismatchError,
        "a batch of 3 samples cannot be 4 micro-batches",
    ),
    "no samples": (
        given(0, X[:0], Y[:0], (X[:0], Y[:0])),
        SizeMismatchError,
        "a batch of 0 samples",
    ),
    "more inputs than targets": (
        given(0, X, Y[:7], (X, Y[:7])),
        SizeMismatchError,
        "the inputs on rank 0 have 8 samples, the targets on rank 0 7",
    ),
    "another batch on one rank": (
        given(1, X[:6], Y[:6]),
        SizeMismatchError,
        "the inputs on rank 0 have 8 samples, the inputs on rank 1 6",
    ),
    "no inputs on the first rank": (
        given(0, None, Y),
        MisuseError,
        "there are no inputs, and this is the rank that uses them",
    ),
    "no targets on the last rank": (
        given(2, X, None),
        MisuseError,
        "there are no targets, and this is the rank that uses them",
    ),
    "inputs that are no tensor": (
        given(0, [X, "a word"], Y),
        UnsupportedObjectError,
        "inputs[1] is a str",
    ),
    "inputs without a first dim": (
        given(0, {"x": X, "scale": torch.tensor(2.0)}, Y),
        SizeMismatchError,
        "inputs['scale'] has no dim 0",
    ),
    "inputs of two lengths": (
        given(0, (X, Y[:5]), Y),
        SizeMismatchError,
        "inputs[0] has 8, inputs[1] has 5",
    ),
    "nothing in the inputs": (given(0, (), Y), SizeMismatchError, "inputs has no tensor in it"),
    "inputs that were computed": (
        given(0, X.clone().requires_grad_() * 2, Y),
        MisuseError,
        "detach() it, or put what computes it into the pipeline",
    ),
    "a loss that is none": (
        lambda backend, pipeline: pipeline.train_step(X, Y, "mse"),
        MisuseError,
        "the loss has to be a function",
    ),
    "a timeout that is none": (
        lambda backend, pipeline: pipeline.train_step(
            X, Y, F.mse_loss, timeout=-1 if backend.rank == 1 else None
        ),
        ValueError,
        "timeout must be a positive number of seconds",
    ),
    "one evaluates": (
        lambda backend, pipeline: (pipeline.evaluate if backend.rank == 1 else pipeline.train_step)(
            X, Y, F.mse_loss
        ),
        DesyncError,
        "rank 0 began train_step while rank 1 began evaluate",
    ),
}


@pytest.mark.parametrize("what", BAD_BATCHES)
def test_a_batch_that_cannot_be_is_refused_on_every_rank_and_nothing_is_broken(what: str) -> None:
    step, kind, said = BAD_BATCHES[what]
    for rank, error in enumerate(told_before_anything_is_sent(3, step)):
        assert isinstance(error, kind), error
        assert said in str(error)
        if isinstance(error, DistributedError):
            assert str(error).startswith("rank ")
            assert error.rank == rank


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("a bad batch")


class Bad(nn.Module):
    """Fails in the second forward pass, or in the first backward pass."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where, self.calls = nn.Linear(SIZE, SIZE), where, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.where == "forward" and self.calls == 2:
            raise ArithmeticError("a bad batch")
        return Fails.apply(self.linear(x)) if self.where == "backward" else self.linear(x)


def bad_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    raise ArithmeticError("a bad batch")


WHERE = {
    "forward": (1, r"Pipeline: F1 of stage 1 \(layer 1\) failed: ArithmeticError\('a bad batch'\)"),
    "backward": (1, r"Pipeline: B\d of stage 1 \(layer 1\) failed: ArithmeticError"),
    "loss": (2, r"Pipeline: F0 of stage 2 \(layer 2\) failed: ArithmeticError"),
}


@pytest.mark.checkered
@pytest.mark.parametrize("where", WHERE)
def test_an_error_on_one_rank_is_raised_there_and_the_others_learn_of_it(
    cluster: Cluster, where: str
) -> None:
    culprit, said = WHERE[where]

    def run(backend: Backend) -> tuple[BaseException | None, BaseException | None]:
        layers = [nn.Linear(SIZE, SIZE), Bad(where), nn.Linear(SIZE, SIZE)]
        pipeline = piped(backend, layers, 4, SCHEDULES[cluster.speaks_tcp])
        loss = bad_loss if where == "loss" else F.mse_loss
        first = outcome_of(lambda: pipeline.train_step(*batch(8), loss))
        return first, outcome_of(lambda: pipeline.train_step(*batch(8), loss))

    for rank, (first, later) in enumerate(cluster.run(run, 3)):
        assert isinstance(later, PeerLostError)
        assert re.search(said, str(later))
        if rank == culprit:
            assert isinstance(first, ArithmeticError)
            assert str(first) == "a bad batch"
        elif first is not None:  # the last rank may have done its part before
            assert isinstance(first, PeerLostError)
            assert (first.rank, first.peer) == (rank, culprit)
            assert re.search(said, str(first))
            assert re.search(
                rf"rank {rank} was in (\w\d of stage|the beginning|the end)", str(first)
            )


def test_an_error_in_the_gradients_of_weights_names_that_part_of_the_step() -> None:
    def run(backend: Backend) -> BaseException | None:
        layers = deep()
        layers[10].weight.register_hook(lambda gradient: Fails.backward(None, gradient))
        pipeline = piped(backend, layers, 4, "zb_h1")
        return outcome_of(lambda: pipeline.train_step(*batch(8), F.mse_loss))

    first, second = simulate(run, 2)
    assert isinstance(second, ArithmeticError)
    assert isinstance(first, PeerLostError)
    assert "W0 of stage 1 (layers 6 to 11) failed: ArithmeticError" in str(first)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda y, t: y, r"has to return one real number.*not float32 \[2, 6\]"),
        (lambda y, t: 3.0, "has to return one real number.*not 3.0"),
        (lambda y, t: y.detach().mean(), "the loss depends on no parameter that is trained"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_said(loss: Any, said: str) -> None:
    def run(backend: Backend) -> BaseException | None:
        pipeline = piped(backend, deep())
        return outcome_of(lambda: pipeline.train_step(*batch(8), loss))

    for rank, error in enumerate(simulate(run, 2)):
        assert isinstance(error, MisuseError)
        assert re.search(said, str(error))
        assert str(error).startswith(f"rank {rank}")


def test_an_interrupt_ends_the_step_of_all() -> None:
    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    def run(backend: Backend) -> BaseException | None:
        pipeline = piped(backend, [nn.Linear(SIZE, SIZE), Interrupted()], 2)
        try:
            pipeline.train_step(*batch(4), F.mse_loss)
        except (KeyboardInterrupt, PeerLostError) as error:
            return error
        return None

    first, second = simulate(run, 2)
    assert isinstance(second, KeyboardInterrupt)
    assert isinstance(first, PeerLostError)
    assert "F0 of stage 1 (layer 1) failed: KeyboardInterrupt()" in str(first)


@pytest.mark.parametrize("of_rank_0", [2.0, PATIENCE], ids=["at once", "rank 2 first"])
def test_a_rank_that_computes_for_ever_is_named_by_all_when_time_is_up(of_rank_0: float) -> None:
    over = threading.Semaphore(0)

    class Sleeps(nn.Module):
        """Until both others have given up."""

        awake = False

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(0 if self.awake else 2):
                assert over.acquire(timeout=PATIENCE)
            self.awake = True
            return x

    def run(backend: Backend) -> BaseException | None:
        layers = [nn.Linear(SIZE, SIZE), Sleeps(), nn.Linear(SIZE, SIZE)]
        pipeline = piped(backend, layers, 4)
        timeout = (of_rank_0, PATIENCE, 2.0)[backend.rank]
        backend.barrier()
        try:
            return outcome_of(lambda: pipeline.train_step(*batch(8), F.mse_loss, timeout=timeout))
        finally:
            over.release()

    for rank, error in enumerate(Tcp().run(run, 3)):
        assert isinstance(error, CollectiveTimeoutError), error
        assert error.rank == rank
        if rank != 1:
            assert error.peer == 1
            assert f"Pipeline: rank {rank} was in " in str(error)


def test_no_time_runs_out_for_messages_that_nobody_waits_for() -> None:
    """Receives are posted ahead, and a rank may compute for longer than its timeout."""

    class Looks(nn.Module):
        def __init__(self, backend: Backend) -> None:
            super().__init__()
            self.backend, self.seconds = backend, []

        def forward(self, x: Tensor) -> Tensor:
            self.seconds += [work.timeout for work in self.backend.group.under_way()]
            return x

    def run(backend: Backend) -> list[float]:
        looks = Looks(backend)
        layers = [nn.Sequential(looks, nn.Linear(SIZE, SIZE)), nn.Linear(SIZE, SIZE)]
        pipeline = piped(backend, layers, 8)
        for _ in range(2):
            pipeline.train_step(*batch(8), F.mse_loss, timeout=5.0)
        return looks.seconds

    for seed in range(3):
        seconds = simulate(run, 2, seed)[0]
        assert seconds
        assert min(seconds) > 3600
