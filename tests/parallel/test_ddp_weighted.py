"""Batches of different sizes: weighted losses give the gradient of the joined batch."""

from __future__ import annotations

import math

import pytest
import torch
from clusters import Cluster
from ddp_models import Branches, loss_of, mlp, noise, seeded, vectors
from ddp_runs import Gradients, Watched, assert_close, assert_same_bits, gradients, outcome_of
from torch import nn

from phalanx import DDP, Backend, DesyncError, simulate

SHARES = [(4, 4), (1, 7), (5, 0), (0, 3), (2, 0, 6), (0, 0, 4), (3, 1, 2, 9), (5,)]
EXACT = {"rtol": 1e-12, "atol": 1e-14}


def model() -> nn.Module:
    return mlp().double()


def part(shares, rank, number=0):
    start = sum(shares[:rank])
    rows = slice(start, start + shares[rank])
    return [tensor.double()[rows] for tensor in vectors(sum(shares), number)]


def joined(shares, numbers=(0,)) -> Gradients:
    plain = model()
    for number in numbers:
        x, y = (tensor.double() for tensor in vectors(sum(shares), number))
        loss_of(plain(x), y).backward()
    return gradients(plain)


@pytest.mark.checkered
@pytest.mark.parametrize("bucket_size", [1, 1 << 20])
@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_weighted_gradients_are_those_of_the_joined_batch(shares, bucket_size: int):
    def run(backend: Backend) -> Gradients:
        ddp = DDP(model(), backend, bucket_size=bucket_size)
        for number in range(3):
            ddp.zero_grad()
            x, y = part(shares, backend.rank, number)
            ddp.weighted(loss_of(ddp(x), y), len(x)).backward()
        return gradients(ddp)

    found = list(simulate(run, len(shares)))
    assert_same_bits(found)
    assert_close(found[0], joined(shares, [2]), **EXACT)


def test_it_is_right_on_every_kind_of_backend(cluster: Cluster):
    shares = (2, 0, 5)
    models = [model() for _ in shares]

    def run(backend: Backend) -> Gradients:
        ddp = DDP(models[backend.rank], backend)
        x, y = part(shares, backend.rank)
        ddp.weighted(loss_of(ddp(x), y), len(x)).backward()
        return gradients(ddp)

    for found in cluster.run(run, 3):
        assert_close(found, joined(shares), **EXACT)


def test_the_mean_of_the_weighted_losses_is_the_loss_of_the_joined_batch():
    shares = (3, 1, 8)

    def run(backend: Backend) -> float:
        ddp = DDP(model(), backend)
        x, y = part(shares, backend.rank)
        return ddp.weighted(loss_of(ddp(x), y), len(x)).item()

    x, y = (tensor.double() for tensor in vectors(12))
    found = sum(simulate(run, 3)) / 3
    assert math.isclose(found, loss_of(model()(x), y).item(), rel_tol=1e-12)


def test_equal_batches_give_the_same_bits_as_without_weights():
    def run(backend: Backend, weighted: bool) -> Gradients:
        ddp = DDP(mlp(), backend)
        x, y = vectors(5, backend.rank)
        loss = loss_of(ddp(x), y)
        (ddp.weighted(loss, 5) if weighted else loss).backward()
        return gradients(ddp)

    assert_same_bits([simulate(lambda b, w=w: run(b, w), 3)[0] for w in (True, False)])


def test_micro_batches_are_joined_one_by_one():
    shares = [(3, 1), (1, 5), (0, 2)]

    def run(backend: Backend) -> Gradients:
        ddp = DDP(model(), backend)

        def micro_batch(number: int) -> None:
            x, y = part(shares[number], backend.rank, number)
            ddp.weighted(loss_of(ddp(x), y), len(x)).backward()

        with ddp.no_sync():
            micro_batch(0)
            micro_batch(1)
        micro_batch(2)
        return gradients(ddp)

    plain = model()
    for number, share in enumerate(shares):
        x, y = (tensor.double() for tensor in vectors(sum(share), number))
        loss_of(plain(x), y).backward()
    for found in simulate(run, 2):
        assert_close(found, gradients(plain), **EXACT)


def test_gradients_that_were_not_set_to_zero_are_kept():
    shares = (1, 3)

    def run(backend: Backend) -> Gradients:
        ddp = DDP(model(), backend)
        for number in range(2):
            x, y = part(shares, backend.rank, number)
            ddp.weighted(loss_of(ddp(x), y), len(x)).backward()
        return gradients(ddp)

    for found in simulate(run, 2):
        assert_close(found, joined(shares, [0, 1]), **EXACT)


@pytest.mark.parametrize("bad", ["loss", "its gradient"])
def test_a_rank_without_samples_contributes_zeros_even_if_its_loss_is_not_a_number(bad: str):
    """As where all tokens of a batch are masked, and their mean is 0/0."""

    def run(backend: Backend) -> Gradients:
        ddp = DDP(model(), backend)
        x, y = part((4, 4), backend.rank)
        counts = torch.full((4, 1), 1.0 if backend.rank == 0 else 0.0, dtype=torch.float64)
        error = (ddp(x) - y).pow(2)
        if bad == "loss" and backend.rank == 1:
            error = error * math.nan
        loss = (error * counts).sum() / counts.sum() / 3
        weighted = ddp.weighted(loss, counts.sum().item())
        assert weighted.isfinite()
        weighted.backward()
        return gradients(ddp)

    plain = model()
    x, y = part((4, 4), 0)
    loss_of(plain(x), y).backward()
    for found in simulate(run, 2):
        assert_close(found, gradients(plain), **EXACT)


def test_where_no_rank_has_samples_all_gradients_are_zeros():
    def run(backend: Backend) -> bool:
        ddp = DDP(model(), backend)
        x, y = part((0, 0, 0), backend.rank)
        ddp.weighted(loss_of(ddp(x), y), 0).backward()
        return all(bool((grad == 0).all()) for grad in gradients(ddp).values())

    assert list(simulate(run, 3)) == [True] * 3


def test_a_pass_after_one_without_samples_counts_again():
    def run(backend: Backend) -> Gradients:
        ddp = DDP(model(), backend)
        x, y = part((4, 4), backend.rank)
        ddp.weighted(loss_of(ddp(x), y) * math.nan, 0).backward()
        zeros = gradients(ddp)
        assert all((grad == 0).all() for grad in zeros.values())
        ddp.zero_grad()
        loss_of(ddp(x), y).backward()
        return gradients(ddp)

    for found in simulate(run, 2):
        assert_close(found, joined((4, 4)), **EXACT)


def test_a_nan_of_a_rank_that_has_samples_is_not_hidden():
    def run(backend: Backend) -> bool:
        ddp = DDP(model(), backend)
        x, y = part((4, 4), backend.rank)
        loss = loss_of(ddp(x), y) * (math.nan if backend.rank else 1.0)
        ddp.weighted(loss, 4).backward()
        return all(bool(grad.isnan().all()) for grad in gradients(ddp).values())

    assert list(simulate(run, 2)) == [True, True]


def test_weights_need_not_be_whole_numbers_and_work_with_unused_parameters():
    weights = [0.25, 1.5]

    def run(backend: Backend) -> Gradients:
        ddp = DDP(seeded(Branches).double(), backend, find_unused_parameters=True)
        x = noise(3, 6, seed=backend.rank).double()
        loss = ddp(x, "left").pow(2).mean()
        ddp.weighted(loss, weights[backend.rank]).backward()
        return gradients(ddp)

    plain = seeded(Branches).double()
    for rank, weight in enumerate(weights):
        x = noise(3, 6, seed=rank).double()
        (plain(x, "left").pow(2).mean() * weight / sum(weights)).backward()
    for found in simulate(run, 2):
        assert_close(found, gradients(plain), **EXACT)


def test_it_costs_one_message_of_16_bytes():
    def run(backend: Backend) -> tuple[list[str], int]:
        ddp = DDP(mlp(), backend)
        loss = loss_of(ddp(vectors(4)[0]), vectors(4)[1])
        watched = Watched(backend)
        ddp.weighted(loss, 4)
        return [event.split()[0] for event in watched.events], watched.bytes_sent

    for names, sent in simulate(run, 2):
        assert names == ["all_gather"]
        assert sent == 16


@pytest.mark.parametrize("samples", [-1, math.nan, math.inf, -0.5])
def test_impossible_numbers_of_samples_are_refused_before_anything_is_sent(samples: float):
    def run(backend: Backend) -> None:
        ddp = DDP(mlp(), backend)
        watched = Watched(backend)
        with pytest.raises(ValueError, match="samples"):
            ddp.weighted(torch.ones(()), samples)
        assert watched.events == []

    simulate(run, 2)


def test_a_rank_that_does_not_weight_is_told():
    def run(backend: Backend) -> BaseException | None:
        ddp = DDP(mlp(), backend)
        backend.barrier()
        loss = loss_of(ddp(vectors(4)[0]), vectors(4)[1])

        def step() -> None:
            (ddp.weighted(loss, 4) if backend.rank else loss).backward()

        return outcome_of(step)

    for error in simulate(run, 2):
        assert isinstance(error, DesyncError)
