"""`phalanx trace`: merges the traces of a job's ranks into one, for Perfetto, and sums them up.

    rank-0-812-0.json  rank-1-813-0.json  ...   --- merge --->  merged.json: a process a rank, in it
                                                                a line a group (more, if its
                                                                operations overlap)

The files are those that a job leaves with `PHALANX_TRACE=folder`: one a rank and backend, named
`rank-<rank>-<process>-<n>.json`, "[" and then an event a line. A rank that was killed leaves the
end of its last line unwritten, which is no error. A rank that was started again, or that formed
its group anew, has several files: its runs, counted from 0 by when they began. Each file is read
once for an index, which takes some 60 bytes of memory an operation; then its operations are decoded
one at a time, in the order of their starts.

Times of different hosts are not corrected: they are off by as much as the hosts' clocks.
"""

from __future__ import annotations

import heapq
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

import msgspec

from phalanx.errors import MisuseError, name_ranks, plain
from phalanx.files import reading, replacing
from phalanx.ops.observe.trace.profile import Part, Profile, RankProfile

_FILE_NAME = re.compile(r"rank-(\d{1,9})-(\d{1,9})-(\d{1,9})\.json", re.ASCII)


class TraceEvent(msgspec.Struct, gc=False):
    """One event of a Chrome trace; times (`ts`, `dur`) are microseconds."""

    ph: str
    name: str
    cat: str = ""
    pid: int = 0
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")  # as in the file; `EventArgs` are those that matter


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
_BETWEEN = b" \r\t\n,"  # bytes between events


@dataclass
class TraceFile:
    """One backend of one rank, and the places of the operations in its file."""

    path: Path
    rank: int
    data: BinaryIO = field(repr=False)
    world_size: int = 0  # 0: it was not written down
    host: str = "?"
    started: float = 0.0  # seconds since 1970, by the clock of `host`
    ended: float = 0.0  # microseconds since 1970: when its last operation was over
    run: int = 0
    damaged: int = 0  # lines that cannot be read, apart from the last one
    cut_off: bool = False  # whether the last line cannot be read
    # The start of each operation, in microseconds since 1970, and the beginning of its line.
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


# ------------------------------------------------------------------------------
# The merged file.

_HEAD = b'{"otherData":{"producer":"phalanx trace"},"displayTimeUnit":"ms","traceEvents":[\n'
"""How every merged file begins; one that begins otherwise is not overwritten."""


@dataclass
class MergedTrace:
    """The result of `merge`: the file, notes for readers of the numbers, and the ranks' profile."""

    path: Path
    notes: list[str]
    profile: Profile

    @property
    def ranks(self) -> list[RankProfile]:
        """Return the ranks that left traces, by number."""
        ranks = self.profile.ranks
        return [ranks[rank] for rank in sorted(ranks) if ranks[rank].runs]


def merged_file(folder: Path, output: Path | None = None) -> Path:
    """Return the path of the merged file."""
    return output.resolve() if output is not None else folder / "merged.json"


def merge(folder: Path, output: Path | None = None) -> MergedTrace:
    """Merge the traces in `folder` into `output` (`folder/merged.json`), and sum them up.

    The earliest operation starts at 0. The file appears whole or not at all, and an earlier one is
    replaced. Raises `MisuseError` if there is nothing to merge, and if `output` cannot be written
    or exists and is no merged trace.
    """
    output = merged_file(folder, output)
    with open_traces(folder) as files:
        check_replaceable(output, _HEAD, "no merged trace")
        collectives, profile = _Collectives(), _empty_profile(files)
        try:
            with replacing(str(output)) as part, open(part, "wb", closefd=False) as out:
                separator = _HEAD
                for event in _merged_events(files, collectives, profile):
                    out.write(separator)
                    out.write(msgspec.json.encode(event))
                    separator = b",\n"
                out.write(b"\n]}\n")
        except OSError as error:
            raise MisuseError(
                f"{output} cannot be written ({error}): name another file with -o"
            ) from error
        for event, args, parts, missing in collectives.incomplete():
            profile.incomplete(event, args, parts, missing)
        return MergedTrace(output, _notes(files), profile)


def check_replaceable(path: Path, mark: bytes, otherwise: str) -> None:
    """Raise `MisuseError` if a file is there without `mark` at its beginning: it is `otherwise`."""
    try:
        with reading(str(path)) as file:
            ours = mark in os.read(file, 400)
    except FileNotFoundError:
        return
    except OSError as error:
        raise MisuseError(f"{path} cannot be replaced ({error}): name a file with -o") from error
    if not ours:
        raise MisuseError(
            f"{path} is there and {otherwise}: move it away, or name another file with -o"
        )


def _empty_profile(files: list[TraceFile]) -> Profile:
    first = min((min(file.times) for file in files if file.times), default=0.0)
    profile = Profile(first, max((file.ended for file in files), default=first))
    for file in sorted(files, key=lambda file: file.started):
        profile.present(file.rank, file.host, file.started * 1e6, file.ended)
    return profile


def _merged_events(
    files: list[TraceFile], collectives: _Collectives, profile: Profile
) -> Iterator[TraceEvent]:
    """Yield all events of the merged file; fill the profile on the way."""

    def label(what: str, rank: int, line: int, **args: object) -> TraceEvent:
        return TraceEvent(
            "M", what, pid=rank, tid=line, args=msgspec.Raw(msgspec.json.encode(args))
        )

    for rank, summary in profile.ranks.items():
        yield label("process_name", rank, 0, name=f"rank {rank} ({summary.host})")
        yield label("process_sort_index", rank, 0, sort_index=rank)
    lines: dict[tuple[object, ...], _Lines] = {}
    count: Counter[int] = Counter()
    in_order = heapq.merge(*(file.operations() for file in files), key=itemgetter(0))
    for start, file, event, args in in_order:
        rank = file.rank
        key = (rank, file.run, event.tid, event.cat, args.group)
        of_group = lines.get(key)
        if of_group is None:
            is_collective = event.cat == "collective"
            name = args.group + ("" if is_collective else ": messages")
            name += f", run {file.run}" if file.run else ""
            group = collectives.next_group(file, args.group) if is_collective else None
            of_group = lines[key] = _Lines(name, group)
        part = profile.operation(rank, event, args)
        if of_group.group is None:
            profile.alone(event, args, part)
        elif parts := collectives.add(of_group.group, event, args, part):
            profile.collective(event, args, parts)
        line = next((line for line, since in of_group.free_from.items() if since <= start), 0)
        if not line:
            count[rank] += 1
            line = count[rank]
            yield label("thread_name", rank, line, name=of_group.name)
        of_group.free_from[line] = start + event.dur
        event.pid, event.tid, event.ts = rank, line, round(start - profile.first, 1)
        yield event


@dataclass(slots=True)
class _Lines:
    """The lines of the picture for a group of a rank: one, and more if operations overlap."""

    name: str
    group: _Group | None  # None: no other rank takes part
    free_from: dict[int, float] = field(default_factory=dict)  # when each line is, by number


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
        notes.append(f"there is no trace of {name_ranks(missing)} of {expected}")
    runs = max(Counter(file.rank for file in files).values(), default=0)
    if runs > 1:
        notes.append(
            f"a rank has {runs} runs here: the job was started again, or the folder has the traces "
            "of several jobs, which are taken for one"
        )
    for file in files:
        if file.cut_off:
            notes.append(f"{file.path.name} ends in the middle of an event: its rank was killed")
        if file.damaged:
            notes.append(f"{file.path.name} has {file.damaged} lines that are no events: left out")
    return notes


# ------------------------------------------------------------------------------
# Which rank the others wait for: the last one to start a collective.
#
# rank 0  |=====all_reduce #41=====|
# rank 1      |=all_reduce #41=====|
# rank 2               |all_reduce=|        rank 2 was last, by the time between 1's start
#             ^--------^                    and its own: so much sooner it could have ended

_MEMBERS = re.compile(r"ranks \[([\d, ]+)\]")


@dataclass(slots=True)
class _Group:
    """A group of ranks, and the collectives by number that not all of them have begun."""

    ranks: Sequence[int]
    # Of each an event, its arguments, and the parts so far.
    open: dict[int | None, tuple[TraceEvent, EventArgs, list[Part]]] = field(default_factory=dict)


class _Collectives:
    """Puts the ranks' parts of each collective together, in the order of their starts."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, str, int], _Group] = {}
        self._alike: Counter[tuple[int, int, str]] = Counter()

    def next_group(self, file: TraceFile, name: str) -> _Group | None:
        """Return a rank's next group of a name, None if no other rank is in it.

        Each rank numbers its own groups, but all make those of the same members in one order.
        """
        members = _MEMBERS.search(name)
        ranks = [*map(int, members[1].split(","))] if members else range(file.world_size)
        if len(ranks) < 2:
            return None
        alike = (file.rank, file.run, name)
        number = self._alike[alike]
        self._alike[alike] += 1
        return self._groups.setdefault((file.run, name, number), _Group(ranks))

    def add(self, group: _Group, event: TraceEvent, args: EventArgs, part: Part) -> list[Part]:
        """Take the next operation; return all parts of the collective if it is the last of them."""
        parts = group.open.setdefault(args.sequence, (event, args, []))[2]
        parts.append(part)
        if len(parts) < len(group.ranks):
            return []
        del group.open[args.sequence]
        return parts

    def incomplete(self) -> Iterator[tuple[TraceEvent, EventArgs, list[Part], list[int]]]:
        """Yield each collective that some ranks have no part in: its parts, and these ranks."""
        for group in self._groups.values():
            for event, args, parts in group.open.values():
                begun = {part.rank for part in parts}
                yield event, args, parts, [rank for rank in group.ranks if rank not in begun]
