"""One trace of a whole job, out of those of its ranks: for Perfetto, and in numbers.

    rank-0-812-0.json  rank-1-813-0.json  ...   --- merge --->  merged.json, a process a rank
                                                                a line a group (more, where its
                                                                operations overlap)

Times of different hosts are not corrected: they are off by as much as the hosts' clocks are.
"""

from __future__ import annotations

import heapq
import mmap
import os
import re
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from phalanx.errors import MisuseError

_HEAD = b'{"otherData":{"producer":"phalanx trace"},"displayTimeUnit":"ms","traceEvents":[\n'
"""How every merged file begins; one that begins otherwise is not overwritten."""

_encode = msgspec.json.Encoder().encode


@dataclass
class RankSummary:
    """What one rank did, in all of its runs."""

    rank: int
    host: str
    runs: int = 0
    operations: int = 0
    bytes: int = 0
    waiting: float = 0.0
    """Seconds in which its operations waited for others."""
    moving: float = 0.0
    """Seconds in which they moved and combined bytes."""
    errors: int = 0
    last: int = 0
    """How often the others waited for this rank, the last one to come to a collective."""
    late: float = 0.0
    """Seconds by which it was last, in all."""


@dataclass
class Merged:
    """What `merge` has written, and what it has seen."""

    path: Path
    ranks: list[RankSummary]
    collectives: int
    """Collectives to which all ranks came; `last` and `late` are about these."""
    hosts: list[str]
    notes: list[str] = field(default_factory=list)
    """What a reader of the numbers should know."""

    @property
    def straggler(self) -> RankSummary | None:
        """The rank that the others lost most time with."""
        slowest = max(self.ranks, key=lambda rank: rank.late)
        return slowest if slowest.late > 0 else None


def merge(folder: Path, output: Path | None = None) -> Merged:
    """Merge the traces in `folder` into `output` (`folder/merged.json`), and sum them up.

    The earliest operation starts at 0. The file appears whole or not at all, and an earlier one is
    replaced. `MisuseError`: nothing to merge, or `output` is something else than a merged trace,
    or cannot be written.
    """
    output = output or folder / "merged.json"
    with TraceSet(folder) as traces:
        _check_replaceable(output)
        stragglers = Stragglers()
        ranks: dict[int, RankSummary] = {}
        for file in traces.files:
            ranks.setdefault(file.rank, RankSummary(file.rank, file.host)).runs += 1
        part = output.with_name(f"{output.name}.part")
        try:
            with part.open("wb") as out:
                separator = _HEAD
                for event in _events(traces, ranks, stragglers):
                    out.write(separator)
                    out.write(_encode(event))
                    separator = b",\n"
                out.write(b"\n]}\n")
            os.replace(part, output)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise MisuseError(
                f"{output} cannot be written ({error}): name another file with -o"
            ) from error
        for rank, summary in ranks.items():
            summary.last = stragglers.times.get(rank, 0)
            summary.late = stragglers.seconds.get(rank, 0.0)
        hosts = sorted({file.host for file in traces.files})
        in_order = [ranks[rank] for rank in sorted(ranks)]
        return Merged(output, in_order, stragglers.met, hosts, _notes(traces.files, hosts))


def _events(
    traces: TraceSet, ranks: dict[int, RankSummary], stragglers: Stragglers
) -> Iterator[Event]:
    lanes = _Lanes()
    for summary in ranks.values():
        name = f"rank {summary.rank} ({summary.host})"
        yield _name("process_name", summary.rank, 0, name=name)
        yield _name("process_sort_index", summary.rank, 0, sort_index=summary.rank)
    first: float | None = None
    for file, event in traces.operations():
        first = event["ts"] if first is None else first
        args = event.setdefault("args", {})
        _count(ranks[file.rank], event, args)
        stragglers.add(file, event)
        lane, new = lanes.find(file, event)
        if new:
            yield _name("thread_name", file.rank, lane, name=new)
        event.update(pid=file.rank, tid=lane, ts=round(event["ts"] - first, 1))
        yield event


def _name(what: str, rank: int, lane: int, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": args}


def _count(summary: RankSummary, event: Event, args: Event) -> None:
    summary.operations += 1
    summary.bytes += args.get("bytes", 0)
    summary.waiting += args.get("waiting_us", 0) / 1e6
    summary.moving += args.get("moving_us", 0) / 1e6
    summary.errors += "error" in args


class _Lanes:
    """The lines of the picture: one a rank, run and group, and another where two overlap."""

    def __init__(self) -> None:
        self._ends: dict[tuple[object, ...], list[tuple[int, float]]] = {}
        self._count: dict[int, int] = {}

    def find(self, file: TraceFile, event: Event) -> tuple[int, str]:
        """Return the number of a line that is free, and its name if it is a new one."""
        ends = self._ends.setdefault((file.rank, file.run, event.get("tid")), [])
        end = event["ts"] + event["dur"]
        for place, (lane, free) in enumerate(ends):
            if free <= event["ts"]:
                ends[place] = lane, end
                return lane, ""
        lane = self._count[file.rank] = self._count.get(file.rank, 0) + 1
        ends.append((lane, end))
        name = str(event["args"].get("group", "world"))
        name += "" if event.get("cat") == "collective" else ": messages"
        name += f", run {file.run}" if file.run else ""
        return lane, name


def _check_replaceable(output: Path) -> None:
    try:
        with output.open("rb") as file:
            ours = file.read(len(_HEAD)) == _HEAD
    except FileNotFoundError:
        return
    except OSError as error:
        raise MisuseError(f"{output} cannot be replaced ({error}): name a file with -o") from error
    if not ours:
        raise MisuseError(f"{output} is there and no merged trace: name another file with -o")


def _notes(files: list[TraceFile], hosts: list[str]) -> list[str]:
    notes = []
    if len(hosts) > 1:
        notes.append(
            f"{len(hosts)} hosts ({', '.join(hosts)}): times are by each host's own clock, and not "
            "corrected; who was last, and by how much, is as wrong as their clocks differ"
        )
    expected = max((file.world_size for file in files), default=0)
    missing = sorted({*range(expected)} - {file.rank for file in files})
    if missing:
        notes.append(
            f"there is no trace of rank{'s' if len(missing) > 1 else ''} "
            f"{', '.join(map(str, missing))} of {expected}"
        )
    for file in files:
        if file.cut_off:
            notes.append(f"{file.path.name} ends in the middle of an event: its rank was killed")
        if file.damaged:
            notes.append(f"{file.path.name} has {file.damaged} lines that are no events: left out")
    return notes


# ------------------------------------------------------------------------------
# The traces of a job's ranks, as `PHALANX_TRACE=folder` leaves them: found, read, put in order.
#
# One file a rank and backend, `rank-<rank>-<process>-<n>.json`: "[", then an event a line. A rank
# that was killed leaves the end of its last line unwritten, which is no error. A rank that was
# started again, or that met anew, has several files: its runs, counted from 0 by when they began.

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


# ------------------------------------------------------------------------------
# Which rank the others wait for: the one that comes to a collective last.
#
# rank 0  |=====all_reduce #41=====|
# rank 1      |=all_reduce #41=====|
# rank 2               |all_reduce=|        rank 2 was last, by the time between 1's start
#             ^--------^                    and its own: so much sooner it could have ended

_MEMBERS = re.compile(r"ranks \[([\d, ]+)\]")


@dataclass
class _Meeting:
    """One collective, of which some ranks have started."""

    ranks: int = 0
    last: float = 0.0
    before_last: float = 0.0


class Stragglers:
    """Counts, over operations given in the order of their starts, who was last and by how much.

    A collective that a rank did not come to does not count: it has no last one.
    """

    def __init__(self) -> None:
        self.times: dict[int, int] = {}
        """Rank -> how often it was last."""
        self.seconds: dict[int, float] = {}
        """Rank -> by how much it was last, in all."""
        self.met = 0
        """Collectives to which everyone came."""
        self._open: dict[tuple[object, ...], _Meeting] = {}
        self._ordinals: dict[tuple[object, ...], int] = {}
        self._groups: dict[tuple[object, ...], int] = {}

    def add(self, file: TraceFile, event: Event) -> None:
        """Take the next operation, of the rank whose `file` it is in."""
        if event.get("cat") != "collective":
            return
        said = event["args"]
        group = str(said.get("group", "world"))
        size = _size(group, file.world_size)
        if size < 2:
            return
        key = (file.run, group, self._ordinal(file, group, event.get("tid")), said.get("sequence"))
        meeting = self._open.setdefault(key, _Meeting())
        meeting.ranks += 1
        meeting.before_last, meeting.last = meeting.last, event["ts"]
        if meeting.ranks == size:
            del self._open[key]
            rank, late = file.rank, (meeting.last - meeting.before_last) / 1e6
            self.met += 1
            self.times[rank] = self.times.get(rank, 0) + 1
            self.seconds[rank] = self.seconds.get(rank, 0.0) + late

    def _ordinal(self, file: TraceFile, group: str, number: object) -> int:
        """Return how many groups of these members the rank had before this one.

        Ranks number their groups each for itself, but make those of the same members in one order.
        """
        this = (file.rank, file.run, group, number)
        if this not in self._ordinals:
            before = self._groups.get(this[:3], 0)
            self._ordinals[this], self._groups[this[:3]] = before, before + 1
        return self._ordinals[this]


def _size(group: str, world_size: int) -> int:
    members = _MEMBERS.search(group)
    return len(members[1].split(",")) if members else world_size
