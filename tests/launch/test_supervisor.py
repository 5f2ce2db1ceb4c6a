"""The supervisor watches any command: here small programs, not ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from phalanx.launch.reaper import Reaper
from phalanx.launch.report import RankExit, RankReport, root_cause
from phalanx.launch.supervisor import Supervisor

PAUSE = "import signal; signal.pause()"
STUBBORN = (
    "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "os.write(1, b'!'); signal.pause()"
)


def start(ranks: Supervisor, *programs: str) -> None:
    for rank, program in enumerate(programs):
        ranks.start(rank, program, environ=os.environ, options=["-I", "-S"])


def reporting(report: RankReport, then: str = "") -> str:
    """A program that sends a report."""
    data = report.encode()
    return f"import os, sys; open(int(sys.argv[2]), 'wb').write({data!r}); {then}"


def watch(ranks: Supervisor) -> str:
    while (state := ranks.state()) == "running":
        ranks.wait()
    return state


@pytest.fixture
def reaper() -> Iterator[Reaper]:
    with Reaper() as held:
        yield held


def culprit(ranks: Supervisor) -> int | None:
    root = root_cause(ranks.exits())
    return None if root is None else root.rank


def codes(exits: list[RankExit]) -> list[int | None]:
    return [one.code for one in exits]


def test_it_is_done_when_every_rank_has_ended_well(reaper: Reaper) -> None:
    with Supervisor(reaper) as ranks:
        start(ranks, "", "")
        assert watch(ranks) == "done"
    assert codes(ranks.exits()) == [0, 0]
    assert root_cause(ranks.exits()) is None


def test_ranks_that_owe_a_result_are_done_when_they_have_reported_it(reaper: Reaper) -> None:
    with Supervisor(reaper, results=True) as ranks:
        start(ranks, reporting(RankReport.of_result(0, "a"), PAUSE), "")
        assert watch(ranks) == "failed"
        assert culprit(ranks) == 1
    with Supervisor(reaper, results=True) as ranks:
        start(ranks, *(reporting(RankReport.of_result(rank, rank)) for rank in range(2)))
        assert watch(ranks) == "done"
        assert [one.report and one.report.result() for one in ranks.exits()] == [0, 1]


def test_a_report_may_be_larger_than_a_pipe(reaper: Reaper) -> None:
    with Supervisor(reaper, results=True) as ranks:
        ranks.start(
            0,
            "import sys; from phalanx.launch.report import RankReport; "
            "report = RankReport.of_result(0, 'x' * (1 << 20)); "
            "open(int(sys.argv[2]), 'wb').write(report.encode())",
            environ=os.environ,
        )
        assert watch(ranks) == "done"
        (ended,) = ranks.exits()
        assert ended.report is not None
        assert ended.report.result() == "x" * (1 << 20)


def test_after_a_failure_the_others_are_stopped_and_are_not_the_cause(reaper: Reaper) -> None:
    with Supervisor(reaper) as ranks:
        start(ranks, PAUSE, "raise SystemExit(7)")
        assert watch(ranks) == "failed"
        ranks.stop()
    assert codes(ranks.exits()) == [-signal.SIGTERM, 7]
    assert culprit(ranks) == 1


def test_a_failure_that_follows_waits_for_the_one_that_it_follows_from(reaper: Reaper) -> None:
    lost = reporting(RankReport(0, True, summary="a lost peer", follows=True), PAUSE)
    reader, writer = os.pipe()
    told = f"import os; os.read({reader}, 1); raise SystemExit(7)"
    with Supervisor(reaper) as ranks:
        start(ranks, lost)
        ranks.start(1, told, environ=os.environ, options=["-I", "-S"], inherit=[reader])
        while not ranks.exits():
            ranks.wait()
        assert ranks.state() == "running"
        os.write(writer, b"!")
        assert watch(ranks) == "failed"
        assert culprit(ranks) == 1
    os.close(reader)
    os.close(writer)


def test_a_rank_that_does_not_stop_is_killed(reaper: Reaper) -> None:
    reader, writer = os.pipe()
    with Supervisor(reaper, lambda rank: (os.dup(writer), os.dup(writer))) as ranks:
        start(ranks, STUBBORN)
        assert os.read(reader, 1)
        begin = time.monotonic()
        ranks.stop(hurry=lambda: True)
        assert time.monotonic() - begin < 1.0
    (ended,) = ranks.exits()
    assert (ended.code, ended.killed, ended.failed) == (-signal.SIGKILL, True, False)
    os.close(reader)
    os.close(writer)


def test_what_a_failed_rank_has_started_ends_with_it(reaper: Reaper) -> None:
    """Though it holds the channel open, and the output."""
    program = (
        "import os, subprocess, sys\n"
        "pipe = int(sys.argv[2])\n"
        f"subprocess.Popen([sys.executable, '-I', '-S', '-c', {PAUSE!r}], pass_fds=[pipe])\n"
        "os._exit(3)"
    )
    reader, writer = os.pipe()
    with Supervisor(reaper, lambda rank: (os.dup(writer), os.dup(writer))) as ranks:
        start(ranks, program)
        os.close(writer)
        assert watch(ranks) == "failed"
        assert os.read(reader, 1) == b"", "its end: nobody holds the output any more"
    assert codes(ranks.exits()) == [3]
    os.close(reader)


def test_what_a_rank_that_ended_well_has_left_behind_is_left_alone(reaper: Reaper) -> None:
    program = (
        "import subprocess, sys\n"
        f"left = subprocess.Popen([sys.executable, '-I', '-S', '-c', {PAUSE!r}])\n"
        "print(left.pid)"
    )
    reader, writer = os.pipe()
    with Supervisor(reaper, lambda rank: (os.dup(writer), os.dup(writer))) as ranks:
        start(ranks, program)
        assert watch(ranks) == "done"
    os.kill(int(os.read(reader, 100)), signal.SIGKILL)  # it is there
    os.close(reader)
    os.close(writer)
