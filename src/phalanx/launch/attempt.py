"""One start of all ranks of this host by `phalanx run`: who ended when, and how.

Torch's agent gives the others 30 seconds once a rank has failed, and knows the second in which
it looked. So each process is waited for here too, without taking its exit code from the agent:

    a rank fails ---> the agent sends the others SIGTERM ---> here, GRACE later, SIGKILL
         `---> here, at once, SIGKILL for what it has started itself

The process ids come from the ranks, which write them down, for the warden too; when a process has
ended its file is removed, before its number may become another's.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.launch.records import Record, read_record
from phalanx.launch.stopping import GRACE
from phalanx.launch.warden import PID_FILE, end_session
from phalanx.launch.worker import INTERRUPTED, STOPPED

__all__ = ["Attempt", "Ending"]

_POLL = 0.05
_ORDERED = frozenset({-signal.SIGTERM, -signal.SIGINT, STOPPED, INTERRUPTED})
"""Exit codes of a rank that did as it was told."""


@dataclass(frozen=True)
class Ending:
    """How one rank ended."""

    rank: int
    exitcode: int
    record: Record | None
    time: float
    follows: bool

    @property
    def order(self) -> tuple[bool, float]:
        """The smallest is the root cause."""
        return self.follows, self.time


@dataclass
class _Process:
    rank: int
    error_file: str
    pid: int | None = None
    exitcode: int | None = None
    ended: float | None = None
    killed: bool = False


class Attempt:
    """Follows the ranks of one attempt, in threads, until `close()`.

    `error_files` maps each rank to its record; where its process puts it, once it runs, there is
    its process id too.
    """

    def __init__(self, error_files: dict[int, str]) -> None:
        self._processes = {rank: _Process(rank, path) for rank, path in error_files.items()}
        self._closed = threading.Event()
        if hasattr(os, "waitid"):
            for process in self._processes.values():
                name = f"rank {process.rank}"
                threading.Thread(
                    target=self._follow, args=(process,), name=name, daemon=True
                ).start()

    def close(self) -> None:
        """Follow no more: nothing is killed from now on."""
        self._closed.set()

    def settle(self, seconds: float) -> None:
        """Wait until every rank is able to hear a signal, `seconds` at most."""
        deadline = time.monotonic() + seconds
        while any(process.pid is None for process in self._processes.values()):
            if time.monotonic() > deadline or self._closed.wait(_POLL / 2):
                return

    def end(self, signum: int) -> None:
        """Pass a signal on to the ranks; return when all have ended, killed after `GRACE`.

        To them alone: what they have started ends with them.
        """
        for pid in self._alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        deadline = time.monotonic() + GRACE
        while self._alive() and time.monotonic() < deadline:
            time.sleep(_POLL / 5)
        self.kill()

    def kill(self) -> None:
        """Kill the ranks that are still there, and what they have started, now."""
        for pid, process in self._alive().items():
            # Its thread may not have got round to say that it ended by itself.
            process.killed = not _has_ended(pid)
            end_session(pid)  # the agent gave each a session of its own

    def endings(self, exitcodes: dict[int, int] | None = None) -> list[Ending]:
        """Return how the ranks failed that have, from what is known here and `exitcodes`."""
        known = {p.rank: p.exitcode for p in self._processes.values() if p.exitcode is not None}
        known.update(exitcodes or {})
        return [
            self._ending(self._processes[rank], code)
            for rank, code in known.items()
            if code != 0 and rank in self._processes
        ]

    def left(self, failures: Collection[int]) -> list[int]:
        """Return the ranks that have ended with exit code 0, which nobody orders.

        Of one that ended too soon to be followed, only the agent knows the code: `failures` are the
        ranks for which it is another one.
        """
        return sorted(
            rank
            for rank, p in self._processes.items()
            if p.exitcode == 0
            or (p.exitcode is None and p.ended is not None and rank not in failures)
        )

    def _alive(self) -> dict[int, _Process]:
        """Return the processes that run now, by their ids."""
        if self._closed.is_set():
            return {}
        return {
            process.pid: process
            for process in self._processes.values()
            if process.pid is not None and process.ended is None
        }

    def _ending(self, process: _Process, code: int) -> Ending:
        record = read_record(process.error_file)
        if record is not None:
            return Ending(process.rank, max(code, 1), record, record.time, record.follows)
        follows = process.killed or code in _ORDERED
        return Ending(process.rank, code, None, process.ended or time.time(), follows)

    def _follow(self, process: _Process) -> None:
        pid = self._read_pid(process)
        if pid is None:
            return
        process.pid = pid
        try:
            # WNOWAIT leaves the exit code for the agent.
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # the agent was faster
            status = None
        process.ended = time.time()
        if status is not None:
            killed = status.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            process.exitcode = -status.si_status if killed else status.si_status
        if process.exitcode != 0:
            end_session(pid)  # what the rank has started: its data loader's workers, say
        with suppress(OSError):
            _pid_file(process).unlink()
        if process.exitcode not in (0, None) and process.exitcode not in _ORDERED:
            self._kill_others()

    def _read_pid(self, process: _Process) -> int | None:
        path = _pid_file(process)
        while not self._closed.wait(_POLL):
            try:
                text = path.read_text()
            except OSError:
                continue
            if text.endswith("\n"):
                return int(text)
        return None

    def _kill_others(self) -> None:
        """Kill, `GRACE` from now, the ranks (and what they started) that are still there."""
        if not self._closed.wait(GRACE):
            self.kill()


def _has_ended(pid: int) -> bool:
    """Whether this child has; whoever waits for it may still do so."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # and somebody has waited for it
        return True


def _pid_file(process: _Process) -> Path:
    return Path(process.error_file).with_name(PID_FILE)
