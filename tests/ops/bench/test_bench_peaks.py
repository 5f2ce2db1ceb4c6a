"""Peaks of memory are the kernel's own, with nothing missed and nothing counted twice."""

from __future__ import annotations

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

import msgspec
import pytest
import torch
from processes import fork_server, run_job, run_python
from torch import nn
from warm_python import warm_python

import phalanx
from phalanx import Backend
from phalanx.ops.bench.operations import OPERATIONS, PreparedCall, TrainedModel, task_of
from phalanx.ops.bench.peaks import GIVES_BACK, Meter, Peak, gives_back, lacks_peaks, measure_peak
from phalanx.ops.bench.peers import Alone, Call, RankContext
from phalanx.ops.bench.rank import FOUND, REQUEST
from phalanx.ops.bench.request import make_request
from phalanx.wire.control import learned

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from memory import Job
from memory import peak as formula_of_memory

FSDP = OPERATIONS["fsdp"]
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
from phalanx.ops.bench.peaks import Meter
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


WIDTH = 512  # of its layers


def peaks_of_two_ranks() -> list[Peak | str]:
    """Two simulated ranks are one process: what one has counts for both."""

    def rank(backend: Backend) -> Peak | str:
        context = RankContext(backend, "", 20.0, WIDTH)
        return measure_peak(Greedy(context), context, FSDP)

    return list(phalanx.simulate(rank, 2))


def test_building_and_training_are_told_apart_and_every_rank_has_all_figures() -> None:
    """In a process of its own: here, other tests' memory may be given back meanwhile."""
    parameters = task_of("fsdp", WIDTH).make_model().parameters()
    model = sum(4 * each.numel() for each in parameters)
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
        return measure_peak(Refuses(context), context, FSDP)

    said = "rank 1: ValueError: not here"
    assert phalanx.simulate(rank, 2) == [said, said]


MODEL = task_of("fsdp", 1024)
LAYER = 4 * MODEL.width * (MODEL.width + 1)
JOB = Job(MODEL.depth * LAYER, m=4 * MODEL.width**2, u=LAYER, r=0, p=2, k=0)  # with SGD


def assert_near(formula: str, training: list[int]) -> None:
    """The steps are those of docs/choose.md, if the C library keeps nothing that was freed."""
    for measured in training:
        ratio = measured / formula_of_memory(formula, JOB)
        assert 0.75 < ratio < 1.25, f"{ratio:.2f} of {formula}"


@pytest.mark.skipif(not gives_back(), reason="needs the malloc of glibc")
def test_the_peak_of_a_model_in_shared_memory_is_that_of_the_formula(tmp_path: Path) -> None:
    request = make_request(
        ["fsdp"], backends="shm", sizes="8", machine=False, width=MODEL.width, peaks=True
    )
    (tmp_path / REQUEST).write_bytes(msgspec.json.encode(request))
    script = tmp_path / "begin.py"
    script.write_text("from given_back import give_back\ngive_back()\nPEERS = {}\n")
    for rank in run_job(["-m", "phalanx.ops.bench.rank", str(tmp_path), str(script)], 2):
        assert rank.returncode == 0, rank.stderr
    *_, last = (tmp_path / FOUND).read_bytes().splitlines()
    peak = msgspec.json.decode(last, type=learned(Peak))
    assert_near("shared memory", peak.training)
    assert min(peak.shared) > JOB.n / 2 - 65536


def test_each_library_is_measured_as_it_is_and_with_freed_memory_given_back(tmp_path: Path) -> None:
    backends = ["--backends", "tcp", "--baseline", "tcp", "--no-machine"]
    words = [*backends, "--width", str(MODEL.width), "--rounds", "1", "--json", "peaks.json"]
    command = ["-m", "phalanx", "bench", "fsdp", "--peaks", *words]
    ended = run_python(command, folder=tmp_path, python=warm_python())
    assert ended.returncode == 0, ended.stderr
    print(ended.stdout)
    found = json.loads((tmp_path / "peaks.json").read_text())
    assert found["left_out"] == []
    (line,) = found["lines"]
    ways = {"peak MiB": "peak_bytes", "given back": "held_bytes"}
    for heading, name in [*ways.items()][: 1 + gives_back()]:
        assert f"{max(line[name]['training']) / MIB:.1f}" in ended.stdout
        assert heading in ended.stdout
        assert [len(line[name][each]) for each in ("building", "training", "shared")] == [2] * 3
    if gives_back():
        assert_near("`full_shard`", line["held_bytes"]["training"])
