"""Peaks of memory are the kernel's own, with nothing missed and nothing counted twice."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import phalanx
from phalanx import Backend
from phalanx.ops.bench.operations import OPERATIONS, PreparedCall, TrainedModel, task_of
from phalanx.ops.bench.peer import Call, RankContext
from phalanx.ops.bench.peers import PEERS, Alone
from phalanx.ops.bench.rank import GIVES_BACK, Meter, gives_back, lacks_peaks, measure_peak
from phalanx.ops.bench.report import BenchReport
from phalanx.ops.bench.request import LeftOut, Peak, make_request
from phalanx.ops.bench.start import run_bench

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


SHARING = """
import mmap, sys
from phalanx.ops.bench.rank import Meter

file, private = int(sys.argv[1]), int(sys.argv[2]) << 20
meter = Meter()
shared = mmap.mmap(file, 0)
for at in range(0, len(shared), 4096):
    shared[at]
own = bytearray(b"x") * private
print("touched", flush=True)
input()
print(meter.peak(), meter.shared(), flush=True)
input()
"""


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs a memfd")
def test_what_processes_share_is_counted_once_divided_among_them() -> None:
    file = os.memfd_create("shared")
    os.ftruncate(file, 48 * MIB)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SHARING, str(file), str(private)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[file],
        )
        for private in (8, 32)
    ]
    os.close(file)
    found = []
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "touched\n"
    for rank in ranks:
        assert rank.stdin is not None
        assert rank.stdout is not None
        print(file=rank.stdin, flush=True)
        found.append([int(word) for word in rank.stdout.readline().split()])
    for rank in ranks:
        rank.communicate("\n")
    for (peak, shared), private in zip(found, (8, 32), strict=True):
        assert shared == 24 * MIB
        assert abs(peak - (24 + private) * MIB) < SLACK


FREEING = """
from phalanx.ops.bench.rank import Meter
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
        env={**os.environ, **GIVES_BACK},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(ended.stdout) < 8 * MIB


def requested(**options: object) -> BenchReport:
    given: dict[str, object] = {"backends": "gloo", "sizes": "8", "measure": "peak", "steps": 3}
    request = make_request(["fsdp"], **given | options)  # type: ignore[arg-type]
    return BenchReport(request=request, ranks=[2], machine={})


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


def peaks_of_two_ranks(_: Backend) -> list[Peak | LeftOut]:
    """Two simulated ranks are one process: what one has counts for both."""

    def rank(backend: Backend) -> Peak | LeftOut:
        context = RankContext(backend, "", 20.0, TOLD_APART)
        request = requested(width=TOLD_APART).request
        return measure_peak("it", Greedy(context), OPERATIONS["fsdp"], request, context)

    return list(phalanx.simulate(rank, 2))


def test_building_and_training_are_told_apart_and_every_rank_has_all_figures() -> None:
    """In a process of its own: here, other tests' memory may be given back meanwhile."""
    model = task_of("fsdp", TOLD_APART).model_bytes
    [(first, second)] = phalanx.spawn(peaks_of_two_ranks, 1)
    assert first == second
    assert isinstance(first, Peak)
    assert (first.peer, first.ranks, first.steps, first.gives_back) == ("it", 2, 3, False)
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

    def rank(backend: Backend) -> Peak | LeftOut:
        context = RankContext(backend, "", 20.0, 16)
        request = requested().request
        return measure_peak("it", Refuses(context), OPERATIONS["fsdp"], request, context)

    said = LeftOut("it", 2, "rank 1: ValueError: not here", "fsdp")
    assert phalanx.simulate(rank, 2) == [said, said]


def test_who_has_no_training_steps_is_left_out_without_starting_anything() -> None:
    report = requested(backends="mpi,nccl", machine=False)
    assert run_bench(report, lambda message: None)
    assert report.peaks == []
    assert [(left.peer, left.operation) for left in report.left_out] == [
        ("mpi", "fsdp"),
        ("nccl", "fsdp"),
    ]


def test_under_a_launcher_there_are_no_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(phalanx.MisuseError, match="fresh processes"):
        run_bench(requested(), lambda message: None)


def test_every_peer_that_trains_can_be_asked_for_its_peak() -> None:
    assert {"shm", "tcp", "hybrid", "gloo", "alone"} <= {
        name for name, row in PEERS.items() if row.trains
    }
