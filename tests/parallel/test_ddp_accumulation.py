"""Micro-batches: `no_sync` accumulates, the pass after it (or `sync_gradients`) averages."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ddp_models import Branches, DefinedBackwards, mlp, noise, seeded
from ddp_runs import (
    Gradients,
    Watched,
    assert_close,
    assert_same_bits,
    gradients,
    naive_gradients,
    outcome_of,
)
from torch import nn

from phalanx import DDP, Backend, MisuseError, simulate

BUILDS = {"mlp": mlp, "defined backwards": lambda: seeded(DefinedBackwards)}


def backward(model: nn.Module, seed: int) -> None:
    model(noise(4, 6, seed=seed)).pow(2).sum().backward()


def mean_of_sums(build, seeds: list[list[int]]) -> Gradients:
    """The mean over ranks of the sums of gradients of each rank's micro-batches."""

    def accumulate(model: nn.Module, rank: int) -> None:
        for seed in seeds[rank]:
            backward(model, seed)

    return naive_gradients(build, len(seeds), accumulate)


def micro_batches(rank: int, step: int, count: int) -> list[int]:
    return [100 * rank + 10 * step + number for number in range(count)]


@pytest.mark.checkered
@pytest.mark.parametrize("bucket_size", [1, 1 << 30])
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_pass_after_no_sync_averages_all_micro_batches(build, bucket_size, set_to_none):
    def run(backend: Backend) -> list[Gradients]:
        ddp = DDP(build(), backend, bucket_size=bucket_size)
        found = []
        for step in range(3):
            ddp.zero_grad(set_to_none=set_to_none)
            *first, last = micro_batches(backend.rank, step, 4)
            with ddp.no_sync():
                for seed in first:
                    backward(ddp, seed)
            backward(ddp, last)
            found.append(gradients(ddp))
        return found

    for found in simulate(run, 3):
        for step in range(3):
            seeds = [micro_batches(rank, step, 4) for rank in range(3)]
            assert_close(found[step], mean_of_sums(build, seeds))


def test_under_no_sync_nothing_is_sent_and_gradients_are_the_rank_s_own():
    def run(backend: Backend) -> Gradients:
        ddp = DDP(mlp(), backend)
        watched = Watched(backend)
        with ddp.no_sync():
            backward(ddp, backend.rank)
            backward(ddp, backend.rank + 10)
        assert watched.events == []
        assert watched.bytes_sent == 0
        return gradients(ddp)

    for rank, found in enumerate(simulate(run, 3)):
        assert_close(found, mean_of_sums(mlp, [[rank, rank + 10]]))


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_sync_gradients_averages_what_no_sync_accumulated(build):
    def run(backend: Backend) -> Gradients:
        ddp = DDP(build(), backend, bucket_size=64)
        for step in range(3):
            ddp.zero_grad()
            with ddp.no_sync():
                for seed in micro_batches(backend.rank, step, 2):
                    backward(ddp, seed)
            ddp.sync_gradients()
        return gradients(ddp)

    found = list(simulate(run, 3))
    assert_same_bits(found)
    seeds = [micro_batches(rank, 2, 2) for rank in range(3)]
    assert_close(found[0], mean_of_sums(build, seeds))


def test_sync_gradients_twice_or_after_an_ordinary_pass_does_nothing():
    def run(backend: Backend) -> None:
        ddp = DDP(mlp(), backend)
        ddp.sync_gradients()
        backward(ddp, backend.rank)
        final = gradients(ddp)
        watched = Watched(backend)
        ddp.sync_gradients()
        with ddp.no_sync():
            backward(ddp, backend.rank)
        ddp.sync_gradients()
        once = gradients(ddp)
        sent = watched.bytes_sent
        ddp.sync_gradients()
        assert watched.bytes_sent == sent
        assert_same_bits([once, gradients(ddp)])
        assert_close(once, {name: 2 * grad for name, grad in final.items()})

    simulate(run, 3)


def test_a_pass_after_sync_gradients_is_averaged_on_top():
    def run(backend: Backend) -> Gradients:
        ddp = DDP(mlp(), backend)
        with ddp.no_sync():
            backward(ddp, backend.rank)
        ddp.sync_gradients()
        backward(ddp, backend.rank + 10)
        return gradients(ddp)

    for found in simulate(run, 2):
        assert_close(found, mean_of_sums(mlp, [[0, 10], [1, 11]]))


def test_no_sync_ends_when_its_block_raises_and_may_be_nested():
    def run(backend: Backend) -> Gradients:
        ddp = DDP(mlp(), backend)
        with pytest.raises(KeyError), ddp.no_sync(), ddp.no_sync():
            raise KeyError
        with ddp.no_sync():
            with ddp.no_sync():
                backward(ddp, backend.rank)
            backward(ddp, backend.rank + 10)
        backward(ddp, backend.rank + 20)
        return gradients(ddp)

    for found in simulate(run, 2):
        assert_close(found, mean_of_sums(mlp, [[0, 10, 20], [1, 11, 21]]))


def test_ranks_may_accumulate_different_numbers_of_micro_batches():
    def run(backend: Backend) -> Gradients:
        ddp = DDP(mlp(), backend)
        with ddp.no_sync():
            for number in range(backend.rank):
                backward(ddp, 10 * number)
        backward(ddp, backend.rank)
        return gradients(ddp)

    for found in simulate(run, 3):
        assert_close(found, mean_of_sums(mlp, [[0], [0, 1], [0, 10, 2]]))


def test_gradients_that_only_some_micro_batches_reach_are_averaged_too():
    """The trunk and both branches are trained, each micro-batch reaches one of them."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        name = ("left", "right")[number % 2]
        model(noise(2, 6, seed=10 * rank + number), name).sum().backward()

    def run(backend: Backend) -> list[Gradients]:
        ddp = DDP(seeded(Branches), backend, bucket_size=1)
        found = []
        for turn in range(3):
            ddp.zero_grad()
            with ddp.no_sync():
                step(ddp, backend.rank, 2 * turn)
            step(ddp, backend.rank, 2 * turn + 1)
            found.append(gradients(ddp))
        return found

    def both(model: nn.Module, rank: int, turn: int) -> None:
        step(model, rank, 2 * turn)
        step(model, rank, 2 * turn + 1)

    expected = [
        naive_gradients(lambda: seeded(Branches), 3, partial(both, turn=turn)) for turn in range(3)
    ]
    for found in simulate(run, 3):
        for each, wanted in zip(found, expected, strict=True):
            assert_close(each, wanted)


def test_micro_batches_may_reach_different_branches_on_different_ranks():
    def step(model: nn.Module, rank: int) -> None:
        first, second = ("left", "right") if rank else ("right", "left")
        model(noise(2, 6, seed=rank), first).sum().backward()
        return lambda: model(noise(2, 6, seed=rank + 10), second, first).sum().backward()

    def run(backend: Backend) -> Gradients:
        ddp = DDP(seeded(Branches), backend, bucket_size=1)
        for _ in range(3):
            ddp.zero_grad()
            with ddp.no_sync():
                last = step(ddp, backend.rank)
            last()
        return gradients(ddp)

    expected = naive_gradients(lambda: seeded(Branches), 2, lambda model, rank: step(model, rank)())
    for found in simulate(run, 2):
        assert_close(found, expected)


def test_a_pass_that_reaches_less_on_one_rank_is_right_if_accumulated_gradients_are_there():
    """What no_sync accumulated counts, though the last pass of rank 1 reaches one branch only."""

    def step(model: nn.Module, rank: int, names: list[str]) -> None:
        model(noise(2, 6, seed=rank), *names).sum().backward()

    def last(rank: int) -> list[str]:
        return ["left"] if rank else ["left", "right"]

    def run(backend: Backend) -> Gradients:
        ddp = DDP(seeded(Branches), backend)
        for _ in range(3):
            ddp.zero_grad()
            with ddp.no_sync():
                step(ddp, backend.rank, ["left", "right"])
            step(ddp, backend.rank, last(backend.rank))
        return gradients(ddp)

    def both(model: nn.Module, rank: int) -> None:
        step(model, rank, ["left", "right"])
        step(model, rank, last(rank))

    expected = naive_gradients(lambda: seeded(Branches), 2, both)
    for found in simulate(run, 2):
        assert_close(found, expected)


def test_sync_gradients_names_parameters_that_no_micro_batch_reached():
    def run(backend: Backend) -> BaseException | None:
        ddp = DDP(seeded(Branches), backend)
        with ddp.no_sync():
            ddp(torch.ones(2, 6), "left").sum().backward()
        backend.barrier()
        return outcome_of(ddp.sync_gradients)

    for error in simulate(run, 2):
        assert isinstance(error, MisuseError)
        assert "right.weight" in str(error)
        assert "right.bias" in str(error)
