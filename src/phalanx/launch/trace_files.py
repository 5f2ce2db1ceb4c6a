"""The traces of a job's ranks, as `PHALANX_TRACE=folder` leaves them: found, read, put in order.

One file a rank and backend, `rank-<rank>-<process>-<n>.json`: "[", then an event a line. A rank
that was killed leaves the end of its last line unwritten, which is no error. A rank that was
started again, or that met anew, has several files: its runs, counted from 0 by when they began.
"""

from __future__ import annotations

import heapq
import mmap
import re
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from phalanx.errors import MisuseError

__all__ = ["Event", "TraceFile", "TraceSet"]

Event = dict[str, Any]
"""One event of a Chrome trace; times (`ts`, `dur`) are microseconds."""

_NAME = re.compile(r"rank-(\d+)-(\d+)-(\d+)\.json")


class _Said(msgspec.Struct):
    """What an operation says about itself, as far as it is used here."""

    sequence: int | None = None
    bytes: int = 0
    group: str = "world"
    waiting_us: float = 0.0
    moving_us: float = 0.0
    error: str = ""
    # And a backend:
    world_size: int = 0
    host: str = "?"
    started: float = 0.0


class _Line(msgspec.Struct):
    ph: str
    name: str
    cat: str = ""
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: _Said = msgspec.field(default_factory=_Said)


_check = msgspec.json.Decoder(_Line).decode
_decode = msgspec.json.Decoder(Event).decode


@dataclass
class TraceFile:
    """One backend of one rank, and where in its file the operations are."""

    path: Path
    rank: int
    world_size: int = 0
    """0: it was not written down."""
    host: str = "?"
    started: float = 0.0
    """Seconds since 1970, by the clock of `host`."""
    run: int = 0
    damaged: int = 0
    """Lines that cannot be read, the last one aside."""
    cut_off: bool = False
    times: array[float] = field(default_factory=lambda: array("d"), repr=False)
    """When each operation started, in microseconds since 1970."""
    places: array[int] = field(default_factory=lambda: array("q"), repr=False)
    """And where it is: the first byte of its line, and the first after it."""

    def in_order(self) -> Iterator[tuple[float, int, int]]:
        """Yield time and place of the operations, by when they started."""
        for number in sorted(range(len(self.times)), key=self.times.__getitem__):
            start, stop = self.places[2 * number : 2 * number + 2]
            yield self.times[number], start, stop


class TraceSet:
    """All traces in a folder, indexed by one reading; close it, or use a `with` statement.

    Takes some 100 bytes of memory an operation, and never a whole file. `MisuseError` where
    there is no such folder, no trace in it, or one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise MisuseError(
                f"there is no folder {folder}: give the one that PHALANX_TRACE named when the job "
                "ran"
            )
        found = [(path, _NAME.fullmatch(path.name)) for path in sorted(folder.iterdir())]
        self.files = [TraceFile(path, int(name[1])) for path, name in found if name]
        if not self.files:
            raise MisuseError(
                f"there is no trace in {folder} (rank-*.json): run the job with "
                f"PHALANX_TRACE={folder} in its environment"
            )
        self._open = ExitStack()
        self._data: list[mmap.mmap | bytes] = []
        try:
            for file in self.files:
                self._data.append(self._map(file.path))
                _index(file, self._data[-1])
        except OSError as error:
            self.close()
            raise MisuseError(f"a trace cannot be read: {error}") from error
        self._number_runs()

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def __enter__(self) -> TraceSet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def operations(self) -> Iterator[tuple[TraceFile, Event]]:
        """Yield every operation of all ranks, by when it started."""
        ordered = [self._places(number) for number in range(len(self.files))]
        for _, number, start, stop in heapq.merge(*ordered):
            yield self.files[number], _decode(self._data[number][start:stop])

    def _places(self, number: int) -> Iterator[tuple[float, int, int, int]]:
        for when, start, stop in self.files[number].in_order():
            yield when, number, start, stop

    def _map(self, path: Path) -> mmap.mmap | bytes:
        file = self._open.enter_context(path.open("rb"))
        if path.stat().st_size == 0:
            return b""
        return self._open.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def _number_runs(self) -> None:
        runs: dict[int, int] = {}
        for file in sorted(self.files, key=lambda file: file.started):
            file.run = runs.get(file.rank, 0)
            runs[file.rank] = file.run + 1


def _index(file: TraceFile, data: mmap.mmap | bytes) -> None:
    """Find the operations in `data`, and what it says about itself."""
    start, size = 0, len(data)
    while start < size:
        end = data.find(b"\n", start)
        stop = size if end < 0 else end
        line = data[start:stop].strip(b" \r\t,")
        if line not in (b"[", b"]", b""):
            _note(file, line, data.find(line, start), cut_off=end < 0)
        start = stop + 1
    file.started = file.started or min(file.times, default=0.0) / 1e6


def _note(file: TraceFile, line: bytes, start: int, *, cut_off: bool) -> None:
    try:
        event = _check(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        file.cut_off = file.cut_off or cut_off
        file.damaged += not cut_off
        return
    if event.ph == "X":
        file.times.append(event.ts)
        file.places.extend((start, start + len(line)))
    elif event.name == "phalanx":
        file.world_size = event.args.world_size
        file.host, file.started = event.args.host, event.args.started
