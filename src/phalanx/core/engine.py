"""The engine under every backend: it starts rounds, moves bytes, and tells who waits for what.

A backend is `post` and `progress`; the rest is built on them, once, and is the same for all:

    issue(operation)          begin; returns at once
      post(operation, round)  start one round's sends and receives; returns a ticket
    progress(operation)        move bytes until it is done, or its deadline has passed

Many operations are open at a time, of many groups. All state is guarded by `lock`; the methods
that say so are called with it held.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.core.failure import Failure
from phalanx.core.group import Group
from phalanx.core.matching import Matching, is_full
from phalanx.core.recorder import History, Record, Trace
from phalanx.core.steps import (
    ANY,
    NOTHING,
    Call,
    Native,
    PostedReceive,
    PostedSend,
    Round,
    Step,
    Ticket,
)
from phalanx.core.work import Operation
from phalanx.errors import PeerLostError
from phalanx.wire.control import Answer, Ask, shortened
from phalanx.wire.frame import Channel, Kind

if TYPE_CHECKING:
    from phalanx.core.common import Source
    from phalanx.core.steps import SharedGroup
    from phalanx.core.work import Wait
NOT_ASKED = Ask(-1, 0, "")
LONGEST_WAIT = 3600.0  # seconds; a condition variable cannot wait for infinity


class Engine(ABC):
    """Moves the bytes of one rank; shared by its backend and all sub-groups of it."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        lock: threading.RLock | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.matching = Matching(self._came_too_late)
        self.lock = lock if lock is not None else threading.RLock()
        self.groups: dict[int, Group] = {}
        self.ready: deque[Operation] = deque()  # operations whose round is complete
        self.closed = False
        self.lost: dict[int, Failure] = {}  # peers that are gone, and why
        self.awaited: list[Wait] = []  # what threads wait for, oldest first
        self.full: dict[int, Answer] = {}  # peers that take no more messages for now
        self.history = History(rank)
        self.trace = Trace.wanted(rank, world_size)
        self.matching.traced = self.trace is not None
        self._future = EarlyControls()
        self._advancing = False
        self.query_numbers = itertools.count(1)  # their numbers

    # What a backend implements ------------------------------------------------------------

    @abstractmethod
    def transmit(self, send: PostedSend) -> None:
        """Start to send a message; calls `send.complete()` when its memory is free again."""

    @abstractmethod
    def reach(self, peer: int) -> None:
        """A receive from this peer was posted: there may be room now for what it sends."""

    @abstractmethod
    def progress(self, until: Wait) -> None:
        """Move bytes until that is done; past its deadline it fails. Lock not held."""

    @abstractmethod
    def look_at(self, operation: Operation) -> None:
        """Move the bytes that can be moved without waiting. Lock not held."""

    @abstractmethod
    def tell(self, group: Group, failure: Failure) -> None:
        """Let the other members of a group know that it is broken."""

    @abstractmethod
    def announce_leaving(self, group: Group) -> None:
        """Let the other members of a group know that this rank has closed it."""

    @abstractmethod
    def ask(self, peer: int, group: int, ask: Ask) -> None:
        """Ask a peer about an operation of a group, or what it waits for. Lock held."""

    @abstractmethod
    def answer(self, peer: int, answer: Answer) -> None:
        """Say what this rank waits for. Lock held."""

    @abstractmethod
    def retract(self, send: PostedSend) -> None:
        """A send was given up: its memory must not be read from now on."""

    @property
    def one_thread(self) -> bool:
        """Whether only the rank's own thread may wait: then there is no work in the background."""
        return False

    def settle(self, send: PostedSend) -> bool:
        """Whether a send whose time is over has gone all the same: then it is complete."""
        return False

    @abstractmethod
    def operation_done(self, operation: Operation) -> None:
        """An operation has ended: wake whoever waits for it. Lock held."""

    def glance(self, now: float) -> None:  # noqa: B027 - not all need to do a thing
        """A call begins that may end without waiting: see, now and then, what has come meanwhile.

        Lock held.
        """

    def shared_group(self, group: Group) -> SharedGroup | None:
        """Shared memory of those members of a group that this rank shares any with."""
        return None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor in memory that is sent without a copy."""
        return torch.empty(shape, dtype=dtype)

    def common(self, group: Group) -> Source | None:
        """Where memory comes from that all members of a group have in common, if they have any.

        The same answer on every one of them.
        """
        return None

    def in_background(self, operation: Operation) -> None:  # noqa: B027 - not all need to do a thing
        """See to it that this operation moves on while nobody waits for it. Lock not held."""

    def native_for(self, group: Group) -> Native | None:
        """What a library under this engine can carry out whole for a group."""
        return None

    def begin_call(self, group: Group, call: Call, seconds: float) -> Step | None:
        """Begin what a library can carry out whole, in a group in which nothing is in the way.

        None if it has ended within so many seconds, or soon; else the step with which an operation
        sees it to its end. Lock held.
        """
        return call

    # What is the same for all -------------------------------------------------------------

    def issue(self, operation: Operation) -> None:
        """Begin an operation. Raises if its group is broken or closed. Lock not held."""
        with self.lock:
            operation.group.issue(operation)
            self.run_ready()

    def post(self, operation: Operation, step: Step) -> Ticket:
        """Start one step. An engine that has other steps than rounds extends this. Lock held."""
        assert type(step) is Round
        return self.post_round(operation, step)

    def post_round(self, operation: Operation, round_: Round) -> Ticket:
        """Start one round. Receives first, so that a message never finds its receive missing."""
        ticket = Ticket(operation)
        ranks = operation.group.ranks
        for peer, start, stop, buffer, combine in round_.receives:
            whole = ranks[peer] if peer != ANY else ANY
            posted = PostedReceive(ticket, whole, buffer, start, stop, combine)
            ticket.receives.append(posted)
        for peer, start, stop, buffer in round_.sends:
            ticket.sends.append(PostedSend(ticket, ranks[peer], buffer, start, stop))
        operation.ticket = ticket
        if self.matching.traced:
            ticket.posted = monotonic()
            operation.sent += sum(send.stop - send.start for send in round_.sends)
            operation.received += sum(recv.stop - recv.start for recv in round_.receives)
        for posted in ticket.receives:
            self.matching.expect(operation.channel, posted)
        for send in ticket.sends:
            if operation.done:
                break
            self.check_reachable(operation, send.peer)
            self.transmit(send)
        for posted in ticket.receives:
            if operation.done:
                break
            if not posted.done:
                self.check_reachable(operation, posted.peer)
            # Also if done: there is room again for what comes next.
            for peer in ranks if posted.peer == ANY else (posted.peer,):
                self.reach(peer)
        ticket.arm()
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Give up what is left of a round. Lock held."""
        for posted in ticket.receives:
            if not posted.done:
                posted.done = True
                self.matching.withdraw(posted)
                posted.view = NOTHING
        for send in ticket.sends:
            if not send.done:
                send.done = True
                self.retract(send)
                send.view = NOTHING

    def run_ready(self) -> None:
        """Advance the operations whose rounds are complete. Lock held."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self.ready:
                self.ready.popleft().advance()
        finally:
            self._advancing = False

    def add_group(self, group: Group) -> None:
        """A group was made. It may be broken already: others can be ahead."""
        with self.lock:
            self.groups[group.id] = group
            early = self._future.take(group.id)
            group.left |= early.leavers
            lost = (self.lost[rank] for rank in group.ranks if rank in self.lost)
            failure = early.failure or next(lost, None)
            if failure is not None:
                group.fail(failure, tell=False)
            for peer, ask in early.asks.items():
                group.checker.asked(peer, ask)

    def failure_came(self, group_id: int, failure: Failure) -> None:
        """Another member says that a group is broken. Lock held."""
        if self.matching.is_over(group_id):
            return
        self.run_ready()  # what is complete has not failed
        group = self.groups.get(group_id)
        if group is None:
            early = self._future.of(group_id)
            early.failure = early.failure or failure
        else:
            # Told on: a member that is not connected to the reporter may be to this rank.
            group.fail(failure)

    def asked(self, group_id: int, peer: int, ask: Ask) -> None:
        """A peer asks about an operation of a group, or what this rank waits for. Lock held."""
        self.run_ready()
        group = self.groups.get(group_id)
        if ask.wait_for:
            self.answer(peer, self.state_for(peer, group, ask))
        elif ask.sequence >= 0 and group is not None and peer in group.to_local:
            group.checker.asked(peer, ask)
        elif ask.sequence >= 0 and group is None and not self.matching.is_over(group_id):
            self._future.of(group_id).asks[peer] = ask

    def state_for(self, peer: int, group: Group | None = None, ask: Ask = NOT_ASKED) -> Answer:
        """What keeps this rank from what a peer waits for, as an answer to it."""
        kept = self.matching.unexpected_bytes[peer]
        operation = self._obstacle(group, ask.sequence)
        if operation is None:
            return Answer([], "", kept, ask.wait_for)
        return Answer(
            operation.waits_for_global(),
            shortened(operation.describe()),
            kept,
            ask.wait_for,
            operation.group.id,
            operation.sequence if operation.is_collective else -1,
        )

    def _obstacle(self, group: Group | None, sequence: int) -> Wait | None:
        """What has to end before this rank can do what it is waited for, if that is known.

        The collective itself, if it is under way here, or one before it; else whatever a thread of
        this rank waits in; else anything that is under way in that group.
        """
        under_way = group.under_way() if group is not None else []
        for operation in under_way:
            if operation.is_collective and operation.sequence <= sequence:
                return operation
        return next(iter([*self.awaited, *under_way]), None)

    def answered(self, peer: int, answer: Answer) -> None:
        """A peer says what it waits for. Lock held."""
        if is_full(answer.kept):
            self.full[peer] = answer
        else:
            self.full.pop(peer, None)
        under_way = [group.under_way() for group in self.groups.values()]
        query_numbers = {each.wait_for for each in chain(self.awaited, *under_way)}
        for wait_for in query_numbers:
            if wait_for is not None and wait_for.number == answer.wait_for:
                wait_for.answered(peer, answer)

    def operation_ended(self, operation: Operation, record: Record) -> None:
        """An operation is over. Lock held."""
        self.history.add(record)
        if self.trace is not None:
            self.trace.ended(operation, record)
        self.operation_done(operation)

    def peer_lost(self, peer: int, reason: str) -> None:
        """A peer is gone without a word: every group that it is in is broken. Lock held."""
        if peer in self.lost or self.closed:
            return
        self.run_ready()  # what is complete has not failed
        failure = Failure(PeerLostError, peer, self.rank, reason)
        self.lost[peer] = failure
        for group in list(self.groups.values()):
            if peer in group.to_local:
                group.fail(failure)

    def member_left(self, group_id: int, peer: int) -> None:
        """A peer has closed a group, of which this rank may not have heard yet. Lock held."""
        group = self.groups.get(group_id)
        if group is not None:
            group.member_left(peer)
        elif not self.matching.is_over(group_id):
            self._future.of(group_id).leavers.add(peer)

    def peer_left(self, peer: int) -> None:
        """A peer has closed everything, in good order. Lock held."""
        for group in list(self.groups.values()):
            if peer in group.to_local:
                group.member_left(peer)

    def has_left(self, peer: int) -> bool:
        """Whether a peer has closed in good order."""
        return False

    def _came_too_late(self, channel: Channel, peer: int) -> bool:
        """Whether a message is for a collective that is over on this rank: a disagreement."""
        group = self.groups.get(channel.group)
        if channel.kind is not Kind.COLLECTIVE or group is None or channel.number >= group.finished:
            return False
        group.checker.got_unexpected_message(channel.number, peer)
        return True

    def check_reachable(self, operation: Operation, peer: int) -> None:
        """Raise `PeerLostError` if an operation would wait for a rank that has left."""
        group = operation.group
        anyone = peer == ANY
        gone = not group.others() if anyone else self.has_left(peer) or peer in group.left
        if gone:
            who = "every other rank" if anyone else f"rank {group.name_of_global(peer)}"
            raise PeerLostError(
                f"rank {group.rank}: {operation.describe()}: {who} left",
                rank=group.rank,
                peer=group.to_local.get(peer),
                op=operation.name,
                sequence=operation.sequence,
            )


# ------------------------------------------------------------------------------
# What others have said of groups that are not made here yet: they may be ahead of this rank.

MOST_GROUPS = 4096  # the oldest are forgotten then


@dataclass
class EarlyControl:
    """Of one group: why it is broken, if it is; who has left it; and what they asked about it."""

    failure: Failure | None = None
    leavers: set[int] = field(default_factory=set)
    asks: dict[int, Ask] = field(default_factory=dict)


class EarlyControls:
    """The groups that others speak of, by their identity."""

    def __init__(self) -> None:
        self._known: dict[int, EarlyControl] = {}

    def of(self, group: int) -> EarlyControl:
        """What is known of a group, to be added to."""
        if group not in self._known:
            if len(self._known) >= MOST_GROUPS:
                del self._known[next(iter(self._known))]
            self._known[group] = EarlyControl()
        return self._known[group]

    def take(self, group: int) -> EarlyControl:
        """The group is made: what was known of it."""
        return self._known.pop(group, None) or EarlyControl()
