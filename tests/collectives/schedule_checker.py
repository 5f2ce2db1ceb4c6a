"""Runs a schedule on all ranks at once, on symbols instead of tensors, and tells what came of it.

A chunk's value is the set of ranks whose contributions it holds, as the bits of an int; 0 is memory
that nobody has written yet. Reducing joins sets, and a contribution that comes twice is an error:
so a chunk that ends with all bits set holds each contribution exactly once, and that is the proof.

There is one first-in first-out queue for each ordered pair of ranks, and no barrier anywhere. A
rank advances as soon as the receives of its round are satisfied; which of the ranks that could
advance does so next is the caller's choice (`chance`), and must make no difference.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.collectives.schedules import Combine, Recv, Round, ScheduleFunction, Send, Step

State = list[list[int]]  # state[rank][chunk]
Message = tuple[Send, int, list[int]]  # the number of its round, counted from 1; its values
Fold = Callable[[list[int]], int]  # the values of a chunk, in rank order -> the reduced one


class BrokenScheduleError(AssertionError):
    """What is wrong with the schedule, and where."""


@dataclass
class Report:
    """What a schedule did. Traffic is counted in chunks, one number per rank."""

    state: State
    rounds: list[int]
    messages: list[int]
    sent: list[int]
    received: list[int]
    stray: Counter[str] = field(default_factory=Counter)
    """Messages that were not received in the round in which they were sent."""


def join(values: list[int]) -> int:
    """The union of disjoint sets of contributions."""
    union = 0
    for value in values:
        if union & value:
            raise BrokenScheduleError(f"contributions of ranks {ranks_in(union & value)} twice")
        union |= value
    return union


def ranks_in(value: int) -> list[int]:
    return [rank for rank in range(value.bit_length()) if value >> rank & 1]


def run(
    schedule: ScheduleFunction,
    state: State,
    *,
    fold: Fold = join,
    chance: random.Random | None = None,
) -> Report:
    """Run `schedule` on len(state) ranks that start with `state`, which is left as it is.

    Raises BrokenScheduleError for a deadlock, a message that nobody takes or that does not fit its
    receiver, a chunk or a peer that does not exist, memory that is sent before it is written, and
    whatever `fold` objects to.
    """
    cluster = _Cluster(schedule, [list(chunks) for chunks in state], fold)
    ready = list(range(len(state)))[::-1]
    while ready:
        if chance is not None:
            pick = chance.randrange(len(ready))
            ready[pick], ready[-1] = ready[-1], ready[pick]
        ready += cluster.advance(ready.pop())
    cluster.assert_all_is_done()
    return cluster.report


class _Cluster:
    def __init__(self, schedule: ScheduleFunction, state: State, fold: Fold) -> None:
        size = len(state)
        self.fold = fold
        self.schedules = [schedule(rank, size) for rank in range(size)]
        self.todo: list[list[Step]] = [[] for _ in range(size)]  # receives of the round, reversed
        self.arrived: list[list[tuple[Step, list[int]]]] = [[] for _ in range(size)]
        self.waits_for: dict[int, int] = {}
        self.inboxes: list[dict[int, list[Message]]] = [{} for _ in range(size)]  # by sender
        self.report = Report(state, [0] * size, [0] * size, [0] * size, [0] * size)

    def advance(self, rank: int) -> list[int]:
        """Finish the rank's round and begin its next, if it can; return who can advance now."""
        todo, inbox = self.todo[rank], self.inboxes[rank]
        while todo:
            peer = todo[-1].peer
            if not inbox.get(peer):
                self.waits_for[rank] = peer
                return []
            self.take(rank, todo.pop(), *inbox[peer].pop(0))
        self.write(rank)
        steps = next(self.schedules[rank], None)
        return [] if steps is None else [*self.begin(rank, steps), rank]

    def take(self, rank: int, step: Step, sent: Send, number: int, values: list[int]) -> None:
        if sent[1:] != step[1:]:
            raise BrokenScheduleError(f"rank {rank}: {step} met rank {step.peer}'s {sent}")
        if number != self.report.rounds[rank]:
            self.report.stray[f"round {number - 1} -> {self.report.rounds[rank] - 1}"] += 1
        self.arrived[rank].append((step, values))
        self.report.received[rank] += step.count

    def write(self, rank: int) -> None:
        """All that the round waited for is here: put it where it belongs."""
        chunks = self.report.state[rank]
        combined: dict[int, list[tuple[int, int]]] = {}  # chunk -> (rank, value) of all
        for step, values in self.arrived[rank]:
            if type(step) is Recv:
                chunks[step.chunk : step.chunk + step.count] = values
            else:
                if not all(chunks[step.chunk : step.chunk + step.count]):
                    raise BrokenScheduleError(f"rank {rank}: {step} into what was never written")
                for chunk, value in enumerate(values, step.chunk):
                    combined.setdefault(chunk, [(rank, chunks[chunk])]).append((step.peer, value))
        for chunk, contributions in combined.items():
            try:
                chunks[chunk] = self.fold([value for _, value in sorted(contributions)])
            except BrokenScheduleError as error:
                where = f"round {self.report.rounds[rank] - 1}, rank {rank}, chunk {chunk}"
                raise BrokenScheduleError(f"{where}: {error}") from None
        self.arrived[rank].clear()

    def begin(self, rank: int, steps: Round) -> list[int]:
        """Send the round's messages and note its receives; return whom a message has woken."""
        report, size = self.report, len(self.report.state)
        chunks, woken = report.state[rank], []
        report.rounds[rank] += 1
        for step in steps:
            peer, first, count = step
            if peer == rank or not 0 <= peer < size:
                raise BrokenScheduleError(f"rank {rank} of {size}: {step} has no such peer")
            if first < 0 or count < 1 or first + count > len(chunks):
                raise BrokenScheduleError(f"rank {rank} of {size}: {step} has no such chunk")
            if type(step) is not Send:
                continue
            values = chunks[first : first + count]
            if not all(values):
                raise BrokenScheduleError(f"rank {rank}: {step} sends what was never written")
            inbox = self.inboxes[peer].setdefault(rank, [])
            inbox.append((step, report.rounds[rank], values))
            report.messages[rank] += 1
            report.sent[rank] += count
            if self.waits_for.get(peer) == rank:
                del self.waits_for[peer]
                woken.append(peer)
        self.todo[rank] = [step for step in reversed(steps) if type(step) is not Send]
        return woken

    def assert_all_is_done(self) -> None:
        if self.waits_for:
            waits = "; ".join(
                f"rank {rank} waits for rank {peer} in round {self.report.rounds[rank] - 1}, "
                f"{self.todo[rank][-1]}"
                for rank, peer in sorted(self.waits_for.items())
            )
            raise BrokenScheduleError(f"deadlock: {waits}")
        for peer, inbox in enumerate(self.inboxes):
            for rank, messages in inbox.items():
                for send, number, _ in messages:
                    left = f"rank {rank}'s {send} of round {number - 1}"
                    raise BrokenScheduleError(f"left over: rank {peer} never took {left}")


def assert_rounds_leave_memory_in_peace(schedule: ScheduleFunction, size: int) -> None:
    """No round receives into what it sends, nor twice into a chunk unless it is to combine."""
    for rank in range(size):
        for number, steps in enumerate(schedule(rank, size)):
            touched: dict[type[Step], Counter[int]] = {Send: Counter(), Recv: Counter()}
            for step in steps:
                kind = touched.setdefault(type(step), Counter())
                kind.update(range(step.chunk, step.chunk + step.count))
            combined = set(touched.get(Combine, ()))
            conflicts = (touched[Recv].keys() & combined) | (
                touched[Send].keys() & (touched[Recv].keys() | combined)
            )
            conflicts |= {chunk for chunk, times in touched[Recv].items() if times > 1}
            if conflicts:
                raise BrokenScheduleError(
                    f"round {number}, rank {rank}: chunks {sorted(conflicts)} are in use twice"
                )
