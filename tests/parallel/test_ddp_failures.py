"""A backward pass that goes wrong: what the others learn, and how training goes on."""

from __future__ import annotations

import pytest
import torch
from ddp_models import Fails, noise, seeded
from ddp_runs import (
    Gradients,
    Watched,
    assert_close,
    assert_same_bits,
    gradients,
    naive_gradients,
    outcome_of,
    values,
)
from torch import Tensor, nn

from phalanx import DDP, Backend, DesyncError, UnsupportedOperationError, simulate


class Fragile(nn.Module):
    """Four layers; backward fails where it comes out of layer number `fail_after`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.fail_after: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if self.fail_after == number:
                x = Fails.apply(x)
            x = torch.tanh(layer(x))
        return Fails.apply(x) if self.fail_after == len(self.layers) else x


def backward(model: nn.Module, seed: int) -> None:
    model(noise(4, 6, seed=seed)).pow(2).sum().backward()


def fail(ddp: DDP, seed: int, fail_after: int) -> None:
    """A pass that fails; all hold what they had started of it."""
    ddp.module.fail_after = fail_after
    with pytest.raises(ArithmeticError):
        backward(ddp, seed)
    ddp.module.fail_after = None
    ddp.zero_grad()


@pytest.mark.checkered
@pytest.mark.parametrize("bucket_size", [1, 200, 1 << 20])
@pytest.mark.parametrize("good_before", [0, 2])
@pytest.mark.parametrize("fail_after", [4, 3, 1, 0])
def test_training_goes_on_after_a_pass_that_failed_on_every_rank(
    fail_after: int, good_before: int, bucket_size: int
):
    """After layer 4 means before any gradient, after layer 0 means after all of them."""

    def run(backend: Backend) -> tuple[Gradients, int, int]:
        ddp = DDP(seeded(Fragile), backend, bucket_size=bucket_size)
        for number in range(good_before):
            backward(ddp, number)
        ddp.module.fail_after = fail_after
        x = noise(4, 6, seed=99).requires_grad_()  # so that backward goes on to the very end
        with pytest.raises(ArithmeticError):
            ddp(x).sum().backward()
        ddp.module.fail_after = None
        watched = Watched(backend)
        for number in range(3):
            ddp.zero_grad()
            watched.clear()
            backward(ddp, 10 * number + backend.rank)
        return gradients(ddp), len(watched.sizes()), watched.bytes_sent

    def undisturbed(backend: Backend) -> int:
        ddp = DDP(seeded(Fragile), backend, bucket_size=bucket_size)
        backward(ddp, 0)
        watched = Watched(backend)
        backward(ddp, 0)
        return len(watched.sizes())

    expected = naive_gradients(lambda: seeded(Fragile), 3, lambda m, rank: backward(m, 20 + rank))
    messages = simulate(undisturbed, 3)[0]
    for found, sent, _ in simulate(run, 3):
        assert_close(found, expected)
        assert sent == messages


def test_a_pass_that_failed_may_be_retried_without_another_forward_pass():
    def run(backend: Backend) -> Gradients:
        ddp = DDP(seeded(Fragile), backend, bucket_size=1)
        output = ddp(noise(4, 6, seed=backend.rank))
        loss, bad = output.pow(2).sum(), Fails.apply(output).sum()
        with pytest.raises(ArithmeticError):
            bad.backward(retain_graph=True)
        ddp.zero_grad()
        loss.backward()
        return gradients(ddp)

    expected = naive_gradients(lambda: seeded(Fragile), 2, backward)
    for found in simulate(run, 2):
        assert_close(found, expected)


def test_parameters_stay_equal_after_passes_that_failed():
    def run(backend: Backend):
        ddp = DDP(seeded(Fragile), backend, bucket_size=1)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for number, fail_after in enumerate([4, None, 2, 1, None, 3, None]):
            optimizer.zero_grad()
            if fail_after is not None:
                fail(ddp, number, fail_after)
            else:
                backward(ddp, 10 * number + backend.rank)
                optimizer.step()
        return values(ddp)

    assert_same_bits(list(simulate(run, 3)))


@pytest.mark.parametrize("fail_after", [3, 2, 1])
def test_a_rank_that_skips_a_failed_batch_by_itself_is_told_that_it_is_out_of_step(fail_after):
    """Buckets of one pass are never averaged with those of another, though their sizes agree."""

    def run(backend: Backend) -> BaseException | None:
        ddp = DDP(seeded(Fragile), backend, bucket_size=168, broadcast_buffers=False)
        backward(ddp, 0)
        backend.barrier()
        if backend.rank == 1:
            fail(ddp, 1, fail_after)
        else:
            error = outcome_of(lambda: backward(ddp, 1))
            if error is not None:
                return error
        return outcome_of(lambda: backward(ddp, 2))

    for error in simulate(run, 2):
        assert isinstance(error, DesyncError)


def test_ranks_that_fail_at_different_places_never_mix_their_gradients():
    def run(backend: Backend) -> BaseException | Gradients:
        ddp = DDP(seeded(Fragile), backend, bucket_size=168, broadcast_buffers=False)
        backward(ddp, 0)
        backend.barrier()
        error = outcome_of(lambda: fail(ddp, 1, 3 if backend.rank else 1))
        error = error or outcome_of(lambda: backward(ddp, 2))
        return error or gradients(ddp)

    model = seeded(Fragile)
    backward(model, 2)
    for found in simulate(run, 2):
        if isinstance(found, BaseException):
            assert isinstance(found, DesyncError)
        else:
            assert_close(found, gradients(model))


@pytest.mark.parametrize("how", ["backward", "no_sync and backward", "sync_gradients"])
def test_sparse_gradients_are_refused_by_name(how: str):
    def run(backend: Backend) -> BaseException | None:
        model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
        ddp = DDP(model, backend)
        backend.barrier()  # who is told of a failure while it builds DDP fails there

        def step() -> None:
            ddp(torch.tensor([backend.rank])).sum().backward()

        if how == "backward":
            return outcome_of(step)
        with ddp.no_sync():
            step()
        return outcome_of(ddp.sync_gradients if how == "sync_gradients" else step)

    for error in simulate(run, 2):
        assert isinstance(error, UnsupportedOperationError)
        assert "0.weight" in str(error)
        assert "sparse" in str(error)


def test_an_error_of_one_rank_s_model_reaches_the_caller_as_it_is():
    def run(backend: Backend) -> None:
        ddp = DDP(seeded(Fragile), backend)
        if backend.rank == 1:
            ddp.module.fail_after = 2
        backward(ddp, 0)

    for seed in range(3):
        with pytest.raises(ArithmeticError, match="a bad batch"):
            simulate(run, 3, seed)
