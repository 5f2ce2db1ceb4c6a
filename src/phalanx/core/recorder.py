"""The recorder: a rank's last calls, for errors; traces of all of them; and the log."""

from __future__ import annotations

import json
import logging
import os
import socket
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

from phalanx import files
from phalanx.core.call import Call
from phalanx.errors import BackendUnavailableError, MisuseError

if TYPE_CHECKING:
    from phalanx.core.work import Work

SHOWN = 8  # operations in an error's note


class History:
    """The last calls of one rank, of all its groups, in the order in which they ended.

    failures   number of calls that ended with an error, by the error's class
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.calls: deque[Call] = deque(maxlen=SHOWN)
        self.failures: Counter[str] = Counter()

    def note_on(self, error: BaseException) -> None:
        """Add a note to an error, once, that lists the last operations (Python 3.11 shows it).

        It repeats the error at the end: many logs keep only the end of long texts.
        """
        self.failures[type(error).__name__] += 1
        if self.calls and hasattr(error, "add_note") and not hasattr(error, "__notes__"):
            said = f"and then: {type(error).__name__}: {error}"
            error.add_note("\n".join([*self._lines(), said]))

    def last(self) -> str:
        """Return the last call in words, or "" if there was none."""
        return self.calls[-1].describe() if self.calls else ""

    def _lines(self) -> Iterator[str]:
        yield f"the last operations of rank {self._rank}, which ended in this order:"
        for call in self.calls:
            how = "failed after" if call.failed else "took"
            yield f"  {call.describe()} {how} {_duration(call.ended - call.started)}"


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


# ------------------------------------------------------------------------------
# Traces: a rank's operations and their times, for Perfetto or chrome://tracing.
#
# With PHALANX_TRACE=folder in the environment each backend writes `rank-<rank>-<process>-<n>.json`
# there, as it goes: the array form of Chrome's trace events, one event a line, which readers accept
# without its end. So the trace of a process that was killed is whole up to then. `phalanx trace`
# merges the files of all ranks.

log = logging.getLogger("phalanx")

VARIABLE = "PHALANX_TRACE"


class Trace:
    """One backend's file. Times are microseconds of this host's clock, since 1970."""

    def __init__(self, folder: Path, rank: int, world_size: int, now: Callable[[], float]) -> None:
        self._rank = rank
        self._groups: dict[int, int] = {}
        self._since = time() - now()
        self._file = _create(folder, rank)
        self._size = 0  # bytes, all of whole lines
        self._issued: dict[Work[Any], float] = {}  # when the calls that issued works came back
        weakref.finalize(self, _close, self._file)
        self._write(b"[\n")
        self._name("process_name", 0, name=f"rank {rank}")
        self._name(
            "phalanx",
            0,
            rank=rank,
            world_size=world_size,
            host=socket.gethostname(),
            process=os.getpid(),
            started=time(),
        )

    @classmethod
    def wanted(cls, rank: int, world_size: int, now: Callable[[], float]) -> Trace | None:
        """Return a trace, if the environment asks for one. Raise `BackendUnavailableError`."""
        folder = os.environ.get(VARIABLE, "")
        if not folder:
            return None
        try:
            return cls(Path(folder), rank, world_size, now)
        except OSError as error:
            raise BackendUnavailableError(
                f"rank {rank}: no trace can be written to {VARIABLE}={folder}: {error}", rank=rank
            ) from error

    def issued(self, work: Work[Any], now: float) -> None:
        """Take the call that issued a work, which is not over, as back."""
        self._issued[work] = now

    def ended(self, work: Work[Any], awaited: float) -> None:
        """Write down a finished work; a thread has waited for it since `since`, or never (inf).

        A thread was in it from its start until the call that issued it came back, and during the
        wait.
        """
        call, collective = work.call, work.is_collective
        seconds = call.ended - call.started
        issued = self._issued.pop(work, call.ended)
        free = min(max(awaited, issued), call.ended) - issued
        arguments: dict[str, Any] = {
            "sequence": call.sequence,
            "bytes": len(work.buffers[0]) if work.buffers else 0,
            "sent": work.sent,
            "received": work.received,
            "group": call.suffix.removeprefix(" in the group of ") or "world",
            "waiting_us": round(work.waited * 1e6, 1),
            "moving_us": round((seconds - work.waited) * 1e6, 1),
            "blocked_us": round((seconds - free) * 1e6, 1),
            "signature": call.signature,
            "where": str(call.site),
        }
        if work.error is not None:
            arguments["error"] = str(work.error)
        event = {
            "ph": "X",
            "name": call.name,
            "cat": "collective" if collective else "message",
            "pid": self._rank,
            "tid": self._thread(work.group.id, arguments["group"], collective),
            "ts": round((call.started + self._since) * 1e6, 1),
            "dur": round(seconds * 1e6, 1),
            "args": arguments,
        }
        self._write_event(event)

    def _thread(self, group: int, name: str, collective: bool) -> int:
        """Return the line of the picture for a group's collectives, or for its messages."""
        key = group if collective else ~group
        if key not in self._groups:
            self._groups[key] = len(self._groups)
            what = name if collective else f"{name}: messages"
            self._name("thread_name", self._groups[key], name=what)
        return self._groups[key]

    def _name(self, what: str, thread: int, **arguments: Any) -> None:
        self._write_event(
            {"ph": "M", "name": what, "pid": self._rank, "tid": thread, "args": arguments}
        )

    def _write_event(self, event: dict[str, Any]) -> None:
        self._write(json.dumps(event).encode() + b",\n")

    def _write(self, line: bytes) -> None:
        if self._file < 0:
            return
        rest = memoryview(line)
        try:
            while rest:  # when the disk is nearly full, only a part is written
                rest = rest[os.write(self._file, rest) :]
            self._size += len(line)
        except OSError as error:  # a full disk ends the trace, not the training
            log.warning("rank %d: the trace ends here: %s", self._rank, error)
            with suppress(OSError):
                os.ftruncate(self._file, self._size)  # nor is the last line torn
            self._file = -1


def _create(folder: Path, rank: int) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    number = 0
    while True:
        path = folder / f"rank-{rank}-{os.getpid()}-{number}.json"
        with suppress(FileExistsError), files.new_file(str(path), 0o644) as file:
            return os.dup(file)
        number += 1


def _close(file: int) -> None:
    with suppress(OSError):
        os.close(file)


# ------------------------------------------------------------------------------
# The log: the messages of the logger `phalanx`.
#
#     debug     addresses of ranks, choices of algorithms, connections that broke
#     info      one line of rank 0 when a job begins
#     warning   problems that need a person's attention
#
# Without PHALANX_LOG that is the program's business, as with any logger.

LOG_VARIABLE, LEVELS = "PHALANX_LOG", ("debug", "info", "warning")


def set_up_log() -> None:
    """Set the log's level by PHALANX_LOG; on stderr, in a program without a log of its own."""
    level = os.environ.get(LOG_VARIABLE, "").strip().lower()
    if not level:
        return
    if level not in LEVELS:
        raise MisuseError(f"{LOG_VARIABLE}={level} is none of {', '.join(LEVELS)}")
    log.setLevel(level.upper())
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s phalanx %(levelname)s: %(message)s"))
        # Not twice, in a program that sets up a log of its own later on.
        handler.addFilter(lambda _: not logging.root.handlers)
        log.addHandler(handler)
