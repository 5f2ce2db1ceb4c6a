"""The supervisor: it starts a process for each rank of this host, watches them, and ends them.

    supervisor --- pipe ------------> reaper (reaper.py), for when the supervisor is killed
       |- rank 0, a session of its own
       |     |--- channel ----------> its failure, or the result of its function
       |     `--- stdout, stderr ---> output.py, under `phalanx run`
       `- rank 1 ...

`phalanx run` (run.py) starts scripts in this way, and `phalanx.spawn` (spawn.py) functions:

    running --- reports a result -----> done --------.
       |------- ends, exit code 0 ----> done         |
       |------- reports an error -----> failed ------+--- ends, or is killed --> ended
       |------- ends otherwise -------> failed       |
       `------- told to stop -----------------------'

A rank's failure is known at once, by its report or by its end; other ranks are stopped then. A lost
peer may be reported before the peer's own failure: a report of one waits `GRACE` seconds for the
failure that it may follow from.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Literal

from phalanx.errors import BackendUnavailableError
from phalanx.launch.reaper import GRACE, Reaper, end_session
from phalanx.launch.report import RankExit, RankReport
from phalanx.launch.signals import Signals

_POLL = 0.1  # seconds between looks at exit codes: a rank's children may hold its channel open
_END_POLL = 0.01  # the same when a rank has closed its channel, and ends
_KILL_TIME = 1.0  # seconds that the system has to end a process that was killed
_PIECE = 1 << 20


def open_standard_streams() -> None:
    """Open this process's closed standard streams to the null device.

    Else the next opened file gets their descriptors, and a rank takes it for its own streams.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 -- it stays open
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


@dataclass(kw_only=True)
class RankProcess(RankExit):
    """One rank's process, the channel for its report, and the knowledge of its end."""

    process: subprocess.Popen[bytes]
    channel: socket.socket | None
    reaper: Reaper
    received: bytearray = field(default_factory=bytearray)
    began: float = field(default_factory=time.monotonic)

    def read(self) -> None:
        """Read the next part of the report."""
        while self.channel is not None:
            try:
                data = self.channel.recv(_PIECE)
            except BlockingIOError:
                return
            except ConnectionError:  # it died before it had begun
                data = b""
            self.received += data
            try:
                self.report = RankReport.decode(self.received)
            except Exception:  # the script has written something else there
                data = b""
            if self.report is not None:
                self.time = self.report.time
            if self.report is not None or not data:  # or it died in the middle of its report
                self.close()

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None
            self.received = bytearray()

    def has_ended(self) -> bool:
        """Return whether the process has ended; if so, kill the processes that it leaves behind."""
        if self.code is not None:
            return True
        if hasattr(os, "waitid"):  # the process keeps its number until its session has ended
            with suppress(ChildProcessError):  # this program has waited for it elsewhere
                flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
                status = os.waitid(os.P_PID, self.process.pid, flags)
                if status is None:
                    return False
                if status.si_code != os.CLD_EXITED or status.si_status != 0:
                    end_session(self.process.pid)  # its data loader's workers, say
        elif self.process.poll() is None:
            return False
        self.code = self.process.wait()
        self.reaper.release(self.process.pid)
        now = time.monotonic()
        self.read()
        self.close()
        self.time = min(self.time, now)
        return True


class Supervisor:
    """The ranks of this host, in a `with` statement, at whose end all have ended.

    `open_output(rank)` returns the descriptors for a rank's output and errors; None: those of this
    process. With `results` each rank owes a report of its result; without, exit code 0 is enough.
    `ranks` are those that were started.
    """

    def __init__(
        self,
        reaper: Reaper,
        open_output: Callable[[int], tuple[int, int]] | None = None,
        *,
        results: bool = False,
    ) -> None:
        self._reaper = reaper
        self._open_output = open_output
        self._results = results
        self.ranks: list[RankProcess] = []
        self._suspected = math.inf

    def start(
        self,
        rank: int,
        program: str,
        words: Sequence[str] = (),
        *,
        environ: Mapping[str, str],
        options: Sequence[str] = (),
        inherit: Sequence[int] = (),
        stdin: int | None = None,
        processors: Collection[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a rank: `python options -c program PARENT CHANNEL words`.

        PARENT is this process's id, and CHANNEL the descriptor by which the rank reports; it begins
        when it has read a byte from there, and the reaper knows it. It starts with SIGINT blocked:
        Ctrl-C has no effect while the interpreter starts. The descriptors in `inherit` stay open.
        It is bound to these `processors` before it begins, or has threads of its own.
        `BackendUnavailableError` when the system starts no more processes.
        """
        theirs: list[int] = []
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            outputs = self._open_output(rank) if self._open_output is not None else (None, None)
            theirs += [output for output in outputs if output is not None]
            ours, channel = socket.socketpair()
            theirs.append(channel.detach())
            ours.setblocking(False)
            place = str(os.getpid()), str(theirs[-1])
            try:
                process = subprocess.Popen(
                    [sys.executable, *options, "-c", program, *place, *words],
                    env=environ,
                    stdin=stdin,
                    stdout=outputs[0],
                    stderr=outputs[1],
                    pass_fds=(theirs[-1], *inherit),
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
            started = RankProcess(
                rank, owes_result=self._results, process=process, channel=ours, reaper=self._reaper
            )
            self.ranks.append(started)
        except OSError as error:
            if error.errno is None:  # not the system's: a signal handler of the program's own
                raise
            raise BackendUnavailableError(
                f"the process of rank {rank} cannot be started ({error}): start fewer ranks, or "
                "raise the limits of processes and open files (ulimit -u, ulimit -n)",
                rank=rank,
            ) from error
        finally:
            for descriptor in theirs:
                os.close(descriptor)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._reaper.hold(process.pid)
        if processors:
            with suppress(ProcessLookupError):  # it has ended already
                os.sched_setaffinity(process.pid, processors)
        with suppress(ConnectionError):  # it has ended already
            ours.send(b"!")
        return process

    def wait(self, timeout: float = _POLL, also: Sequence[int] = ()) -> None:
        """Wait a moment, until a rank has news or one of the descriptors `also` is readable."""
        channels = [rank.channel for rank in self.ranks if rank.channel is not None]
        if any(rank.channel is None and rank.code is None for rank in self.ranks):
            timeout = min(timeout, _END_POLL)
        connection.wait([*channels, *also], timeout)
        for rank in self.ranks:
            rank.read()
            rank.has_ended()

    def watch(
        self,
        signals: Signals,
        look: Callable[..., object],
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until the ranks are done, one has failed, a signal has come, or it is `over()`.

        Calls `look()` as `attend` does, and at the end with `now=True`.
        """
        while self.state() == "running" and not (signals.received or over()):
            self.attend(signals, look)
        look(now=True)

    def attend(self, signals: Signals, look: Callable[..., object]) -> None:
        """Wait a moment, call `look()`, and pass on to the ranks what other `signals` there are."""
        self.wait(also=signals.descriptors)
        look()
        for passed in signals.take():
            self.send(passed)

    def state(self) -> Literal["running", "done", "failed"]:
        """Return "failed" when the root failure is known, "done" at the end."""
        exits = self.exits()
        failures = [one for one in exits if one.failed]
        all_known = len(exits) == len(self.ranks)
        if failures:
            self._suspected = min(self._suspected, time.monotonic())
            own = not all(failure.follows for failure in failures)
            if own or all_known or time.monotonic() > self._suspected + GRACE:
                return "failed"
        return "done" if all_known else "running"

    def exits(self) -> list[RankExit]:
        """Return the known ends of ranks, past or to come, in the order of `ranks`."""
        return [rank for rank in self.ranks if rank.time < math.inf]

    def send(self, signum: int) -> None:
        """Send a signal to each rank that runs, and not to its child processes."""
        for rank in self.ranks:
            if rank.report is None and not rank.has_ended():
                os.kill(rank.process.pid, signum)  # a number that is its until `has_ended`

    def stop(
        self,
        signum: int = signal.SIGTERM,
        hurry: Callable[[], bool] = lambda: False,
        *,
        grace: float = GRACE,
    ) -> None:
        """End every rank; return when all have ended.

        A rank that has not reported is sent `signum`, without its child processes, which end with
        it. Those that are left after `grace` seconds, or when `hurry()` is true, are killed.
        """
        deadline = time.monotonic() + grace
        try:
            for rank in self.ranks:
                rank.told_to_stop |= rank.report is None and not rank.has_ended()
            self.send(signum)
            while self._alive() and time.monotonic() < deadline and not hurry():
                self.wait()
        finally:
            for rank in self._alive():
                rank.killed = True
                end_session(rank.process.pid)
            deadline = time.monotonic() + _KILL_TIME
            while self._alive() and time.monotonic() < deadline:
                self.wait(_END_POLL)
            for rank in self.ranks:
                rank.close()

    def _alive(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if not rank.has_ended()]

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
