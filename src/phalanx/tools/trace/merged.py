"""`phalanx trace`: merges the traces of a job's ranks into one, for Perfetto, and sums them up.

    rank-0-812-0.json  rank-1-813-0.json  ...   --- merge --->  merged.json: a process a rank, in it
                                                                a line a group (more, where its
                                                                operations overlap)

The files are those that a job leaves with `PHALANX_TRACE=folder`: one a rank and backend, named
`rank-<rank>-<process>-<n>.json`, "[" and then an event a line. A rank that was killed leaves the
end of its last line unwritten, which is no error. A rank that was started again, or that formed
its group anew, has several files: its runs, counted from 0 by when they began.

Times of different hosts are not corrected: they are off by as much as the hosts' clocks are.
"""

from __future__ import annotations

import heapq
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from phalanx.errors import MisuseError
from phalanx.tools.trace.profile import Part, Profile

Event = dict[str, Any]
"""One event of a Chrome trace; times (`ts`, `dur`) are microseconds."""

_FILE_NAME = re.compile(r"rank-(\d+)-(\d+)-(\d+)\.json")

_HEAD = b'{"otherData":{"producer":"phalanx trace"},"displayTimeUnit":"ms","traceEvents":[\n'
"""How every merged file begins; one that begins otherwise is not overwritten."""


@dataclass
class RankSummary:
    """What one rank did, in all of its runs.

    waiting   seconds in which its operations waited for others
    moving    seconds in which they moved and combined bytes
    last      how often it was the last rank to start a collective
    late      seconds by which it was the last, in all
    """

    rank: int
    host: str
    runs: int = 0
    operations: int = 0
    bytes: int = 0
    waiting: float = 0.0
    moving: float = 0.0
    errors: int = 0
    last: int = 0
    late: float = 0.0


@dataclass
class MergedTrace:
    """What `merge` has written, and what it has seen.

    collectives   how many all ranks have started; `last` and `late` of the ranks are about these
    notes         what a reader of the numbers should know
    profile       where the ranks' time went
    """

    path: Path
    ranks: list[RankSummary]
    collectives: int
    notes: list[str]
    profile: Profile

    @property
    def straggler(self) -> RankSummary | None:
        """The rank that the others lost most time with."""
        slowest = max(self.ranks, key=lambda rank: rank.late)
        return slowest if slowest.late > 0 else None


def merged_file(folder: Path, output: Path | None = None) -> Path:
    """Where `merge` writes."""
    return output or folder / "merged.json"


def merge(folder: Path, output: Path | None = None) -> MergedTrace:
    """Merge the traces in `folder` into `output` (`folder/merged.json`), and sum them up.

    The earliest operation starts at 0. The file appears whole or not at all, and an earlier one is
    replaced. Raises `MisuseError` where there is nothing to merge, and where `output` cannot be
    written or is there and no merged trace.
    """
    output = merged_file(folder, output)
    with open_traces(folder) as files:
        _check_replaceable(output)
        ranks: dict[int, RankSummary] = {}
        for file in files:
            ranks.setdefault(file.rank, RankSummary(file.rank, file.host)).runs += 1
        stragglers, profile = Stragglers(ranks), _empty_profile(files)
        part = output.with_name(f"{output.name}.part")
        try:
            with part.open("wb") as out:
                separator = _HEAD
                for event in _merged_events(files, ranks, stragglers, profile):
                    out.write(separator)
                    out.write(msgspec.json.encode(event))
                    separator = b",\n"
                out.write(b"\n]}\n")
            os.replace(part, output)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise MisuseError(
                f"{output} cannot be written ({error}): name another file with -o"
            ) from error
        ordered = [ranks[rank] for rank in sorted(ranks)]
        for event, parts, missing in stragglers.incomplete():
            profile.incomplete(event, parts, missing)
        return MergedTrace(output, ordered, stragglers.collectives, _notes(files), profile)


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


def _empty_profile(files: list[TraceFile]) -> Profile:
    first = min((min(file.times) for file in files if file.times), default=0.0)
    profile = Profile(first, max((file.ended for file in files), default=first))
    for file in sorted(files, key=lambda file: file.started):
        profile.present(file.rank, file.started * 1e6, file.ended)
    return profile


def _merged_events(
    files: list[TraceFile],
    ranks: dict[int, RankSummary],
    stragglers: Stragglers,
    profile: Profile,
) -> Iterator[Event]:
    """All events of the merged file; fills the summaries and the profile as it goes."""

    def label(what: str, rank: int, line: int, **args: object) -> Event:
        return {"ph": "M", "name": what, "pid": rank, "tid": line, "args": args}

    for summary in ranks.values():
        name = f"rank {summary.rank} ({summary.host})"
        yield label("process_name", summary.rank, 0, name=name)
        yield label("process_sort_index", summary.rank, 0, sort_index=summary.rank)
    # The lines of the picture: one a rank, run and group, and another where two overlap. For each
    # of them its number, and when it is free again.
    lines: dict[tuple[object, ...], dict[int, float]] = {}
    count: Counter[int] = Counter()
    in_order = heapq.merge(*(file.operations() for file in files), key=lambda found: found[0])
    first: float | None = None
    for start, file, event in in_order:
        first = start if first is None else first
        for name, default in (("ts", start), ("dur", 0.0), ("args", {})):
            event.setdefault(name, default)
        args = event["args"]
        summary = ranks[file.rank]
        summary.operations += 1
        summary.bytes += args.get("bytes", 0)
        summary.waiting += args.get("waiting_us", 0) / 1e6
        summary.moving += args.get("moving_us", 0) / 1e6
        summary.errors += "error" in args
        part = profile.operation(file.rank, event)
        parts = stragglers.add(file, event, part)
        if parts is None:
            profile.alone(event, part)
        elif parts:
            profile.collective(event, parts)
        free_from = lines.setdefault((file.rank, file.run, event.get("tid")), {})
        free = (line for line, time in free_from.items() if time <= event["ts"])
        line = next(free, 0)
        if not line:
            count[file.rank] += 1
            line = count[file.rank]
            name = str(args.get("group", "world"))
            name += "" if event.get("cat") == "collective" else ": messages"
            name += f", run {file.run}" if file.run else ""
            yield label("thread_name", file.rank, line, name=name)
        free_from[line] = event["ts"] + event["dur"]
        event.update(pid=file.rank, tid=line, ts=round(start - first, 1))
        yield event


def _notes(files: list[TraceFile]) -> list[str]:
    notes = []
    hosts = sorted({file.host for file in files})
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
# Reading: each file is read once for an index, which takes some 100 bytes of memory an operation.
# The operations themselves are decoded one at a time, in the order of their starts.


class _Args(msgspec.Struct):
    """What an event says about itself, as far as its type matters here."""

    # An operation:
    sequence: int | None = None
    bytes: int = 0
    group: str = "world"
    waiting_us: float = 0.0
    moving_us: float = 0.0
    blocked_us: float = 0.0
    where: str = ""
    error: str = ""
    # A backend:
    world_size: int = 0
    host: str = "?"
    started: float = 0.0


class _CheckedEvent(msgspec.Struct):
    ph: str
    name: str
    cat: str = ""
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: _Args = msgspec.field(default_factory=_Args)


_decode = msgspec.json.Decoder(Event).decode

_BETWEEN = b" \r\t\n,"
"""What is between events."""


@dataclass
class TraceFile:
    """One backend of one rank, and where in its file the operations are.

    world_size   0: it was not written down
    started      seconds since 1970, by the clock of `host`
    ended        microseconds since 1970: when its last operation was over
    damaged      lines that cannot be read, apart from the last one
    cut_off      whether the last line cannot be read
    times        when each operation started, in microseconds since 1970
    places       where the line of each begins
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
        while line := self.data.readline():
            text = line.strip(_BETWEEN)
            if text in (b"[", b"]", b""):
                continue
            try:
                event = msgspec.convert(_decode(text), _CheckedEvent)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                is_whole = line.endswith(b"\n")
                self.damaged += is_whole
                self.cut_off = self.cut_off or not is_whole
                continue
            if event.ph == "X":
                self.times.append(event.ts)
                self.ended = max(self.ended, event.ts + max(event.dur, 0.0))
                self.places.append(self.data.tell() - len(line))
            elif event.name == "phalanx":
                self.world_size = event.args.world_size
                self.host, self.started = event.args.host, event.args.started
        self.started = self.started or min(self.times, default=0.0) / 1e6

    def operations(self) -> Iterator[tuple[float, TraceFile, Event]]:
        """Yield each operation with its time and this file, in the order of their starts."""
        for number in sorted(range(len(self.times)), key=self.times.__getitem__):
            self.data.seek(self.places[number])
            yield self.times[number], self, _decode(self.data.readline().strip(_BETWEEN))


@contextmanager
def open_traces(folder: Path) -> Iterator[list[TraceFile]]:
    """All traces in a folder, open and indexed, in the order of their names.

    Raises `MisuseError` where there is no such folder, no trace in it, or one that cannot be read.
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
                files.append(TraceFile(path, rank, stack.enter_context(path.open("rb"))))
        except OSError as error:
            raise MisuseError(f"a trace cannot be read: {error}") from error
        runs: Counter[int] = Counter()
        for trace in sorted(files, key=lambda trace: trace.started):
            trace.run = runs[trace.rank]
            runs[trace.rank] += 1
        yield files


# ------------------------------------------------------------------------------
# Which rank the others wait for: the last one to start a collective.
#
# rank 0  |=====all_reduce #41=====|
# rank 1      |=all_reduce #41=====|
# rank 2               |all_reduce=|        rank 2 was last, by the time between 1's start
#             ^--------^                    and its own: so much sooner it could have ended

_MEMBERS = re.compile(r"ranks \[([\d, ]+)\]")


class Stragglers:
    """Counts, over operations given in the order of their starts, who was last and by how much.

    ranks         whose `last` and `late` are filled
    collectives   how many all ranks of their group have started; the others do not count
    """

    def __init__(self, ranks: Mapping[int, RankSummary]) -> None:
        self.ranks = ranks
        self.collectives = 0
        # What ranks have started and others not yet: an event of it, whose it is, and its parts.
        self._open: dict[tuple[object, ...], tuple[Event, Sequence[int], list[Part]]] = {}
        self._ordinals: dict[tuple[object, ...], int] = {}
        self._groups: Counter[tuple[object, ...]] = Counter()

    def add(self, file: TraceFile, event: Event, part: Part) -> list[Part] | None:
        """Take the next operation, of the rank whose `file` it is in.

        Return all parts of its collective if it is the last one of them, and else none; None if it
        is no collective of several ranks.
        """
        if event.get("cat") != "collective":
            return None
        args = event["args"]
        group = str(args.get("group", "world"))
        members = _MEMBERS.search(group)
        ranks = [*map(int, members[1].split(","))] if members else range(file.world_size)
        if len(ranks) < 2:
            return None
        # How many groups of these members the rank had before this one: ranks number their groups
        # each for itself, but make those of the same members in one order.
        alike = (file.rank, file.run, group)
        this = (*alike, event.get("tid"))
        if this not in self._ordinals:
            self._ordinals[this] = self._groups[alike]
            self._groups[alike] += 1
        key = (file.run, group, self._ordinals[this], args.get("sequence"))
        parts = self._open.setdefault(key, (event, ranks, []))[2]
        parts.append(part)
        if len(parts) < len(ranks):
            return []
        del self._open[key]
        self.collectives += 1
        self.ranks[file.rank].last += 1
        self.ranks[file.rank].late += (parts[-1].start - parts[-2].start) / 1e6
        return parts

    def incomplete(self) -> Iterator[tuple[Event, list[Part], list[int]]]:
        """Yield each collective that some ranks have no part in: its parts, and these ranks."""
        for event, ranks, parts in self._open.values():
            begun = {part.rank for part in parts}
            yield event, parts, [rank for rank in ranks if rank not in begun]
