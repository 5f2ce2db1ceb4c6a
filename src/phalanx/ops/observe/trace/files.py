"""The traces of ranks: their files, and the operations in them.

Each file is read once for an index, which takes some 60 bytes of memory an operation. Then its
operations are decoded one at a time, in the order of their starts.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from phalanx.errors import MisuseError, plain
from phalanx.files import reading

_FILE_NAME = re.compile(r"rank-(\d{1,9})-(\d{1,9})-(\d{1,9})\.json", re.ASCII)


class TraceEvent(msgspec.Struct, gc=False):
    """One event of a Chrome trace; times (`ts`, `dur`) are microseconds.

    args   as in the file, to be passed on; those that matter here are `EventArgs`
    """

    ph: str
    name: str
    cat: str = ""
    pid: int = 0
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class EventArgs(msgspec.Struct, gc=False):
    """The arguments of an event that matter here."""

    # An operation:
    sequence: int | None = None
    bytes: int = 0
    group: str = "world"
    blocked_us: float | None = None
    where: str = ""
    error: str | None = None
    # A backend:
    world_size: int = 0
    host: str = "?"
    started: float = 0.0


_decode = msgspec.json.Decoder(TraceEvent).decode
_decode_args = msgspec.json.Decoder(EventArgs).decode

_LONGEST = 1 << 20  # bytes of a line
_BETWEEN = b" \r\t\n,"
"""What is between events."""


@dataclass
class TraceFile:
    """One backend of one rank, and the places of the operations in its file.

    world_size   0: it was not written down
    started      seconds since 1970, by the clock of `host`
    ended        microseconds since 1970: when its last operation was over
    damaged      lines that cannot be read, apart from the last one
    cut_off      whether the last line cannot be read
    times        start of each operation, in microseconds since 1970
    places       beginning of the line of each
    """

    path: Path
    rank: int
    data: BinaryIO = field(repr=False)
    world_size: int = 0
    host: str = "?"
    started: float = 0.0
    ended: float = 0.0
    run: int = 0
    damaged: int = 0
    cut_off: bool = False
    times: array[float] = field(default_factory=lambda: array("d"), repr=False)
    places: array[int] = field(default_factory=lambda: array("q"), repr=False)

    def __post_init__(self) -> None:
        place = 0
        for line in iter(partial(self.data.readline, _LONGEST), b""):
            begin, place = place, place + len(line)
            text = line.strip(_BETWEEN)
            if text in (b"[", b"]", b""):
                continue
            try:
                if not text.isascii():
                    text.decode()  # the decoder passes over other fields
                event = _decode(text)
                args = _decode_args(event.args)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                is_whole = line.endswith(b"\n")
                self.damaged += is_whole
                self.cut_off = self.cut_off or not is_whole
                continue
            if event.ph == "X":
                self.times.append(event.ts)
                self.places.append(begin)
                self.ended = max(self.ended, event.ts + max(event.dur, 0.0))
            elif event.name == "phalanx":
                self.world_size, self.started = args.world_size, args.started
                self.host = plain(args.host)
        self.started = self.started or min(self.times, default=0.0) / 1e6

    def operations(self) -> Iterator[tuple[float, TraceFile, TraceEvent, EventArgs]]:
        """Yield each operation with its time and this file, in the order of their starts."""
        for number in sorted(range(len(self.times)), key=self.times.__getitem__):
            self.data.seek(self.places[number])
            event = _decode(self.data.readline().strip(_BETWEEN))
            yield event.ts, self, event, _decode_args(event.args)


@contextmanager
def open_traces(folder: Path) -> Iterator[list[TraceFile]]:
    """Open and index all traces in a folder; yield a list of them, in the order of names.

    Raises `MisuseError` if there is no such folder, no trace in it, or one that cannot be read.
    """
    if not folder.is_dir():
        raise MisuseError(
            f"there is no folder {folder}: give the one that PHALANX_TRACE named when the job ran"
        )
    found = [(path, _FILE_NAME.fullmatch(path.name)) for path in sorted(folder.iterdir())]
    named = [(path, int(name[1])) for path, name in found if name]
    if not named:
        raise MisuseError(
            f"there is no trace in {folder} (rank-*.json): run the job with "
            f"PHALANX_TRACE={folder} in its environment"
        )
    with ExitStack() as stack:
        files: list[TraceFile] = []
        try:
            for path, rank in named:
                opened = stack.enter_context(reading(str(path)))
                data = stack.enter_context(open(opened, "rb", closefd=False))
                files.append(TraceFile(path, rank, data))
        except OSError as error:
            raise MisuseError(f"a trace cannot be read: {error}") from error
        runs: Counter[int] = Counter()
        for trace in sorted(files, key=lambda trace: trace.started):
            trace.run = runs[trace.rank]
            runs[trace.rank] += 1
        yield files
