"""A random program as plain data: who takes part in what, and what every rank does when.

There is one global list of actions, the timeline. Done one after the other, in this order, each
of them can be completed with what came before; and so the program cannot deadlock, whatever the
ranks' speeds. A rank carries out its own actions, each of its threads (lanes) those of its lane.

    timeline         0: start #0   1: start #0   0: send #1   1: do #2   0: do #2   1: recv #1 ...
    rank 0 does      start #0, send #1, do #2 ...
    rank 1 does      start #0, do #2, recv #1 ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

WORLD = 0  # the number of the group of all ranks
BEFORE = -1  # the lane of what the rank's own thread does before the others start


class GroupPlan(NamedTuple):
    """A group: its parent's number, its members as ranks of the world, and who runs its things."""

    number: int
    parent: int
    ranks: tuple[int, ...]
    lane: int


class Message(NamedTuple):
    """One message of a `messages` operation; ranks are those of the group."""

    src: int
    shape: tuple[int, ...]
    blocking: bool  # sent by `send`; else by `isend`
    patient: bool = True  # else with a short timeout, again and again


class Receive(NamedTuple):
    """One receive of a `messages` operation: from `src`, or from anyone (None)."""

    src: int | None
    shape: tuple[int, ...]
    blocking: bool  # by `recv`; else by `irecv`
    patient: bool = True  # else with a short timeout, again and again


@dataclass(frozen=True)
class Op:
    """One collective of a group, or some messages with one tag to one of its ranks.

    form     "new", "into" or "in_place": where the result goes
    layout   how tensors lie in memory: "plain", "offset", "gaps" or "transposed"
    root     of the collective; of messages, who receives them; of an exchange, to how far right
    """

    number: int
    kind: str
    group: int
    lane: int
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    reduce: str = ""
    root: int = 0
    algorithm: str = "auto"
    form: str = "new"
    layout: str = "plain"
    asynchronous: bool = False
    tag: int = 0
    messages: tuple[Message, ...] = ()
    receives: tuple[Receive, ...] = ()

    def __str__(self) -> str:
        prefix = "async " if self.asynchronous else ""
        dtype = str(self.dtype).removeprefix("torch.")
        parts = [f"#{self.number} {prefix}{self.kind} of group {self.group}", dtype]
        if self.kind == "messages":
            sent = ", ".join(f"from {m.src} {list(m.shape)}" for m in self.messages)
            asked = ", ".join("any" if r.src is None else str(r.src) for r in self.receives)
            parts += [f"tag {self.tag}", f"to {self.root} ({sent}; received from {asked})"]
        else:
            parts += [str(list(self.shape)), self.reduce, f"root {self.root}"]
            parts += [self.algorithm, self.form]
        return " ".join(part for part in [*parts, self.layout] if part)


class Action(NamedTuple):
    """What one rank (of the world) does: make a group; do, start or finish its part of an op.

    part    of messages: "send" or "recv"; else empty
    which   of them: its place in the operation
    """

    rank: int
    lane: int
    verb: str
    op: int
    part: str = ""
    which: int = 0

    def __str__(self) -> str:
        if self.verb == "make":
            return f"make group {self.op}"
        return f"{self.verb} #{self.op}" + (f" {self.part} {self.which}" if self.part else "")


@dataclass(frozen=True)
class Program:
    """What is to be run."""

    seed: int
    size: int
    lanes: int
    groups: dict[int, GroupPlan]
    ops: dict[int, Op]
    timeline: tuple[Action, ...]

    def of(self, rank: int) -> list[Action]:
        """What one rank does, all lanes merged: in the order of the timeline."""
        return [action for action in self.timeline if action.rank == rank]

    def actions(self, rank: int, lane: int) -> list[Action]:
        """What one thread of a rank does."""
        return [action for action in self.of(rank) if action.lane == lane]

    def ranks_of(self, op: Op) -> tuple[int, ...]:
        """The members of the operation's group, as ranks of the world."""
        return self.groups[op.group].ranks

    def without(self, dropped: Iterable[int]) -> Program:
        """The same without some operations, and without the groups that nobody needs then."""
        gone = set(dropped)
        ops = {number: op for number, op in self.ops.items() if number not in gone}
        needed = {WORLD}
        for op in ops.values():
            number = op.group
            while number not in needed:
                needed.add(number)
                number = self.groups[number].parent
        for group in self.groups.values():  # its twins come before it, and give it its identity
            twins = [g for g in self.groups.values() if g[1:3] == group[1:3]]
            if group.number in needed:
                needed |= {twin.number for twin in twins if twin.number < group.number}
        groups = {number: group for number, group in self.groups.items() if number in needed}
        timeline = tuple(
            a for a in self.timeline if (a.op in groups if a.verb == "make" else a.op in ops)
        )
        return replace(self, groups=groups, ops=ops, timeline=timeline)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"seed {self.seed}: {self.size} ranks, {self.lanes} threads each, "
            f"{len(self.groups)} groups, {len(self.ops)} operations"
        )
        for group in self.groups.values():
            made = f", made of group {group.parent}" if group.number != WORLD else ""
            yield f"  group {group.number}: ranks {list(group.ranks)}{made}, lane {group.lane}"
        for op in self.ops.values():
            yield f"  {op}, lane {op.lane}"
        for rank in range(self.size):
            for lane in (BEFORE, *range(self.lanes)):
                actions = "; ".join(map(str, self.actions(rank, lane)))
                if actions:
                    yield f"  rank {rank}, lane {lane}: {actions}"
