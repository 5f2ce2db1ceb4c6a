"""The engine: it begins steps, and matches messages with receives.

    Backend.run, issue   a call becomes a program of steps, and perhaps a Work
    engine.begin         one step: a round of messages, an epoch, or a library's collective
    transport.wait       bytes move until it is done, or its deadline has passed
    work.advance         the next step

Many works of many groups are under way at a time. `lock` guards all state; methods whose docstring
says "Lock held" are called with it held. Three collaborators are told of events: the checker of
each group (do ranks agree), the watchdog (deadlines, who waits for whom), the recorder (last calls,
trace). A fourth one counts, once it is wanted.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from phalanx.core.call import WORLD_ID
from phalanx.core.counters import Counters, Counts, Progress
from phalanx.core.device import AcceleratorCopies, HostCopies, device_kinds
from phalanx.core.failure import Failure, forked_error
from phalanx.core.matching import Matching
from phalanx.core.posted import PostedMessage, PostedRound, Wait
from phalanx.core.recorder import History, Trace, set_up_log
from phalanx.core.steps import ANY, NOTHING, Native, Round, Step
from phalanx.core.transport import Control, Transport
from phalanx.core.watchdog import Watchdog
from phalanx.errors import PeerLostError, UnsupportedOperationError
from phalanx.wire.control import Answer, Ask, FailureNotice
from phalanx.wire.frame import Channel, Kind

if TYPE_CHECKING:
    from phalanx.core.group import Group
    from phalanx.core.work import Work

log = logging.getLogger("phalanx")

ASK_EVERY = 0.5
LONGEST_WAIT = 3600.0  # seconds; a condition variable cannot wait for infinity
MOST_GROUPS = 4096  # of which early control messages are kept


class Engine:
    """The works of one rank, of all its groups, over one transport.

    lock       guards all of it; ranks that are threads of one process may share one
    finishing  held while a work's result is made, once, by one of those that wait for it
    ready      works whose step is complete; shared likewise
    now        the clock, in seconds, from which the core reads deadlines and durations
    transport  set by the transport's constructor
    process    which this rank is
    forked     whether this is the copy of a child process that was forked (`ForkedEngine`)
    in_child   called, in order, in such a child, to close the parent's files
    native     for each group, the collectives that another library carries out whole
    counters   counts this rank's operations; None until the first call of `count`
    moved      is told of each message that is about to be complete; None: nobody counts them
    progress   the progress of the program
    at_close   called, in order, when this rank has left; the lock is not held
    copies     for each device on which tensors were, the copies to and from host memory
    ask_every  seconds that a collective waits before it asks whether the others are in it, too
    strict     whether ranks compare call sites, too, and before a library's collectives begin
    """

    transport: Transport
    forked = False

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        lock: threading.RLock | None = None,
        ready: deque[Work[Any]] | None = None,
        now: Callable[[], float] = monotonic,
        ask_every: float = ASK_EVERY,
    ) -> None:
        set_up_log()
        self.rank = rank
        self.world_size = world_size
        self.now = now
        self.ask_every = ask_every
        self.lock = lock if lock is not None else threading.RLock()
        self.finishing = threading.RLock()
        self.ready: deque[Work[Any]] = deque() if ready is None else ready
        self.polled: dict[Work[Any], Step] = {}  # works whose step has to be polled
        self.callbacks: deque[tuple[Callable[[Any], object], Work[Any]]] = deque()
        self.groups: dict[int, Group] = {}
        self.closed = False
        self.process = os.getpid()
        self.strict = os.environ.get("PHALANX_STRICT", "") == "1"
        self.left: set[int] = set()  # peers that have closed in good order
        self.lost: dict[int, Failure] = {}  # peers that are gone, and why
        self.matching = Matching(self._is_stale)
        self.history = History(rank)
        self.counters: Counters | None = None
        self.moved: Callable[[PostedMessage], None] | None = None
        self.progress = Progress(rank, lambda: self.now())  # noqa: PLW0108 - raises in a child
        self.at_close: list[Callable[[], object]] = []
        self.in_child: list[Callable[[], object]] = []
        self.trace = Trace.wanted(rank, world_size, now)
        self.matching.traced = self.trace is not None
        self.watchdog = Watchdog(
            rank, world_size, self._tell, self.matching.unexpected_bytes, self.history.last
        )
        self.native: Callable[[Group], Native | None] = lambda group: None
        self.copies: dict[torch.device, HostCopies] = {}
        self._early: dict[int, EarlyControl] = {}  # by the group's identity
        self._advancing = False
        engines = _engines_of_this_process()
        engines[:] = [other for other in engines if other() is not None]
        engines.append(weakref.ref(self))

    # Works ----------------------------------------------------------------------------------

    def post(self, work: Work[Any], round_: Round) -> bool:
        """Begin a round: receives first, so that an answer finds its receive posted.

        Returns whether it is complete already. Lock held.
        """
        posted = work.step = PostedRound(work, round_, self)
        transport, left = self.transport, self.left or work.group.left
        if self.matching.traced:
            posted.trace()
        for receive in posted.receives:
            self.matching.post(work.channel, receive)
        for send in posted.sends:
            if work.over:
                break
            if left:
                self.check_reachable(work, send.peer)
            transport.send(send)
        for receive in posted.receives:
            if work.over:
                break
            if left and not receive.done:
                self.check_reachable(work, receive.peer)
            # Also if done: there is room again for what comes next.
            for peer in work.group.ranks if receive.peer == ANY else (receive.peer,):
                if peer in transport.refused:
                    transport.room(peer)
        posted.posted = True
        return posted.left == 0

    def begin(self, work: Work[Any], step: Step) -> bool:
        """Begin a step of a work; return whether it is complete already. Lock held."""
        work.step = step
        step.begin(work.call)
        if self._is_complete(work, step):
            return True
        self.polled[work] = step
        for peer in step.waits_for():
            self.check_reachable(work, peer)
        self.transport.watch()
        return False

    def withdraw(self, posted: PostedRound) -> None:
        """Give up the rest of a round. Lock held."""
        for receive in posted.receives:
            if not receive.done:
                receive.done = True
                self.matching.withdraw(receive)
                receive.view = NOTHING
        for send in posted.sends:
            if not send.done:
                send.done = True
                self.transport.cancel(send)
                send.view = NOTHING

    def look(self) -> None:
        """Poll the steps that need it, for those that are complete. Lock held."""
        for work, step in list(self.polled.items()):
            if self._is_complete(work, step) and self.polled.pop(work, None) is not None:
                self.ready.append(work)

    def run_ready(self) -> None:
        """Go on with the works whose steps are complete. Lock held."""
        if self.polled:
            self.look()
        if self._advancing:
            return
        self._advancing = True
        try:
            while self.ready:
                self.ready.popleft().advance()
        finally:
            self._advancing = False

    def _is_complete(self, work: Work[Any], step: Step) -> bool:
        """Look at a step that has to be polled. Ranks that diverge are told, once."""
        try:
            complete = step.ready()  # before `diverged`: who arrives in between is checked, too
        except Exception as error:
            work.group.work_failed(work, error)
            return False
        diverged = step.diverged()
        if diverged is None:
            if complete and self.counters is not None:
                peer = step.awaited()
                self.counters.arrived(work, ANY if peer is None else peer)
            return complete
        work.group.checker.has_diverged(work.call, diverged)
        return False

    def wait(self, until: Wait) -> None:
        """Block until that is over. Lock not held."""
        began, counters = self.now(), self.counters
        if counters is not None:
            counters.blocks(until, began)
        self.watchdog.waits.setdefault(until, began)
        try:
            self.transport.wait(until)
        finally:
            self.watchdog.waits.pop(until, None)  # another thread may have waited for it, too
            if until.over and self.watchdog.queries:
                self.watchdog.forget(until)
            now = self.now()
            until.group.was_blocked(now - began)
            if counters is not None:
                counters.is_free(until, now)
        if self.callbacks:
            self.run_callbacks()

    def poll(self, work: Work[Any]) -> None:
        """Move the bytes that can be moved without waiting. Lock not held."""
        self.transport.poll(work)
        self.run_callbacks()

    def run_callbacks(self) -> None:
        """Call the callbacks of `Work.on_done`, of works that are done. Lock not held."""
        while self.callbacks:
            try:
                callback, work = self.callbacks.popleft()
            except IndexError:  # another thread has taken it
                return
            try:
                callback(work)
            except Exception:
                log.exception("rank %d: a callback of %s failed", self.rank, work.describe())

    def count(self) -> Counts:
        """Return the numbers of this rank. With the first call, counting begins."""
        with self.lock:
            if self.counters is None:
                kept, failures = self.matching.unexpected_bytes, self.history.failures
                self.counters = Counters(
                    self.rank, self.world_size, self.lock, self.now, kept, failures
                )
                self.moved = self.counters.moved
            return self.counters.snapshot()

    def take_progress(self, other: Engine) -> None:
        """Go on with the program's progress on another engine of this process, as this rank."""
        self.progress = other.progress
        self.progress.of(self.rank, lambda: self.now())  # noqa: PLW0108 - raises in a child

    def check_reachable(self, work: Work[Any], peer: int) -> None:
        """Raise `PeerLostError` if a work would wait for a rank that has left."""
        group = work.group
        anyone = peer == ANY
        if not group.others() if anyone else peer in self.left or peer in group.left:
            who = "every other rank" if anyone else f"rank {group.name_of_global(peer)}"
            raise PeerLostError(
                f"rank {group.name}: {work.describe()}: {who} left",
                rank=group.rank,
                peer=group.to_local.get(peer),
                op=work.name,
                sequence=work.sequence,
            )

    def _is_stale(self, channel: Channel, peer: int) -> bool:
        """Return whether a message's collective is over on this rank: then the ranks disagree."""
        group = self.groups.get(channel.group)
        if channel.kind is not Kind.COLLECTIVE or group is None or channel.number >= group.finished:
            return False
        group.checker.got_unexpected_message(channel.number, peer)
        return True

    def copies_of(self, device: torch.device, op: str) -> HostCopies:
        """Return the copies to and from a device, for a call of `op`. Lock held or not.

        Raises `UnsupportedOperationError` if its tensors cannot come by way of host memory.
        """
        with self.lock:
            if device not in self.copies:
                if device.type not in device_kinds():
                    raise UnsupportedOperationError(
                        f"rank {self.rank}: {op} of a tensor on {device}: the library has no such "
                        "operation, and torch no streams with which the tensor could go by way of "
                        "the CPU; move it with .cpu()",
                        rank=self.rank,
                        op=op,
                    )
                self.copies[device] = AcceleratorCopies(device)
            return self.copies[device]

    # Groups and peers -----------------------------------------------------------------------

    def add_group(self, group: Group) -> None:
        """Add a new group. It may be broken already: others can be ahead."""
        with self.lock:
            self.groups[group.id] = group
            early = self._early.pop(group.id, None) or EarlyControl()
            group.left |= early.leavers
            lost = (self.lost[rank] for rank in group.ranks if rank in self.lost)
            failure = early.failure or next(lost, None)
            if failure is not None:
                group.fail(failure, tell=False)
            for peer, ask in early.asks.items():
                group.checker.asked(peer, ask)

    def _early_of(self, group: int) -> EarlyControl:
        """Return the messages about a group that this rank has not made yet, to be added to."""
        if group not in self._early:
            if len(self._early) >= MOST_GROUPS:
                del self._early[next(iter(self._early))]  # the oldest
            self._early[group] = EarlyControl()
        return self._early[group]

    def _tell(self, peer: int, group: int, message: Control) -> None:
        self.transport.control(peer, group, message)

    def on_control(self, peer: int, group_id: int, message: Control) -> None:
        """Handle a control message from a peer. Lock held."""
        if isinstance(message, FailureNotice):
            self._failure_came(group_id, Failure.from_notice(message))
        elif isinstance(message, Ask):
            self._asked(group_id, peer, message)
        elif isinstance(message, Answer):
            self.watchdog.answered(peer, message)
        elif group_id == WORLD_ID:
            self.peer_left(peer)
        else:
            self._member_left(group_id, peer)

    def _failure_came(self, group_id: int, failure: Failure) -> None:
        """Handle another member's word that a group is broken."""
        if self.matching.is_over(group_id):
            return
        self.run_ready()  # what is complete has not failed
        group = self.groups.get(group_id)
        if group is None:
            early = self._early_of(group_id)
            early.failure = early.failure or failure
        else:
            # Passed on: a member without a connection to the reporter may have one to this rank.
            group.fail(failure)

    def _asked(self, group_id: int, peer: int, ask: Ask) -> None:
        """Answer a peer that asks about a collective of a group, or about this rank's wait."""
        self.run_ready()
        group = self.groups.get(group_id)
        if ask.query:
            self.watchdog.asked(peer, group, ask)
        elif ask.sequence >= 0 and group is not None and peer in group.to_local:
            group.checker.asked(peer, ask)
        elif ask.sequence >= 0 and group is None and not self.matching.is_over(group_id):
            self._early_of(group_id).asks[peer] = ask

    def _member_left(self, group_id: int, peer: int) -> None:
        """Note that a peer has closed a group, which this rank may not have made yet."""
        group = self.groups.get(group_id)
        if group is not None:
            group.member_left(peer)
        elif not self.matching.is_over(group_id):
            self._early_of(group_id).leavers.add(peer)

    def peer_left(self, peer: int) -> None:
        """Note that a peer has closed everything, in good order. Lock held."""
        self.left.add(peer)
        for group in list(self.groups.values()):
            if peer in group.to_local:
                group.member_left(peer)

    def peer_lost(self, peer: int, reason: str) -> None:
        """Break every group of a peer that is gone without closing. Lock held."""
        if peer in self.lost or self.closed:
            return
        self.run_ready()  # what is complete has not failed
        failure = Failure(PeerLostError, peer, self.rank, reason)
        self.lost[peer] = failure
        for group in list(self.groups.values()):
            if peer in group.to_local:
                group.fail(failure)

    def fail_all(self, reason: str) -> None:
        """Break every group, and tell its members: this rank has failed. Lock held."""
        for group in list(self.groups.values()):
            group.fail(Failure(PeerLostError, self.rank, self.rank, reason))
        self.run_ready()


@dataclass
class EarlyControl:
    """Control messages about one group that came before this rank made it.

    Its failure, the ranks that left it, and the questions of peers.
    """

    failure: Failure | None = None
    leavers: set[int] = field(default_factory=set)
    asks: dict[int, Ask] = field(default_factory=dict)


# ------------------------------------------------------------------------------
# A child that was forked, such as a data loader's worker, has copies of its parent's objects: locks
# that are held by threads which it has not, sockets, memory that other ranks read. It can use none
# of them, and all of them go through the engine. Backends that it makes anew are its own.


class ForkedEngine(Engine):
    """The engine of a rank's forked child: every call of it raises."""

    forked = True

    @override
    def __getattribute__(self, name: str) -> Any:
        if name == "forked" or name.startswith("__"):
            return super().__getattribute__(name)
        known = super().__getattribute__("__dict__")
        raise forked_error(known["rank"], known["process"])


@cache
def _engines_of_this_process() -> list[weakref.ref[Engine]]:
    """Return the engines that may be alive; each is told when this process is forked.

    Python never forgets a function to call after a fork: so there is one for all of them.
    """
    engines: list[weakref.ref[Engine]] = []
    os.register_at_fork(after_in_child=partial(_forked, engines))
    return engines


def _forked(engines: list[weakref.ref[Engine]]) -> None:
    for reference in engines:
        engine = reference()
        if engine is not None:
            for let_go in engine.in_child:
                with suppress(OSError):
                    let_go()
            engine.__class__ = ForkedEngine
    engines.clear()
