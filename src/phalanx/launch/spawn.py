"""`spawn`: a function on several ranks, each a fresh process of this host.

    parent                                   rank 0        rank 1
      | listens on 127.0.0.1, port 0  ------->  |             |      rank 0 inherits the listener
      | a fresh token  ---------------------->  |  -------->  |      through pipes: no command line
      |                                      fn(backend)  fn(backend)
      |  <----------------------- report -------'             |
      |  <----------------------- report ---------------------'      or a death, which is seen

A parent that is killed has a warden, which ends the ranks with all that they have started.
On the first failure of a rank's own the others get SIGTERM, which raises `RankStopped` in them,
and `GRACE` seconds later SIGKILL.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, TypeVar

from phalanx.errors import InvalidWorldSizeError, MisuseError
from phalanx.launch.child import run_rank
from phalanx.launch.environment import threads_per_rank
from phalanx.launch.init import MeetingPoint, factory_named
from phalanx.launch.reaper import Warden, end_session
from phalanx.launch.report import Report
from phalanx.launch.scratch import GRACE
from phalanx.transport.tcp.admission import listen_at

if TYPE_CHECKING:
    from phalanx.core.backend import Backend
T = TypeVar("T")


def spawn(
    fn: Callable[[Backend], T], world_size: int, backend: str = "auto", *, timeout: float = 60.0
) -> list[T]:
    """Run `fn(backend)` in `world_size` fresh processes of this host; return their results.

    Results are in rank order, and come by value: a tensor is a copy. `fn` and the results are
    pickled, so `fn` is a function at the top level of a module, or a `functools.partial` of one.
    `timeout` (seconds) is the default of every call on the backend; the run itself has none. The
    backend is closed when `fn` returns. OMP_NUM_THREADS, if unset, is each rank's share of the
    cores. No rank outlives this call, or this process.

    When a rank fails the others are stopped, and its error is raised here with its own traceback
    as `__cause__`: the root cause, not the `PeerLostError`s that follow from it. A rank that was
    killed, or ended itself, is a `PeerLostError` whose `peer` is that rank. A result that cannot
    be pickled is a `MisuseError`. Fewer than one rank: `InvalidWorldSizeError`; a name that is no
    backend: `BackendUnavailableError`.
    """
    if world_size < 1:
        raise InvalidWorldSizeError(f"a world of {world_size} ranks cannot be: it takes one")
    factory_named(backend)
    call = _pickle(fn)
    children: list[Child] = []
    with Warden() as warden:
        try:
            _start(children, warden, call, world_size, backend, timeout)
            failed = _wait(children, warden)
        finally:
            stop(children)
    reports = [child.report for child in children if child.report is not None]
    if failed:
        raise _root_cause(reports).error()
    return [report.result() for report in reports]


def _pickle(fn: Callable[..., object]) -> bytes:
    try:
        return pickle.dumps(fn)
    except Exception as error:
        raise MisuseError(
            f"spawn cannot send {fn!r} to a fresh process ({error}): define it at the top level "
            "of a module; no lambda, no function inside another"
        ) from error


def _start(
    children: list[Child],
    warden: Warden,
    call: bytes,
    world_size: int,
    backend: str,
    timeout: float,
) -> None:
    context = multiprocessing.get_context("spawn")
    token, job = secrets.token_hex(32), secrets.token_hex(8)
    with (
        listen_at(socket.AF_INET, ("127.0.0.1", 0)) as listener,
        _set_if_unset("OMP_NUM_THREADS", str(threads_per_rank(world_size))),
    ):
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        for rank in range(world_size):
            held = listener if rank == 0 else None
            point = MeetingPoint(
                rank, world_size, address, token, job, one_host=True, listener=held
            )
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=run_rank,
                args=(theirs, call, point),
                kwargs={"parent": os.getpid(), "backend": backend, "timeout": timeout},
                name=f"rank {rank}",
            )
            with _sigint_blocked():  # the child inherits that: Ctrl-C is the parent's
                process.start()
                children.append(Child(rank, process, ours))
            warden.hold(process.pid or 0)
            theirs.close()


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Let SIGINT wait, in this thread and the processes that it starts."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _set_if_unset(name: str, value: str) -> Iterator[None]:
    """Set a variable for the children: torch reads it when it is imported, before any call."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _wait(children: list[Child], warden: Warden) -> bool:
    """Wait for all results, or for the failure that the others follow from; return whether."""
    deadline: float | None = None
    while any(child.report is None for child in children):
        reports = next_reports(children)
        for report in reports:  # whoever has reported ends, and its number may become another's
            warden.release(children[report.rank].process.pid or 0)
        failures = [report for report in reports if report.kind != "result"]
        if any(not report.follows for report in failures):
            return True
        if failures and deadline is None:  # who lost a peer may be heard before the peer itself
            deadline = time.monotonic() + GRACE
        if deadline is not None and time.monotonic() > deadline:
            return True
    return deadline is not None


def _root_cause(reports: list[Report]) -> Report:
    failures = [report for report in reports if report.kind not in ("result", "stopped")]
    return min(failures, key=lambda report: report.order)


# ------------------------------------------------------------------------------
# Processes of ranks, as their parent sees them: waiting for their reports, and ending them.

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
