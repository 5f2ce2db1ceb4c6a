"""What is measured is checked: on simulated ranks, where a wrong result can be made."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from forms import sizes
from waiting import wait_until

import phalanx
from phalanx import Backend
from phalanx.collectives.schedules import COLLECTIVES
from phalanx.ops.bench.operations import (
    MEMORY_KINDS,
    OPERATIONS,
    PreparedCall,
    ValueRange,
    count_wrong,
    fill,
    kinds_for,
    longest_stretch,
)
from phalanx.ops.bench.peers import Copy, Phalanx, RankContext
from phalanx.ops.bench.rank import MANY_CALLS, busy_processes, time_rounds

MEASURED = [name for name, row in OPERATIONS.items() if name != "copy" and not row.training]
Results = dict[str, PreparedCall]


def on_ranks(
    size: int, prepare: Callable[[Phalanx, RankContext], dict[str, PreparedCall]]
) -> list[Results]:
    """Each rank's calls, timed in two rounds."""

    def rank(backend: Backend) -> Results:
        context = RankContext(backend, "", 20.0)
        peer = Phalanx(backend.subgroup(range(size)), context)
        calls = prepare(peer, context)
        assert time_rounds(calls, context, rounds=2, seconds=1e-6) == {}
        return calls

    return phalanx.simulate(rank, size)


@pytest.mark.checkered
@pytest.mark.parametrize("size", sizes([2, 5], [2, 3, 4, 5]))
@pytest.mark.parametrize("name", MEASURED)
def test_right_results_are_found_right_in_every_kind_of_memory(name: str, size: int) -> None:
    operation = OPERATIONS[name]

    def prepare(peer: Phalanx, context: RankContext) -> dict[str, PreparedCall]:
        return {
            f"{kind} {count}": peer.prepare(operation, count, kind)
            for kind in kinds_for(operation, list(MEMORY_KINDS))
            for count in (8, 1000)
        }

    for timings in on_ranks(size, prepare):
        assert timings
        for timing in timings.values():
            assert timing.wrong == 0
            assert len(timing.seconds) == 2
            assert min(timing.seconds) > 0


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_algorithm_is_offered_by_name(name: str) -> None:
    operation = OPERATIONS[name]

    def prepare(peer: Phalanx, context: RankContext) -> dict[str, PreparedCall]:
        rows = COLLECTIVES[name]
        on_one_host = [algorithm for algorithm in rows if not rows[algorithm].placed]
        assert peer.algorithms(operation) == ("auto", *on_one_host)
        peer.backend.topology = (0, 1, 1)
        assert peer.algorithms(operation) == ("auto", *rows)
        return {
            algorithm: peer.prepare(operation, 100, "ordinary", algorithm)
            for algorithm in peer.algorithms(operation)
        }

    for timings in on_ranks(3, prepare):
        assert all(timing.wrong == 0 for timing in timings.values())


def test_ranks_agree_on_the_slowest_time_and_the_number_of_calls() -> None:
    def prepare(peer: Phalanx, context: RankContext) -> dict[str, PreparedCall]:
        return {"it": peer.prepare(OPERATIONS["all_reduce"], 8)}

    first, *others = (timed["it"] for timed in on_ranks(3, prepare))
    for other in others:
        assert (other.calls, other.seconds, other.wrong) == (first.calls, first.seconds, 0)


def test_back_to_back_a_rank_s_time_is_its_median_call_of_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each tenth call is slow, as for a rank that a root which runs ahead has to wait for."""
    now, count = 0.0, itertools.count()
    monkeypatch.setattr("phalanx.ops.bench.rank.perf_counter", lambda: now)

    def call() -> None:
        nonlocal now
        now += 10.0 if next(count) % 10 == 5 else 0.25

    def figure(backend: Backend, *, back_to_back: bool) -> tuple[int, float]:
        prepared = PreparedCall(OPERATIONS["barrier"], 0, torch.empty(0), torch.empty(0), call=call)
        context = RankContext(backend, "", 20.0)
        time_rounds({"": prepared}, context, rounds=1, seconds=1e-6, back_to_back=back_to_back)
        return prepared.calls, prepared.seconds[0]

    assert phalanx.simulate(partial(figure, back_to_back=True), 1) == [(MANY_CALLS, 0.25)]
    [(calls, mean)] = phalanx.simulate(partial(figure, back_to_back=False), 1)
    assert calls == 1
    assert mean in (0.25, 10.0)


def test_busy_processes_compute_until_the_ranks_have_measured() -> None:
    def seconds(process: subprocess.Popen[bytes]) -> float:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) / os.sysconf("SC_CLK_TCK")

    with busy_processes(2) as processes:
        wait_until(lambda: all(seconds(process) >= 0.05 for process in processes))
    assert len(processes) == 2
    assert None not in [process.returncode for process in processes]


def test_one_wrong_call_among_many_shows() -> None:
    """Rank 1 spoils the result of a call in the middle of a stretch: later sums are made of it."""
    operation = replace(OPERATIONS["all_reduce"], least=6)
    called = 0

    def prepare(peer: Phalanx, context: RankContext) -> dict[str, PreparedCall]:
        call = peer.prepare(operation, 400)
        inner = call.call

        def spoiled() -> None:
            nonlocal called
            inner()
            called += 1
            if called == 4:
                call.out[7] += 1

        if peer.rank == 1:
            call.call = spoiled
        return {"spoiled": call}

    for timings in on_ranks(2, prepare):
        assert timings["spoiled"].wrong > 0


@pytest.mark.parametrize("name", [n for n in MEASURED if n not in ("barrier", "all_reduce")])
def test_a_call_that_does_nothing_shows(name: str) -> None:
    operation = OPERATIONS[name]

    def prepare(peer: Phalanx, context: RankContext) -> dict[str, PreparedCall]:
        call = peer.prepare(operation, 400)
        call.call = call.finish = lambda: None
        return {"idle": call}

    for timings in on_ranks(2, prepare):
        assert timings["idle"].wrong > 0


def test_who_cannot_do_it_is_left_out_on_every_rank_and_the_others_go_on() -> None:
    def rank(backend: Backend) -> tuple[list[str], dict[str, str]]:
        context = RankContext(backend, "", 20.0)

        nothing = torch.empty(0)

        def refuse() -> None:
            if backend.rank == 2:
                raise ValueError("not here\nand more")

        calls = {
            "refuses": PreparedCall(OPERATIONS["barrier"], 0, nothing, nothing, call=refuse),
            "copy": Copy(context).prepare(OPERATIONS["all_reduce"], 64),
        }
        failures = time_rounds(calls, context, rounds=1, seconds=1e-6)
        return [name for name, call in calls.items() if call.seconds], failures

    for timed, failures in phalanx.simulate(rank, 3):
        assert timed == ["copy"]
        assert failures == {"refuses": "rank 2: ValueError: not here"}


def test_what_fails_on_one_rank_fails_on_those_too_that_wait_to_hear_from_it() -> None:
    def rank(backend: Backend) -> tuple[tuple[list[int] | None, str], list[int]]:
        context = RankContext(backend, "", 20.0)

        def meet() -> list[int]:
            if backend.rank == 1:
                raise ValueError("not here")
            return context.gather(backend.rank)

        return context.attempt(meet), context.gather(backend.rank)

    failed = None, "rank 1: ValueError: not here"
    assert phalanx.simulate(rank, 3) == [(failed, [0, 1, 2])] * 3


@pytest.mark.parametrize("size", range(2, 40))
def test_sums_in_place_stay_exact_in_float32_for_a_whole_stretch(size: int) -> None:
    calls = longest_stretch(OPERATIONS["all_reduce"], size, in_place=True)
    assert calls >= 3
    largest = size * 12 + size * (size + 1) // 2  # of a first sum
    exact = largest * size ** (calls - 1)
    assert int(torch.tensor(float(exact), dtype=torch.float32)) == exact
    if size & (size - 1):
        assert exact < 1 << 24  # or partial sums might be rounded


def test_values_are_written_and_compared_to_the_last_element() -> None:
    tensor = torch.empty(250_000)
    values = (ValueRange(5, 130_000, 1, 2), ValueRange(0, 120_000, 3, 1))
    fill(tensor, values)
    assert tensor[:3].tolist() == [7, 8, 9]
    assert tensor[130_000:130_003].tolist() == [1, 4, 7]
    assert count_wrong(tensor, values) == 0
    assert count_wrong(tensor * 4, values, 4.0) == 0
    for place in (0, 106_495, 106_496, 129_999, 130_000, 249_999):
        tensor[place] += 1
    assert count_wrong(tensor, values) == 6
    fill(tensor, ())
    assert count_wrong(tensor, values) == 250_000


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1),
        ("reduce", 1),
    ],
)
def test_bus_bandwidths_are_those_of_the_nccl_tests(name: str, factor: float) -> None:
    assert OPERATIONS[name].bus(4) == factor


@pytest.mark.parametrize("name", MEASURED)
def test_a_message_has_at_least_the_bytes_requested_and_can_be_cut(name: str) -> None:
    operation = OPERATIONS[name]
    for size in (2, 3, 7):
        for count in (1, 8, 100, 4096):
            elements = operation.fitting(size, count)
            if not operation.moves:
                assert elements == 0
            else:
                assert count <= 4 * elements < count + 4 * size
                assert not operation.sliced or elements % size == 0
