"""`phalanx bench` on processes: a short run of everything, and what becomes of its ranks."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from processes import run_job, run_python
from warm_python import warm_python

from phalanx.collectives.tuning import read_tuning
from phalanx.errors import InvalidWorldSizeError, PeerLostError
from phalanx.ops.bench.peers import PEERS
from phalanx.ops.bench.rank import FOUND, REQUEST
from phalanx.ops.bench.report import BenchReport, as_tuning
from phalanx.ops.bench.request import BackendInfo, Message, ResultLine, make_request
from phalanx.ops.bench.start import run_ranks
from phalanx.wire.control import learned

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
OTHERS = ("reduce", "gather", "scatter", "ping_pong", "stream", "barrier")
REQUESTED = "shm,tcp,stock,phalanx-gloo,phalanx-mpi,gloo"


def test_a_short_run_of_every_operation_on_all_that_is_here(tmp_path: Path) -> None:
    options = ["--backends", REQUESTED, "--sizes", "64,4K", "--rounds", "2", "--seconds", "0.0005"]
    words = ["-m", "phalanx", "bench", *COLLECTIVES, *OTHERS, *options, "--json", "all.json"]
    ended = run_python(words, folder=tmp_path, python=warm_python())
    assert ended.returncode == 0, ended.stderr
    print(ended.stdout)  # the ratios, for whoever reads what CI says
    found = json.loads((tmp_path / "all.json").read_text())
    assert "every result is right" in ended.stdout

    left_out = {left["peer"]: left["reason"] for left in found["left_out"] if not left["operation"]}
    here = [name for name in REQUESTED.split(",") if name not in left_out]
    assert {"tcp", "gloo"} <= set(here)
    assert "mpirun -n 2 phalanx bench" in left_out["phalanx-mpi"]
    for name, reason in left_out.items():
        assert f"{name} is left out: {reason}" in ended.stdout
    measured = {(line["operation"], line["peer"], line["bytes"]) for line in found["lines"]}
    for name in here:
        for operation in (*COLLECTIVES, "barrier"):
            for size in (64, 4096) if operation != "barrier" else (0,):
                assert (operation, name, size) in measured
    for name in ("socket", "copy"):
        assert ("all_reduce", name, 4096) in measured
    for line in found["lines"]:
        assert line["wrong"] == 0
        assert len(line["rounds_us"]) == 2
        assert line["operation"] in ended.stdout


SECOND_GLOO = """
from pathlib import Path
from phalanx.ops.bench import peers
PEERS = {"second": peers.PEERS["gloo"]._replace(script=str(Path(__file__).resolve()))}
"""


def test_training_steps_the_algorithms_by_name_and_a_peer_of_a_script(tmp_path: Path) -> None:
    """The script's is a second process group of torch's, beside the default one."""
    script = tmp_path / "second.py"
    script.write_text(SECOND_GLOO)
    peers = {**PEERS, **runpy.run_path(str(script))["PEERS"]}
    request = make_request(
        ["ddp", "fsdp", "all_reduce"],
        backends="tcp,stock,gloo,second",
        sizes="64",
        rounds=1,
        seconds=1e-6,
        algorithms="all",
        width=64,
        peers=peers,
    )
    (tmp_path / REQUEST).write_bytes(msgspec.json.encode(request))
    for rank in run_job(["-m", "phalanx.ops.bench.rank", str(tmp_path), str(script)], 2):
        assert rank.returncode == 0, rank.stderr
    found = (tmp_path / FOUND).read_bytes().splitlines()
    messages = [msgspec.json.decode(line, type=learned(Message)) for line in found]
    lines = [message for message in messages if isinstance(message, ResultLine)]
    assert {line.wrong for line in lines} == {0}
    for operation, more in (("ddp", {"tcp step", "tcp sharded"}), ("fsdp", set())):
        steps = {str(line.entry) for line in lines if line.operation == operation}
        assert steps == {"tcp", "stock", "gloo", "second", "alone"} | more
    assert [line.operation for line in lines if line.entry.peer == "second"] == [
        *request.operations
    ]
    sums = {line.entry.algorithm for line in lines if line.entry.peer == "tcp"}
    assert {"auto", "ring", "direct", "tree"} <= sums
    report = BenchReport(request=request, ranks=[2], machine={}, peers=peers)
    for message in messages:
        report.add(message)
    (table,) = read_tuning(as_tuning(report), "it").tables
    assert (table.backend, table.hosts, table.sizes) == ("TcpBackend", (0, 0), (64,))


def test_under_a_launcher_its_ranks_are_measured() -> None:
    words = "-m phalanx bench barrier --backends tcp,shm --rounds 1 --seconds 0.0001"
    first, second = run_job(words.split(), 2)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "barrier, 2 ranks" in first.stdout
    assert second.stdout == ""


def children() -> set[int]:
    """The processes that this one has started and not waited for."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """The processes that are there when a test begins; none may be left of it."""
    monkeypatch.setattr(sys, "executable", warm_python())
    before = children()
    yield before
    assert children() <= before


LONG = make_request(["barrier"], backends="tcp", sizes="8", rounds=1_000_000, machine=False)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_who_stops_listening_ends_the_ranks(started: set[int]) -> None:
    messages = run_ranks(LONG, 2)
    next(messages)
    assert len(children() - started) >= 2
    messages.close()  # type: ignore[attr-defined]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_dies_ends_the_others_and_its_last_words_are_shown(started: set[int]) -> None:
    messages = run_ranks(LONG, 2)
    for message in messages:
        if isinstance(message, BackendInfo):
            break
    workers = [
        pid
        for pid in children() - started
        if b"phalanx.ops.bench.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(workers) == 2
    os.kill(max(workers), signal.SIGKILL)
    with pytest.raises(PeerLostError, match="exit code -9") as raised:
        list(messages)
    assert "PeerLostError" in str(raised.value)  # of the one that lost it


def test_one_rank_is_too_few() -> None:
    with pytest.raises(InvalidWorldSizeError, match="two or more"):
        next(iter(run_ranks(LONG, 1)))


def test_every_peer_says_why_it_is_not_here_or_nothing() -> None:
    for row in PEERS.values():
        assert isinstance(row.lacks(), str)
