"""One trace of a whole job, out of those of its ranks: for Perfetto, and in numbers.

    rank-0-812-0.json  rank-1-813-0.json  ...   --- merge --->  merged.json, a process a rank
                                                                a line a group (more, where its
                                                                operations overlap)

Times of different hosts are not corrected: they are off by as much as the hosts' clocks are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from phalanx.errors import MisuseError
from phalanx.launch.stragglers import Stragglers
from phalanx.launch.trace_files import Event, TraceFile, TraceSet

__all__ = ["Merged", "RankSummary", "merge"]

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
