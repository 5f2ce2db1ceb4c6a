"""Counters: one rank's traffic, operations and waits; and the progress of its program.

    backend.counters()   -> Counts      numbers of this rank, of all its groups together
    backend.progress     -> Progress    the step that has ended last: logged, or else counted

The counts, and their times:

    bytes, messages   of a send when its memory may be used again; of a receive when its memory is
                      filled. So messages that wait for their receive are counted as sent only;
                      they are in `bytes_kept` of the receiver. Headers and control messages are not
                      counted. Large messages inside a host go through memory, and are messages
    given, read       of collectives in shared memory, which send nothing: bytes that a peer reads
                      of this rank's tensor or staging memory, and that this rank reads of a peer's;
                  counted when the ranks that it depends on have come
    operations        collectives and messages that are over, well or not; their seconds are from
                      the call to the end, so those of operations that overlap add up to more than
                      has passed
    waiting           seconds in which a thread was blocked in a call, until the wait was over.
                      They count for the rank whose message or flag came last. A library (Gloo,
                      NCCL, MPI) tells neither whom it waits for, nor its traffic: there, only
                      operations and the sum of the seconds are known

When all messages have arrived, bytes sent by all ranks equal bytes received by all, and bytes given
equal bytes read.

Counting begins with the first call of `counters()` and does not end: until then an operation pays
for one comparison. Failures, kept bytes and progress are always known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import index
from threading import RLock
from time import time
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from phalanx.core.call import Call
from phalanx.core.posted import PostedMessage, PostedReceive, Wait
from phalanx.core.steps import ANY, Step
from phalanx.errors import DistributedError

if TYPE_CHECKING:
    from phalanx.core.work import Work

# ------------------------------------------------------------------------------
# The results of `backend.counters()`.


class PeerCounts(Struct):
    """The traffic between one rank and one other.

    messages_sent, messages_received, bytes_sent, bytes_received   of messages, without headers
    bytes_given, bytes_read   in collectives in shared memory: that the peer has read here; that
                              this rank has read there
    bytes_kept                of the peer's messages that no receive has asked for, at this moment:
                              their content, and some 0.4 to 1.8 KiB a message
    seconds_waiting           in which this rank was blocked until the peer's message or flag came
    """

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_given: int = 0
    bytes_read: int = 0
    bytes_kept: int = 0
    seconds_waiting: float = 0.0


class OperationCounts(Struct, frozen=True):
    """The number of one kind's operations that are over, well or not, and their seconds, summed."""

    count: int = 0
    seconds: float = 0.0


class Counts(Struct, frozen=True):
    """The numbers of one rank of a job, of all its groups together, at one moment.

    rank, world_size  of the whole job
    since             start of counting, in seconds since 1970
    peers             by rank of the job; ranks with which nothing was exchanged may be missing
    operations        by name, such as `all_reduce` and `send`
    seconds_unknown   in which a thread was blocked in a call, and it is not known for whom
    failures          number of calls that have ended with an error, by the error's class
    """

    rank: int
    world_size: int
    since: float
    peers: dict[int, PeerCounts]
    operations: dict[str, OperationCounts]
    seconds_unknown: float
    failures: dict[str, int]

    @property
    def seconds_waiting(self) -> float:
        """Seconds in which a thread of this rank was blocked in a call, for whomever."""
        known = (peer.seconds_waiting for peer in self.peers.values())
        return sum(known, self.seconds_unknown)

    @property
    def bytes_out(self) -> int:
        """Bytes that other ranks have from this one: sent and given."""
        return sum(peer.bytes_sent + peer.bytes_given for peer in self.peers.values())

    @property
    def bytes_in(self) -> int:
        """Bytes that this rank has from others: received and read."""
        return sum(peer.bytes_received + peer.bytes_read for peer in self.peers.values())


# ------------------------------------------------------------------------------
# Counting.

MOST_TAKEN = 1024  # kinds of collectives in shared memory that are not in the sums yet


class Taken:
    """The bytes that a collective in shared memory moves between this rank and each other.

    exchanged   (rank of the job, bytes given, bytes read)
    times       number of runs that are not in the sums yet
    """

    __slots__ = ("exchanged", "times")

    def __init__(self, exchanged: list[tuple[int, int, int]]) -> None:
        self.exchanged = exchanged
        self.times = 0


class Counters:
    """Counts one rank's operations, from its creation on. The engine's lock is held in all of it,
    but in `blocks` and `is_free`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        lock: RLock,
        now: Callable[[], float],
        kept: Mapping[int, int],
        failures: Mapping[str, int],
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._lock = lock
        self._now = now
        self._kept = kept
        self._failures = failures
        self._since = time()
        self._peers: defaultdict[int, PeerCounts] = defaultdict(PeerCounts)
        self._operations: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        self._seconds_unknown = 0.0
        self._taken: list[Taken] = []
        # And the start of its time not yet counted. Only the waiting thread adds and removes.
        self._blocked: dict[Wait, list[float]] = {}

    def snapshot(self) -> Counts:
        """Return the numbers of this moment."""
        for wait, since in list(self._blocked.items()):
            now = self._now()
            absent = wait.waits_for() or [ANY]
            for peer in absent:
                self.waited(peer, (now - since[0]) / len(absent))
            since[0] = now
        self._add_taken()
        kept = {peer: count for peer, count in self._kept.items() if count}
        return Counts(
            self._rank,
            self._world_size,
            self._since,
            {
                peer: replace(self._peers.get(peer, PeerCounts()), bytes_kept=kept.get(peer, 0))
                for peer in sorted({*self._peers, *kept})
            },
            {
                name: OperationCounts(int(count), seconds)
                for name, (count, seconds) in sorted(self._operations.items())
            },
            self._seconds_unknown,
            dict(self._failures),
        )

    # Operations and bytes -------------------------------------------------------------------

    def ended(self, call: Call) -> None:
        counted = self._operations[call.name]
        counted[0] += 1
        counted[1] += call.ended - call.started

    def moved(self, message: PostedMessage) -> None:
        """Count a message of a round, which is about to be complete."""
        counted = self._peers[message.peer]
        if type(message) is PostedReceive:
            counted.messages_received += 1
            counted.bytes_received += message.stop - message.start
        else:
            counted.messages_sent += 1
            counted.bytes_sent += len(message.view)
        if self._blocked and message.round.left == 1:
            since = self._blocked.get(message.work)
            if since is None or len(self._blocked) > 1:
                self.arrived(message.work, message.peer)
            else:  # nearly always
                now = self._now()
                counted.seconds_waiting += now - since[0]
                since[0] = now

    def took(self, taken: Taken) -> None:
        """Count a collective in shared memory, as all ranks are in it."""
        if not taken.times:
            self._taken.append(taken)
            if len(self._taken) > MOST_TAKEN:
                self._add_taken()
        taken.times += 1

    def _add_taken(self) -> None:
        """Add the bytes taken to the sums of the peers."""
        for taken in self._taken:
            for peer, given, read in taken.exchanged:
                counted = self._peers[peer]
                counted.bytes_given += taken.times * given
                counted.bytes_read += taken.times * read
            taken.times = 0
        self._taken.clear()

    # Waiting --------------------------------------------------------------------------------

    def ready(self, step: Step, spin: float) -> bool:
        """Return `step.ready(spin)`, and count the caller's wait in it."""
        began = self._now()
        complete = step.ready(spin=spin)
        peer = step.awaited()
        if peer is not None:
            self.waited(peer, self._now() - began)
        return complete

    def blocks(self, wait: Wait, now: float) -> None:
        """Note that a thread begins to wait. Lock not held."""
        self._blocked.setdefault(wait, [now])

    def arrived(self, work: Work[Any], peer: int) -> None:
        """Note that a step of a work is complete, with this peer's part as the last one."""
        for wait, since in list(self._blocked.items()):
            if wait is work or _is_held_up(wait, work):
                now = self._now()
                self.waited(peer, now - since[0])
                since[0] = now

    def is_free(self, wait: Wait, now: float) -> None:
        """End a thread's wait; if it gave up, the seconds count for the rank that the error blames.

        Lock not held.
        """
        since, error = self._blocked.pop(wait, None), wait.error
        if since is None or error is None:  # another thread has waited for it, too; or it is over
            return
        peer = error.peer if isinstance(error, DistributedError) else None
        with self._lock:
            self.waited(ANY if peer is None else wait.group.ranks[peer], now - since[0])

    def waited(self, peer: int, seconds: float) -> None:
        """Add the seconds that this rank was blocked for a peer."""
        if peer == ANY:
            self._seconds_unknown += seconds
        else:
            self._peers[peer].seconds_waiting += seconds


def _is_held_up(wait: Wait, work: Work[Any]) -> bool:
    """Return whether a work has to end before the wait can, or before a part of it can."""
    return any(part.group.head_of_queue(part) is work for part in wait.parts())


# ------------------------------------------------------------------------------
# Progress: how far the program has come.


class LoggedStep(Struct, frozen=True):
    """The program's last logged step; of one that logs nothing, the last counted one.

    number   of the last step that has ended; -1: none has
    ended    its end, in seconds since 1970
    seconds  that a step has taken since the one that was noted before it; None for the first
    values   the latest value of each name, such as `loss`
    """

    number: int = -1
    ended: float = 0.0
    seconds: float | None = None
    values: dict[str, float] = {}


class Progress:
    """The progress of a rank's program, for those who watch the job.

        for step, batch in enumerate(batches):
            loss = train(batch)
            backend.progress.log(step, loss=loss)

    Until the program logs, trainers count steps from 0: a backward pass of DDP or FSDP that has
    averaged gradients, an optimizer's step of LocalSGD or DiLoCo, a pipeline's `train_step`, and
    `distributed_train_step`. From its first log on, only logged steps count.

    on_log   called when a step was logged or counted, by the thread that did it
    """

    def __init__(self, rank: int, now: Callable[[], float]) -> None:
        self.on_log: Callable[[], object] | None = None
        self.of(rank, now)
        self._at = 0.0  # on that clock
        self._logged = LoggedStep()
        # The last step that was counted: its number, when it ended, and how long it took.
        self._counted: tuple[int, float, float | None] = (-1, 0.0, None)
        self._main = 0  # which source has ended it
        self._others: set[int] = set()  # which have ended a step of theirs since
        self._muted = 0  # for how many reasons nothing is counted

    def of(self, rank: int, now: Callable[[], float]) -> None:
        """Be this rank's, whose clock goes on where that of the one before is."""
        self._rank = rank
        self._now = now

    @property
    def latest(self) -> LoggedStep:
        """The step that has ended last, and the latest values. Any thread may read it."""
        if self._logged.number >= 0:
            return self._logged
        number, at, seconds = self._counted
        return LoggedStep(number, time() - (self._now() - at) if number >= 0 else 0.0, seconds)

    def count(self, source: object) -> None:
        """Note that a trainer has ended a step, if the program logs none. Less than 1 us.

        source   the trainer. If there are several, such as two models that train each other, a
                 step is over when one of them ends its second
        """
        if self._muted:
            return
        known = id(source)
        if known != self._main:
            if self._main and known not in self._others:
                self._others.add(known)
                return
            self._main = known
        if self._others:
            self._others.clear()
        number, before, _ = self._counted
        now = self._now()
        self._counted = number + 1, now, now - before if number >= 0 else None
        if self.on_log is not None:
            self.on_log()

    @contextmanager
    def one_step(self, source: object) -> Iterator[None]:
        """Count one step when this block ends well, in place of those counted in it."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1
        self.count(source)

    def log(self, step: int, **values: float) -> None:
        """Note that this step has ended, and the latest values. About 2 us; sends nothing.

        step     its number; need not grow by one, nor grow
        values   numbers, or tensors of one element; one on a device is waited for. Values that were
                 logged before, and are not given now, stay

        Call it from one thread. Raises TypeError for anything but a number.
        """
        number, last, now = index(step), self._logged, self._now()
        known = dict(last.values)
        for name, value in values.items():
            try:
                known[name] = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(
                    f"rank {self._rank}: progress.log({step}, {name}={value!r}): it takes numbers "
                    "and tensors of one element"
                ) from error
        seconds = None
        if last.number >= 0:
            seconds = (now - self._at) / max(1, number - last.number)
        self._at = now
        self._muted += last.number < 0  # with the first one that is logged counting ends
        self._logged = LoggedStep(number, time(), seconds, known)
        if self.on_log is not None:
            self.on_log()
