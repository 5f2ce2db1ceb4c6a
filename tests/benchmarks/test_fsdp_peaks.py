"""Peaks of memory are the kernel's own, with nothing missed and nothing counted twice."""

from __future__ import annotations

import io
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from given_back import give_back
from processes import fork_server
from ranks import run_ranks
from rich.console import Console
from rich.table import Table
from torch import nn

import phalanx
from phalanx import Backend, SharedMemoryBackend
from phalanx.ops.bench.operations import PreparedCall, TrainedModel, TrainingTask, task_of
from phalanx.ops.bench.peers import Alone, Call, RankContext

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from fsdp_peaks import (
    GIVES_BACK,
    Meter,
    Peak,
    as_json,
    benchmark_rank,
    gives_back,
    lacks_peaks,
    measure,
    measure_peak,
    model_bytes,
    tables,
    theory,
)

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
MIB = 1 << 20
SLACK = 4 * MIB  # pages of code that are first used, and the kernel's own rounding

pytestmark = pytest.mark.skipif(bool(lacks_peaks()), reason="no peaks of memory here")


def touch(count: int) -> torch.Tensor:
    """A mapping of its own: malloc may place a tensor in memory that other tests have freed."""
    mapping = mmap.mmap(-1, count * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=torch.uint8).fill_(1)


def test_memory_that_came_and_went_is_seen() -> None:
    touch(1)
    meter = Meter()
    gone = touch(64)
    del gone
    assert abs(meter.peak() - 64 * MIB) < SLACK
    assert abs(meter.shared()) < MIB


def test_what_came_before_the_meter_does_not_count() -> None:
    kept, gone = touch(64), touch(64)
    del gone
    meter = Meter()
    assert abs(meter.peak()) < SLACK
    assert kept.numel() == 64 * MIB


def test_after_a_reset_what_is_still_there_counts_and_what_is_gone_does_not() -> None:
    meter = Meter()
    kept, gone = touch(40), touch(60)
    del gone
    assert abs(meter.peak() - 100 * MIB) < SLACK
    meter.reset()
    assert abs(meter.peak() - 40 * MIB) < SLACK
    assert kept.numel() == 40 * MIB


def touch_shared(wire: Connection, file: str, private: int) -> None:
    """Touch all of that file, and some MiB of this process's own; say what it has then."""
    meter = Meter()
    shared = mmap.mmap(os.open(file, os.O_RDWR), 0)
    for at in range(0, len(shared), 4096):
        shared[at]
    own = bytearray(b"x") * (private << 20)
    wire.send("touched")
    wire.recv()
    wire.send((meter.peak(), meter.shared(), len(own)))
    wire.recv()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs a memfd")
def test_what_processes_share_is_counted_once_divided_among_them() -> None:
    file = os.memfd_create("shared")
    os.ftruncate(file, 48 * MIB)
    name = f"/proc/{os.getpid()}/fd/{file}"
    ranks = []
    for private in (8, 32):
        ours, theirs = Pipe()
        process = fork_server().Process(target=touch_shared, args=(theirs, name, private))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    assert [wire.recv() for _, wire in ranks] == ["touched"] * 2
    os.close(file)
    found = []
    for _, wire in ranks:
        wire.send("now")
        found.append(wire.recv())
    for process, wire in ranks:
        wire.send("enough")
        process.join()
        wire.close()
    for (peak, shared, own), private in zip(found, (8, 32), strict=True):
        assert own == private * MIB
        assert shared == 24 * MIB
        assert abs(peak - (24 + private) * MIB) < SLACK


FREEING = """
from fsdp_peaks import Meter
meter = Meter()
for size in (30, 20, 12, 30):  # each fits into what the one before it has left
    b"x" * (size << 20)
meter.reset()
print(meter.peak())
"""


@pytest.mark.skipif(not gives_back(), reason="needs the malloc of glibc")
def test_in_that_environment_freed_memory_is_given_back() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FREEING],
        env={**os.environ, **GIVES_BACK, "PYTHONPATH": BENCHMARKS},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(ended.stdout) < 8 * MIB


Wrap = Callable[[nn.Module], TrainedModel]


class Greedy(Alone):
    """Takes another 32 MiB when a large model is made, and 16 in each step."""

    def step(self, call: PreparedCall, wrap: Wrap, *, alone: bool = False) -> Call:
        step = super().step(call, wrap, alone=alone)
        if self.width <= 100:
            return step
        touch(32)

        def greedy() -> None:
            step()
            touch(16)

        return greedy


TOLD_APART = 512  # the width of its layers


def peaks_of_two_ranks() -> list[Peak | str]:
    """Two simulated ranks are one process: what one has counts for both."""

    def rank(backend: Backend) -> Peak | str:
        context = RankContext(backend, "", 20.0, TOLD_APART)
        return measure_peak(Greedy(context), context, 3)

    return list(phalanx.simulate(rank, 2))


def test_the_bytes_of_a_model_are_those_of_its_parameters() -> None:
    parameters = TrainingTask(8, 3, 2).make_model().parameters()
    assert model_bytes(TrainingTask(8, 3, 2)) == sum(4 * each.numel() for each in parameters)


def test_building_and_training_are_told_apart_and_every_rank_has_all_figures() -> None:
    """In a process of its own: here, other tests' memory may be given back meanwhile."""
    model = model_bytes(task_of("fsdp", TOLD_APART))
    with ProcessPoolExecutor(1, mp_context=fork_server()) as pool:
        first, second = pool.submit(peaks_of_two_ranks).result()
    assert first == second
    assert isinstance(first, Peak)
    by_rank = list(zip(first.building, first.training, first.shared, strict=True))
    assert len(by_rank) == 2
    for building, training, shared in by_rank:
        assert abs(building - (2 * model + 32 * MIB)) < SLACK
        needed = 4 * model + 16 * MIB  # the C library may still have what building freed
        assert needed - SLACK < training < needed + 32 * MIB + SLACK
        assert abs(shared) < MIB


def test_who_cannot_do_it_on_one_rank_is_left_out_on_all() -> None:
    class Refuses(Alone):
        def step(self, call: PreparedCall, wrap: Wrap, *, alone: bool = False) -> Call:
            step = super().step(call, wrap, alone=alone)
            if self.rank == 1:
                raise ValueError("not here")
            return step

    def rank(backend: Backend) -> Peak | str:
        context = RankContext(backend, "", 20.0, 16)
        return measure_peak(Refuses(context), context, 3)

    said = "rank 1: ValueError: not here"
    assert phalanx.simulate(rank, 2) == [said, said]


def peak_with_freed_memory_given_back(backend: Backend) -> Peak | str:
    give_back()
    return benchmark_rank(backend, name="shm", width=512, steps=10)


def test_the_peak_of_memory_is_that_of_a_sharded_model() -> None:
    outcomes = run_ranks(peak_with_freed_memory_given_back, 2, kind=SharedMemoryBackend)
    for how, peak in outcomes:
        assert how == "returned", peak
        model = model_bytes(task_of("fsdp", 512))
        for training, shared in zip(peak.training, peak.shared, strict=True):
            assert model / 2 < training < 6 * model
            assert shared >= model / 2 - 65536


def test_each_library_is_measured_as_it_is_and_with_freed_memory_given_back() -> None:
    found = [*measure(["alone"], 1, width=8, steps=1)]
    assert [(peak.peer, peak.gives_back) for peak in found] == [
        ("alone", given_back) for given_back in (False, True)[: 1 + gives_back()]
    ]
    assert all(len(peak.training) == 1 for peak in found)


def peak(peer: str, *training: int, gives_back: bool = False, shared: int = 0) -> Peak:
    return Peak(
        peer=peer,
        gives_back=gives_back,
        building=[20 << 20 for _ in training],
        training=[mib << 20 for mib in training],
        shared=[shared << 20 for _ in training],
    )


PEAKS = [
    peak("shm", 100, 110, shared=32),
    *(peak(name, 60, gives_back=True) for name in ("shm", "gloo")),
    peak("gloo", 220, 200),
    peak("alone", 128),
]


def text_of_table(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return "\n".join(row.rstrip() for row in out.getvalue().splitlines())


def cells(text: str, name: str) -> list[str]:
    """The cells of the row with this name."""
    rows = [[cell.strip() for cell in row.strip("│").split("│")] for row in text.splitlines()]
    return next(row for row in rows if row[0] == name)


def test_a_peak_is_that_of_the_rank_with_most_beside_the_sum_and_what_is_shared() -> None:
    plain, given_back = (text_of_table(table) for table in tables(PEAKS, 2))
    assert "fsdp, 2 ranks: peak MiB of a rank\n" in plain
    assert cells(plain, "shm") == ["shm", "20.0", "110.0", "210.0", "64.0", "2.00"]
    assert cells(plain, "gloo") == ["gloo", "20.0", "220.0", "420.0", "0.0", ""]
    assert cells(plain, "alone") == ["alone", "20.0", "128.0", "128.0", "0.0", ""]
    assert "rank, freed memory given back\n" in given_back
    assert cells(given_back, "shm")[-1] == "1.00"


def test_the_plain_theory_of_what_is_shared_out_is_said_beside_peaks() -> None:
    said, what = theory(task_of("fsdp", 0), 2, 10)
    assert said == (
        "parameters are 64.0 MiB, gradients as much; shared out, both are 64.0 a rank, and 16.0 "
        "more for each layer that is whole, or whose gradients are"
    )
    assert "of 10 steps; what ranks share counts once" in what


def test_json_has_every_rank_s_peaks_and_the_theory() -> None:
    found = json.loads(as_json(PEAKS, task_of("fsdp", 0), 2, 10))
    assert (found["ranks"], found["steps"]) == (2, 10)
    assert found["parameter_bytes"] == 4 * 4 * (2048 * 2048 + 2048)
    first, *others = found["peaks"]
    assert len(others) == 4
    assert (first["peer"], first["gives_back"]) == ("shm", False)
    assert first["training"] == [100 << 20, 110 << 20]
    assert first["building"] == [20 << 20] * 2
    assert first["shared"] == [32 << 20] * 2
