"""Which rank the others wait for: the one that comes to a collective last.

rank 0  |=====all_reduce #41=====|
rank 1      |=all_reduce #41=====|
rank 2               |all_reduce=|        rank 2 was last, by the time between 1's start
            ^--------^                    and its own: so much sooner it could have ended
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from phalanx.launch.trace_files import Event, TraceFile

__all__ = ["Stragglers"]

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
