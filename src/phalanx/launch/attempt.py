"""One start of all ranks of this host by `phalanx run`: who ended when, and how.

Torch's agent gives the others 30 seconds once a rank has failed, and knows the second in which
it looked. So each process is waited for here too, without taking its exit code from the agent:

    a rank fails ---> the agent sends the others SIGTERM ---> here, GRACE later, SIGKILL
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.launch.records import Record, read_record
from phalanx.launch.stopping import GRACE
from phalanx.launch.worker import INTERRUPTED, PID_FILE, STOPPED

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

    def endings(self, exitcodes: dict[int, int] | None = None) -> list[Ending]:
        """Return how the ranks failed that have, from what is known here and `exitcodes`."""
        known = {p.rank: p.exitcode for p in self._processes.values() if p.exitcode is not None}
        known.update(exitcodes or {})
        return [
            self._ending(self._processes[rank], code)
            for rank, code in known.items()
            if code != 0 and rank in self._processes
        ]

    def _ending(self, process: _Process, code: int) -> Ending:
        record = read_record(process.error_file)
        if record is not None:
            return Ending(process.rank, max(code, 1), record, record.time, record.follows)
        follows = process.killed or code in _ORDERED
        return Ending(process.rank, code, None, process.ended or time.time(), follows)

    def _follow(self, process: _Process) -> None:
        process.pid = self._read_pid(process)
        if process.pid is None:
            return
        try:
            # WNOWAIT leaves the exit code for the agent.
            status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # the agent was faster
            status = None
        process.ended = time.time()
        if status is None:
            return
        killed = status.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        process.exitcode = -status.si_status if killed else status.si_status
        if process.exitcode != 0 and process.exitcode not in _ORDERED:
            self._kill_others()

    def _read_pid(self, process: _Process) -> int | None:
        path = Path(process.error_file).with_name(PID_FILE)
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
        if self._closed.wait(GRACE):
            return
        for process in self._processes.values():
            if process.pid is not None and process.ended is None:
                process.killed = True
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the agent gave each a session
