"""PHALANX_TRACE: what each rank did and when, in files that are whole wherever they end."""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import sys
from pathlib import Path
from time import time
from typing import Any

import pytest
import torch
from clusters import TOKEN, Cluster, whole

import phalanx
from phalanx import (
    Backend,
    BackendUnavailableError,
    CollectiveTimeoutError,
    DesyncError,
    SimulatedBackend,
    TcpBackend,
)

Event = dict[str, Any]
COUNT = 1024  # elements of 4 bytes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the traces of this test go; it does not exist yet."""
    place = tmp_path / "some" / "traces"
    monkeypatch.setenv("PHALANX_TRACE", str(place))
    return place


def events(file: Path) -> list[Event]:
    """The events of a file. Each is a line, and so whole as soon as the next one begins."""
    head, *lines, end = file.read_text().split("\n")
    assert head == "["
    assert end == ""
    return [json.loads(line.removesuffix(",")) for line in lines]


def traced(folder: Path, rank: int) -> list[Event]:
    """What the only backend of a rank has written about its operations."""
    (file,) = folder.glob(f"rank-{rank}-*.json")
    return [event for event in events(file) if event["ph"] == "X"]


def descriptors(folder: Path) -> dict[str, int]:
    """The open files of this process that lie in a folder, by name."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = entry.readlink()
        except OSError:
            continue
        if target.is_relative_to(folder):
            found[target.name] = int(entry.name)
    return found


def test_every_operation_is_there_with_its_traffic_its_line_and_its_times(
    cluster: Cluster, folder: Path
) -> None:
    def work(backend: Backend) -> tuple[int, int, str]:
        line = sys._getframe().f_lineno
        phalanx.all_reduce(torch.ones(COUNT), backend, algorithm="ring")
        if backend.rank == 1:
            backend.send(b"abc", 0, tag=9)
        elif backend.rank == 0:
            backend.recv(bytearray(3), None, tag=9)
        backend.barrier()
        return whole(backend).rank, line, backend.group.suffix

    began = time()
    results = cluster.run(work, 4)
    ended = time()
    for place, (rank, line, suffix) in enumerate(results):
        done = traced(folder, rank)
        names = [["recv"], ["send"], [], []][place]
        assert [event["name"] for event in done] == ["all_reduce", *names, "barrier"]
        reduced = done[0]["args"]
        assert reduced["bytes"] == 4 * COUNT
        assert reduced["sent"] == reduced["received"] == 2 * 3 * COUNT  # 2(p-1)/p of the bytes
        assert reduced["signature"] == f"float32 [{COUNT}], sum, ring"
        assert reduced["where"] == f"{Path(__file__).name}:{line + 1}"
        kinds = {"all_reduce": "collective", "barrier": "collective"}
        assert all(event["cat"] == kinds.get(event["name"], "message") for event in done)
        for event in done:
            assert event["pid"] == rank
            assert event["args"]["group"] == (suffix.removeprefix(" in the group of ") or "world")
            assert began * 1e6 - 1e3 < event["ts"]
            assert event["ts"] + event["dur"] < ended * 1e6 + 1e3
            parts = event["args"]["waiting_us"], event["args"]["moving_us"]
            assert min(parts) >= 0
            assert sum(parts) == pytest.approx(event["dur"], abs=0.2)
        starts = [event["ts"] for event in done]
        assert starts == sorted(starts)


def test_each_group_has_a_line_of_its_own_and_a_name(folder: Path) -> None:
    def work(backend: Backend) -> None:
        group = backend.subgroup([0, 1])
        for each in (backend, group, backend):
            each.barrier()
        other = 1 - backend.rank
        group.sendrecv(b"a", other, bytearray(1), other)

    phalanx.simulate(work, 2)
    for file in folder.iterdir():
        named: dict[int, str] = {}
        rows = []
        for event in events(file):
            if event["name"] == "thread_name":
                named[event["tid"]] = event["args"]["name"]
            elif event["ph"] == "X":
                rows.append((event["name"], named[event["tid"]]))  # named before it is used
        assert rows == [
            ("barrier", "world"),
            ("barrier", "ranks [0, 1]"),
            ("barrier", "world"),
            ("sendrecv", "ranks [0, 1]: messages"),
        ]
        assert len(set(named.values())) == len(named)


@pytest.mark.timeouts
def test_waiting_is_the_time_until_others_came(cluster: Cluster, folder: Path) -> None:
    def work(backend: Backend) -> int:
        place: int = whole(backend).rank
        if backend.rank == 0:
            pending = phalanx.async_all_reduce(torch.ones(COUNT), backend, algorithm="ring")
            backend.send(b"!", 1)
            pending.wait()
        else:
            backend.recv(bytearray(1), 0)
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(bytearray(1), 0, timeout=0.25)
            phalanx.all_reduce(torch.ones(COUNT), backend, algorithm="ring")
        return place

    rank = cluster.run(work, 2)[0]
    (waited,) = [event for event in traced(folder, rank) if event["name"] == "all_reduce"]
    assert waited["args"]["waiting_us"] >= 0.25e6


def test_a_program_is_blocked_from_when_it_waits(cluster: Cluster, folder: Path) -> None:
    def work(backend: Backend) -> int:
        place: int = whole(backend).rank
        if backend.rank == 0:
            pending = phalanx.async_all_reduce(torch.ones(COUNT), backend, algorithm="ring")
            backend.sendrecv(b"!", 1, bytearray(1), 1)  # the collective goes on meanwhile
            pending.wait()
        else:
            backend.sendrecv(b"!", 0, bytearray(1), 0)
            phalanx.all_reduce(torch.ones(COUNT), backend, algorithm="ring")
        return place

    rank = cluster.run(work, 2)[0]
    done = {event["name"]: event for event in traced(folder, rank)}
    reduced, message = done["all_reduce"], done["sendrecv"]
    assert 0 <= reduced["args"]["blocked_us"] <= reduced["dur"] - message["dur"] + 0.3


def test_a_call_that_is_over_when_it_returns_has_blocked_all_the_time(folder: Path) -> None:
    phalanx.all_reduce(torch.ones(COUNT), SimulatedBackend.create_group(1)[0])
    (event,) = traced(folder, 0)
    assert event["args"]["blocked_us"] == event["dur"]


def test_what_failed_says_so(cluster: Cluster, folder: Path) -> None:
    def disagree(backend: Backend) -> tuple[int, str]:
        with pytest.raises(DesyncError) as info:
            phalanx.all_reduce(torch.ones(2 + backend.rank), backend, algorithm="ring")
        return whole(backend).rank, str(info.value)

    for rank, text in cluster.run(disagree, 2):
        (event,) = traced(folder, rank)
        assert event["name"] == "all_reduce"
        assert event["args"]["error"] == text


def test_every_backend_has_a_file_of_its_own(folder: Path) -> None:
    groups = [SimulatedBackend.create_group(3) for _ in range(2)]
    process = os.getpid()
    names = {f"rank-{rank}-{process}-{n}.json" for rank in range(3) for n in range(2)}
    assert {file.name for file in folder.iterdir()} == names
    for file in folder.iterdir():
        (about,) = [event for event in events(file) if event["name"] == "phalanx"]
        assert about["args"]["rank"] == int(file.name.split("-")[1]) == about["pid"]
        assert (about["args"]["world_size"], about["args"]["process"]) == (3, process)
    assert len(descriptors(folder)) == 6
    groups.clear()
    gc.collect()
    assert not descriptors(folder), "a backend that is gone has closed its file"


def test_what_was_written_is_in_the_file_at_once(folder: Path) -> None:
    """A process that is killed has lost nothing: there is no buffer."""
    backend = SimulatedBackend.create_group(1)[0]
    for count in range(1, 4):
        phalanx.all_reduce(torch.ones(3), backend)
        assert len(traced(folder, 0)) == count


def test_a_file_that_is_cut_anywhere_is_whole_up_to_there(folder: Path) -> None:
    backend = SimulatedBackend.create_group(1)[0]
    for _ in range(5):
        phalanx.all_reduce(torch.ones(3), backend)
    (file,) = folder.iterdir()
    content, everything = file.read_text(), events(file)
    for length in range(len("[\n"), len(content)):
        whole_lines = content[:length].rpartition("\n")[0]
        known = json.loads(whole_lines.removesuffix(",") + "]")
        assert known == everything[: len(known)]
        assert len(known) == content[:length].count("\n") - 1


def test_a_folder_that_cannot_be_used_is_an_error_of_the_first_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for place in (file, file / "inside"):
        monkeypatch.setenv("PHALANX_TRACE", str(place))
        with pytest.raises(BackendUnavailableError, match=r"PHALANX_TRACE.*file"):
            SimulatedBackend.create_group(1)
        with pytest.raises(BackendUnavailableError, match=r"PHALANX_TRACE.*file"):
            TcpBackend(0, 1, "127.0.0.1:1", token=TOKEN)
    assert file.read_text() == "mine"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_ends_the_trace_and_nothing_else(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = SimulatedBackend.create_group(1)[0]
    backend.barrier()
    (descriptor,) = descriptors(folder).values()
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, descriptor)
    os.close(full)
    with caplog.at_level(logging.WARNING, "phalanx"):
        for _ in range(3):
            assert phalanx.all_reduce(torch.ones(2), backend).tolist() == [1.0, 1.0]
    (record,) = caplog.records
    assert "rank 0: the trace ends here" in record.getMessage()
    assert "No space left" in record.getMessage()
    assert len(traced(folder, 0)) == 1


def test_without_the_variable_nothing_is_written_or_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in (None, ""):
        monkeypatch.delenv("PHALANX_TRACE", raising=False)
        if value is not None:
            monkeypatch.setenv("PHALANX_TRACE", value)
        backend = SimulatedBackend.create_group(1)[0]
        backend.barrier()
        assert backend.engine.trace is None
        assert not backend.engine.matching.traced
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_within_a_line_leaves_only_whole_ones(folder: Path) -> None:
    backend = SimulatedBackend.create_group(1)[0]
    backend.barrier()
    (file,) = folder.iterdir()
    before = events(file)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 40, hard))
    try:
        backend.barrier()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    backend.barrier()
    assert events(file) == before
