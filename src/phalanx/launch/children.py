"""Processes of ranks, as their parent sees them: waiting for their reports, and ending them."""

from __future__ import annotations

import pickle
import signal
import time
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import SpawnProcess

from phalanx.launch.report import Report
from phalanx.launch.stopping import GRACE
from phalanx.launch.warden import end_session

__all__ = ["Child", "next_reports", "stop"]

_POLL = 0.2
"""Seconds between looks at exit codes: a rank's own children may hold its pipe open."""


@dataclass
class Child:
    """One rank's process; `report` is None until it has reported or died."""

    rank: int
    process: SpawnProcess
    pipe: connection.Connection
    report: Report | None = None
    told_to_stop: bool = False


def next_reports(children: list[Child]) -> list[Report]:
    """Wait a moment for the children that have not reported; return the reports that came."""
    waiting = [child for child in children if child.report is None]
    sources = [source for child in waiting for source in (child.pipe, child.process.sentinel)]
    ready = connection.wait(sources, _POLL)
    came: list[Report] = []
    for child in waiting:
        if child.pipe in ready or child.process.exitcode is not None:
            child.report = _receive(child)
            came.append(child.report)
    return came


def _receive(child: Child) -> Report:
    try:
        if child.pipe.poll():
            report: Report = pickle.loads(child.pipe.recv_bytes())
            if report.kind != "stopped" or child.told_to_stop:
                return report
            return Report.of_death(child.rank, -signal.SIGTERM)  # told by somebody else
    except (EOFError, OSError):
        pass  # it died, perhaps in the middle of its report
    child.process.join(GRACE)
    if child.told_to_stop:
        return Report(child.rank, "stopped", follows=True)
    return Report.of_death(child.rank, child.process.exitcode)


def stop(children: list[Child]) -> None:
    """End every child: what it has to report is still read, for `GRACE` seconds at most.

    A child that has reported is given that time to end by itself; another gets SIGTERM. Whoever
    is there after it is killed, and so is what a child that has failed had started itself.
    """
    deadline = time.monotonic() + GRACE
    try:
        for child in children:
            if child.report is None and child.process.exitcode is None:
                child.told_to_stop = True
                child.process.terminate()
        while any(child.report is None for child in children) and time.monotonic() < deadline:
            next_reports(children)
        for child in children:
            child.process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for child in children:
            child.process.kill()
            child.process.join()
            if child.process.exitcode != 0 and child.process.pid is not None:
                end_session(child.process.pid)
            child.pipe.close()
