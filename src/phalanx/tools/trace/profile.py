"""Where the ranks' time went, summed up while a trace is read: its size does not matter.

    rank 0  |computing|==all_reduce====|computing|==all_reduce, async==|
                      |waiting |comm.  |         |overlapped    |comm. |
    rank 1  |computing         |==all_reduce|computing
                      ^--------^ rank 0 waits for rank 1, the last one to begin

At any time a rank is in one of four states: `STATES`. A rank waits, in a collective, until the last
one of its group has begun it; this is what ranks lose by one that is slow, by any backend. It is by
the starts of all ranks, and so as wrong as their hosts' clocks differ. Of a rank that died in a
collective there is no start: then the others wait for it to their end.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]
"""One event of a Chrome trace; times (`ts`, `dur`) are microseconds."""

STATES = ("computing", "overlapped", "waiting", "communicating")
"""What a rank does: compute, or anything else that is no operation of Phalanx; compute while an
operation is under way; wait in one for a rank that has not begun it; be in one that all have begun.
"""

BINS = 240  # of the whole time, for the picture
SLOWEST = 15  # operations that are shown
ERRORS = 20
KINDS = 500  # of operations, by name, line and group; what is more goes into one
_OTHERS = ("other operations", "", "")
_LONGEST = 2000  # characters of an error


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part in an operation, in microseconds.

    waited   since when the program was blocked in it; `end` if it never was
    """

    rank: int
    start: float
    end: float
    waited: float


@dataclass(frozen=True, slots=True)
class Slow:
    """An operation of all its ranks, from the first one's start to the last one's end.

    last     the rank that began it last, `late` seconds after the first; -1 for a message
    missing  the ranks that have no part in it
    """

    seconds: float
    start: float
    name: str
    sequence: int
    group: str
    where: str
    rank: int
    last: int = -1
    late: float = 0.0
    missing: tuple[int, ...] = ()


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
    """What a rank did when: seconds of each bin of the whole time.

    present    between its start and its last operation
    under_way  with an operation under way, `blocked` in one, `waiting` in one for another rank
    waited     seconds that it waited for ranks that began later
    awaited    seconds that others waited for it, the last to begin; all of them, summed up
    """

    present: array[float] = field(default_factory=lambda: array("d", bytes(8 * BINS)))
    under_way: array[float] = field(default_factory=lambda: array("d", bytes(8 * BINS)))
    blocked: array[float] = field(default_factory=lambda: array("d", bytes(8 * BINS)))
    waiting: array[float] = field(default_factory=lambda: array("d", bytes(8 * BINS)))
    waited: float = 0.0
    awaited: float = 0.0
    seen_until: float = -math.inf  # where its presence ends, so far
    busy_until: float = -math.inf  # where its operations end, so far

    def states(self, number: int) -> tuple[float, float, float, float]:
        """Seconds of each of `STATES` in a bin."""
        present = self.present[number]
        under_way = min(self.under_way[number], present)
        blocked = min(self.blocked[number], under_way)
        waiting = min(self.waiting[number], blocked)
        return present - under_way, under_way - blocked, waiting, blocked - waiting

    def totals(self) -> tuple[float, ...]:
        """Seconds of each of `STATES`, in all."""
        return tuple(math.fsum(each) for each in zip(*map(self.states, range(BINS)), strict=True))


class Profile:
    """Fills itself with operations that come in the order of their starts.

    first, last   when the first operation of the job starts and the last one ends, microseconds
    ranks         by number
    kinds         by name, line of the program, and group
    errors        the first ones: rank, operation, and what it says
    broken        how many collectives some rank has no part in
    absent        how many of those each such rank has no part in
    """

    def __init__(self, first: float, last: float) -> None:
        self.first = first
        self.span = min(max(last - first, 1.0), 1e15)
        self.ranks: defaultdict[int, RankProfile] = defaultdict(RankProfile)
        self.kinds: dict[tuple[str, str, str], KindOfOperation] = {}
        self.errors: list[tuple[int, str, str]] = []
        self.broken = 0
        self.absent: defaultdict[int, int] = defaultdict(int)
        self._slowest: list[tuple[float, int, Slow]] = []
        self._count = 0

    @property
    def seconds(self) -> float:
        """From the start of the first operation to the end of the last one."""
        return self.span / 1e6

    @property
    def slowest(self) -> list[Slow]:
        """The slowest operations, the slowest first."""
        return [slow for _, _, slow in sorted(self._slowest, key=lambda each: -each[0])]

    def present(self, rank: int, start: float, end: float) -> None:
        """A rank is there; its runs come in the order of their starts."""
        profile = self.ranks[rank]
        self._add(profile.present, max(start, profile.seen_until), end)
        profile.seen_until = max(profile.seen_until, end)

    def operation(self, rank: int, event: Event) -> Part:
        """Take the next operation."""
        args, profile = event["args"], self.ranks[rank]
        start = min(max(event["ts"] - self.first, 0.0), self.span)
        seconds = min(max(event["dur"], 0.0), self.span - start)
        blocked = min(max(args.get("blocked_us", seconds), 0.0), seconds)
        part = Part(rank, start, start + seconds, start + seconds - blocked)
        begin = self.first + part.start
        self._add(profile.under_way, max(begin, profile.busy_until), self.first + part.end)
        profile.busy_until = max(profile.busy_until, self.first + part.end)
        self._add(profile.blocked, self.first + part.waited, self.first + part.end)
        kind = self._kind(event)
        kind.count += 1
        kind.bytes += args.get("bytes", 0)
        kind.seconds += seconds / 1e6
        kind.longest = max(kind.longest, seconds / 1e6)
        kind.blocked += blocked / 1e6
        if "error" in args and len(self.errors) < ERRORS:
            self.errors.append((rank, _title(event), str(args["error"])[:_LONGEST]))
        return part

    def collective(self, event: Event, parts: list[Part]) -> None:
        """All ranks of a group have begun a collective, the last one of `parts` with `event`."""
        last = parts[-1]
        for part in parts[:-1]:
            self._waits(event, part, min(last.start, part.end), last.rank)
        self._note_slow(event, parts, last=last.rank, late=(last.start - parts[0].start) / 1e6)

    def incomplete(self, event: Event, parts: list[Part], missing: list[int]) -> None:
        """Some ranks have no part in a collective: they died before its end, or never began it."""
        self.broken += 1
        for rank in missing:
            self.absent[rank] += 1
        for part in parts:
            self._waits(event, part, part.end, missing[0] if len(missing) == 1 else None)
        self._note_slow(event, parts, missing=tuple(missing))

    def alone(self, event: Event, part: Part) -> None:
        """A message, or a collective of one rank."""
        self._note_slow(event, [part])

    def _waits(self, event: Event, part: Part, until: float, culprit: int | None) -> None:
        """A rank is blocked in its part, until then, by what another one has not begun."""
        seconds = max(0.0, until - part.waited) / 1e6
        self.ranks[part.rank].waited += seconds
        self._kind(event).waiting += seconds
        self._add(self.ranks[part.rank].waiting, self.first + part.waited, self.first + until)
        if culprit is not None:
            self.ranks[culprit].awaited += seconds

    def _kind(self, event: Event) -> KindOfOperation:
        args = event["args"]
        key = (event["name"], str(args.get("where", "")), str(args.get("group", "world")))
        if key not in self.kinds and len(self.kinds) >= KINDS:
            key = _OTHERS
        return self.kinds.setdefault(key, KindOfOperation())

    def _note_slow(self, event: Event, parts: list[Part], **more: Any) -> None:
        start, args = parts[0].start, event["args"]
        seconds = (max(part.end for part in parts) - start) / 1e6
        self._count += 1  # of equal ones the first is kept, and none are compared
        if len(self._slowest) == SLOWEST and seconds <= self._slowest[0][0]:
            return
        slow = Slow(
            seconds,
            start / 1e6,
            event["name"],
            args.get("sequence") or 0,
            str(args.get("group", "world")),
            str(args.get("where", "")),
            parts[0].rank,
            **more,
        )
        heapq.heappush(self._slowest, (seconds, -self._count, slow))
        if len(self._slowest) > SLOWEST:
            heapq.heappop(self._slowest)

    def _add(self, bins: array[float], start: float, end: float) -> None:
        """Add the time from `start` to `end` to the bins that it is in."""
        width = self.span / BINS
        start = max(start - self.first, 0.0) / width
        end = min((end - self.first) / width, BINS)
        number = int(start) if start < end else BINS
        while number < end:
            inside = min(end, number + 1) - max(start, number)
            bins[number] += inside * width / 1e6
            number += 1


def _title(event: Event) -> str:
    sequence = event["args"].get("sequence")
    return event["name"] if sequence is None else f"{event['name']} #{sequence}"
