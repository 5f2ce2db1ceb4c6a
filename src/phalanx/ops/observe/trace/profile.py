"""The use of the ranks' time, summed up while a trace of any size is read.

    rank 0  |computing|==all_reduce====|computing|==all_reduce, async==|
                      |waiting |comm.  |         |overlapped    |comm. |
    rank 1  |computing         |==all_reduce|computing
                      ^--------^ rank 0 waits for rank 1, the last one to begin

At any time a rank is in one of four states: `STATES`. A rank waits, in a collective, until the last
one of its group has begun it; ranks lose this time by a slow one, with any backend. The time is
computed from all ranks' starts, and is off by the difference of their hosts' clocks. A rank that
died in a collective has no start: then the others wait for it to their end.
"""

from __future__ import annotations

import math
from array import array
from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from phalanx.ops.observe.trace.merged import EventArgs, TraceEvent

STATES = ("computing", "overlapped", "waiting", "communicating")
"""What a rank does: compute, or anything else that is no operation of Phalanx; compute while an
operation is under way; wait in one for a rank that has not begun it; be in one that all have begun.
"""

BINS = 240  # of the whole time, for the picture
SLOWEST = 15  # operations that are shown
ERRORS = 20
KINDS = 500  # of operations, by name, line and group; the others go into one
_OTHERS = ("other operations", "", "")
_LONGEST = 2000  # characters of an error


class Part(msgspec.Struct, frozen=True, gc=False):
    """One rank's part in an operation, in microseconds since the first operation of the job."""

    rank: int
    start: float
    end: float
    waited: float  # the time from which the program was blocked in it; `end` if it never was


@dataclass(frozen=True, slots=True)
class Slow:
    """An operation of all its ranks, from the first one's start to the last one's end."""

    seconds: float
    title: str
    group: str
    where: str
    first: Part  # that of the rank that began it first
    last: int = -1  # the rank that began it last, `late` seconds after the first; -1: a message
    late: float = 0.0
    missing: tuple[int, ...] = ()  # the ranks that have no part in it


@dataclass(slots=True)
class KindOfOperation:
    """All operations of one name, line and group. A collective counts once on each rank."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    blocked: float = 0.0
    waiting: float = 0.0


@dataclass(slots=True)
class RankProfile:
    """One rank, in all of its runs; and its profile over time: seconds in each bin."""

    rank: int
    host: str = "?"
    runs: int = 0
    operations: int = 0
    bytes: int = 0
    errors: int = 0
    last: int = 0  # number of collectives that it was the last rank to start
    late: float = 0.0  # seconds by which it was the last, in all
    # Between its start and last operation; with one under way; blocked in one; waiting for others.
    present: array[float] = field(default_factory=lambda: array("d", bytes(8 * BINS)))
    under_way: array[float] = field(default_factory=lambda: array("d", bytes(8 * BINS)))
    blocked: array[float] = field(default_factory=lambda: array("d", bytes(8 * BINS)))
    waiting: array[float] = field(default_factory=lambda: array("d", bytes(8 * BINS)))
    waited: float = 0.0  # seconds that it waited for ranks that began later
    awaited: float = 0.0  # those that others waited for it, the last to begin; all summed up
    seen_until: float = 0.0  # end of its presence so far, in microseconds
    busy_until: float = 0.0  # end of its operations so far

    def states(self, number: int) -> tuple[float, float, float, float]:
        """Return the seconds of each of `STATES` in a bin."""
        present = self.present[number]
        under_way = min(self.under_way[number], present)
        blocked = min(self.blocked[number], under_way)
        waiting = min(self.waiting[number], blocked)
        return present - under_way, under_way - blocked, waiting, blocked - waiting

    def totals(self) -> tuple[float, ...]:
        """Return the seconds of each of `STATES`, in all."""
        return tuple(math.fsum(each) for each in zip(*map(self.states, range(BINS)), strict=True))


class Profile:
    """The profile of a job, built from operations in the order of their starts.

    first, last   start of the job's first operation and end of the last one, in microseconds
    """

    def __init__(self, first: float, last: float) -> None:
        self.first = first
        self.span = min(max(last - first, 1.0), 1e15)
        self._width = self.span / BINS
        self.ranks: dict[int, RankProfile] = {}  # also without a trace, if others waited for them
        self.collectives = 0  # number of those that all ranks have started
        self.kinds: dict[tuple[str, str, str], KindOfOperation] = {}  # by name, line, and group
        self.errors: list[tuple[int, str, str]] = []  # the first ones: rank, operation, and text
        self.broken = 0  # number of collectives in which some rank has no part
        self.absent: Counter[int] = Counter()  # number of those in which each such rank has none
        self.slowest: list[Slow] = []  # the slowest first; of equal ones the first are kept

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first operation to the end of the last one."""
        return self.span / 1e6

    def present(self, rank: int, host: str, start: float, end: float) -> None:
        """Take a run of a rank (microseconds since 1970); runs come in order of their starts."""
        profile, end = self.ranks.setdefault(rank, RankProfile(rank, host)), end - self.first
        profile.runs += 1
        self._add(profile.present, max(start - self.first, profile.seen_until), end)
        profile.seen_until = max(profile.seen_until, end)

    def operation(self, rank: int, event: TraceEvent, args: EventArgs) -> Part:
        """Take the next operation of a rank."""
        start = min(event.ts - self.first, self.span)
        end = min(start + max(event.dur, 0.0), self.span)
        waited = start
        if args.blocked_us is not None:
            waited = max(start, min(end - args.blocked_us, end))
        profile = self.ranks[rank]
        profile.operations += 1
        profile.bytes += args.bytes
        profile.errors += args.error is not None
        if end > profile.busy_until:
            self._add(profile.under_way, max(start, profile.busy_until), end)
            profile.busy_until = end
        self._add(profile.blocked, waited, end)
        kind = self._kind(event, args)
        seconds = (end - start) / 1e6
        kind.count += 1
        kind.bytes += args.bytes
        kind.seconds += seconds
        kind.blocked += (end - waited) / 1e6
        kind.longest = max(kind.longest, seconds)
        if args.error is not None and len(self.errors) < ERRORS:
            self.errors.append((rank, _title(event, args), args.error[:_LONGEST]))
        return Part(rank, start, end, waited)

    def collective(self, event: TraceEvent, args: EventArgs, parts: list[Part]) -> None:
        """Take a collective that all of a group have begun, the last of `parts` with `event`."""
        before, last = parts[-2:]
        self.collectives += 1
        self.ranks[last.rank].last += 1
        self.ranks[last.rank].late += (last.start - before.start) / 1e6
        self._waits(event, args, parts[:-1], last.start, last.rank)
        self._note_slow(event, args, parts, last.rank, (last.start - parts[0].start) / 1e6)

    def incomplete(
        self, event: TraceEvent, args: EventArgs, parts: list[Part], missing: list[int]
    ) -> None:
        """Take a collective in which some ranks have no part: they died before, or never began."""
        self.broken += 1
        self.absent.update(missing)
        culprit = missing[0] if len(missing) == 1 else None
        self._waits(event, args, parts, math.inf, culprit)
        self._note_slow(event, args, parts, missing=tuple(missing))

    def alone(self, event: TraceEvent, args: EventArgs, part: Part) -> None:
        """Take a message, or a collective of one rank."""
        self._note_slow(event, args, [part])

    def _waits(
        self,
        event: TraceEvent,
        args: EventArgs,
        parts: list[Part],
        until: float,
        culprit: int | None,
    ) -> None:
        """Count ranks as blocked in their parts until `until`, by another one's late beginning."""
        in_all = 0.0
        for part in parts:
            end = min(until, part.end)
            if end > part.waited:
                seconds = (end - part.waited) / 1e6
                in_all += seconds
                profile = self.ranks[part.rank]
                profile.waited += seconds
                self._add(profile.waiting, part.waited, end)
        self._kind(event, args).waiting += in_all
        if culprit is not None:
            self.ranks.setdefault(culprit, RankProfile(culprit)).awaited += in_all

    def _kind(self, event: TraceEvent, args: EventArgs) -> KindOfOperation:
        key = (event.name, args.where, args.group)
        kind = self.kinds.get(key)
        if kind is None:
            key = key if len(self.kinds) < KINDS else _OTHERS
            kind = self.kinds.setdefault(key, KindOfOperation())
        return kind

    def _note_slow(
        self,
        event: TraceEvent,
        args: EventArgs,
        parts: list[Part],
        last: int = -1,
        late: float = 0.0,
        missing: tuple[int, ...] = (),
    ) -> None:
        seconds = (max([part.end for part in parts]) - parts[0].start) / 1e6
        if len(self.slowest) == SLOWEST and seconds <= self.slowest[-1].seconds:
            return
        slow = Slow(
            seconds, _title(event, args), args.group, args.where, parts[0], last, late, missing
        )
        insort(self.slowest, slow, key=lambda each: -each.seconds)
        del self.slowest[SLOWEST:]

    def _add(self, bins: array[float], start: float, end: float) -> None:
        """Add the time from `start` to `end` to its bins."""
        width = self._width
        number = int(start / width)
        if end <= (number + 1) * width:  # most operations are in one
            if end > start:
                bins[min(number, BINS - 1)] += (end - start) / 1e6
            return
        while number < BINS and start < end:
            until = min(end, (number + 1) * width)
            bins[number] += (until - start) / 1e6
            start, number = until, number + 1


def _title(event: TraceEvent, args: EventArgs) -> str:
    return event.name if args.sequence is None else f"{event.name} #{args.sequence}"
