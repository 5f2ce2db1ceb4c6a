"""`phalanx.simulate`: one rank at a time, and the same every time."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx
from phalanx import Backend, InvalidWorldSizeError, Simulation, simulate


def chatter(size: int, seed: int) -> list[tuple[int, str]]:
    """The order of events in a run in which every rank has much to do."""
    events: list[tuple[int, str]] = []

    def run(backend: Backend) -> None:
        rank, into = backend.rank, bytearray(1)
        inner = backend.subgroup([r for r in range(size) if r % 2 == rank % 2])
        for number in range(3):
            pending = phalanx.async_all_reduce(torch.rand(4), inner)
            backend.send(b"x", (rank + 1) % size, tag=number)
            events.append((rank, f"sent {number}"))
            backend.recv(into, (rank - 1) % size, tag=number)
            events.append((rank, f"received {random.random()} {np.random.rand()}"))
            events.append((rank, f"reduced {pending.wait().tolist()}"))
            backend.barrier()

    simulate(run, size, seed)
    return events


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_a_run_is_the_same_every_time(seed: int) -> None:
    first = chatter(5, seed)
    for _ in range(3):
        assert chatter(5, seed) == first


def test_another_seed_gives_another_order() -> None:
    orders = {
        tuple((rank, what.split()[0]) for rank, what in chatter(4, seed)) for seed in range(8)
    }
    assert len(orders) == 8


@settings(max_examples=examples(20))
@given(st.integers() | st.sampled_from([2**63, -(2**64), 10**30, 1_700_000_000_000_000_000]))
def test_any_whole_number_is_a_seed(seed: int) -> None:
    results = simulate(lambda backend: torch.rand(1).item(), 2, seed)
    assert results == simulate(lambda backend: torch.rand(1).item(), 2, seed)
    assert results.seed == seed
    assert results[0] != results[1]


def test_the_results_are_a_list_in_rank_order() -> None:
    results = simulate(lambda backend: backend.rank * 10, 4, seed=3)
    assert isinstance(results, Simulation)
    assert isinstance(results, list)
    assert results == [0, 10, 20, 30]
    assert results.seed == 3


def test_only_one_rank_runs_at_a_time() -> None:
    running: list[int] = []

    def run(backend: Backend) -> None:
        for _ in range(20):
            running.append(backend.rank)
            assert running == [backend.rank]
            running.remove(backend.rank)
            backend.barrier()

    simulate(run, 6)


@pytest.mark.parametrize("size", [64, 200])
def test_many_ranks_are_no_trouble(size: int) -> None:
    def run(backend: Backend) -> int:
        backend.barrier()
        return int(phalanx.all_reduce(torch.tensor(backend.rank), backend, algorithm="tree"))

    assert simulate(run, size) == [size * (size - 1) // 2] * size


def test_a_world_of_one_works_and_a_world_of_none_does_not() -> None:
    def run(backend: Backend) -> tuple[int, int, float]:
        backend.barrier()
        assert backend.subgroup([0]).world_size == 1
        return backend.rank, backend.world_size, phalanx.all_reduce(torch.ones(1), backend).item()

    assert simulate(run, 1) == [(0, 1, 1.0)]
    for size in (0, -1):
        with pytest.raises(InvalidWorldSizeError, match="at least one rank"):
            simulate(run, size)


# Random states ------------------------------------------------------------------------------


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_each_rank_has_its_own_random_state_whoever_runs_in_between() -> None:
    def alone(backend: Backend) -> list[tuple[float, float, float]]:
        return [draw() for _ in range(5)]

    def together(backend: Backend) -> list[tuple[float, float, float]]:
        drawn = []
        for _ in range(5):
            backend.barrier()
            drawn.append(draw())
            if backend.rank == 1:  # it draws more than the others
                torch.randn(4)
        return drawn

    drawn = simulate(alone, 3, seed=7)
    assert len({value for each in drawn for draws in each for value in draws}) == 3 * 5 * 3
    interleaved = simulate(together, 3, seed=7)
    assert interleaved[0] == drawn[0]
    assert interleaved[2] == drawn[2]


def test_seeding_one_rank_does_not_seed_the_others() -> None:
    def run(backend: Backend) -> float:
        if backend.rank == 0:
            torch.manual_seed(1)
            random.seed(1)
            np.random.seed(1)
        backend.barrier()
        return draw()[0]

    torch.manual_seed(1)
    seeded = torch.rand(1).item()
    results = simulate(run, 3)
    assert results[0] == seeded
    assert seeded not in results[1:]


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_random_states_are_as_before(fails: bool) -> None:
    def run(backend: Backend) -> None:
        torch.manual_seed(99)
        random.seed(99)
        np.random.seed(99)
        backend.barrier()
        if fails:
            raise KeyError

    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = [draw(), draw()]
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    got = [draw()]
    try:
        simulate(run, 3)
    except KeyError:
        assert fails
    assert [*got, draw()] == expected
