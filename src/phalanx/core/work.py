"""Work: one request under way, the result of an asynchronous call.

    Work     a call under way: its program of steps, and their memory
    AnyOf    a thread's wait in `wait_any`: for the first of several works

When a step is complete the engine calls `advance()`; nobody else drives a work. A send is a work of
one round, a ring all-reduce one of 2(p-1) rounds. A blocking call whose steps complete at once
never becomes a work (`Backend.run`): only its `Call` is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from typing_extensions import override

from phalanx.core.call import Call, check_timeout
from phalanx.core.group import Group
from phalanx.core.posted import Combine, PostedRound, Wait
from phalanx.core.steps import Program, Round, Step
from phalanx.errors import DistributedError
from phalanx.wire.frame import Channel, Kind
from phalanx.wire.memory import outside_inference_mode

T = TypeVar("T")
SHOWN = 3  # of the works that a thread waits for, in messages


class Work(Wait, Generic[T]):
    """The result of an asynchronous call: a collective or message that may still be under way.

    Its input tensors must not be written before it is done; one that is worked on in place, or that
    is received into, must not be read either. Any number may be outstanding on one backend;
    collectives of one group run in the order in which they were issued. A work need not be waited
    for, but its error is then seen only by the next call.
    """

    # program    an iterator of steps
    # buffers    the memory of its rounds, as bytes; looked up when a round is posted
    # combine    reduces bytes that arrive into a buffer
    # result     called once, by `wait`, for its return value
    # step       the current one, if there is one
    # ask_at     when it asks the other ranks whether they are in the same collective
    # sender     of a received message, as a global rank
    # waited     if it is traced: seconds until the first byte of each round arrived,
    # sent, received   and bytes moved

    __slots__ = (
        *("_callbacks", "_finish", "_result", "_steps", "ask_at", "buffers", "call", "channel"),
        *("combine", "deadline", "error", "group", "is_collective", "over", "received", "sender"),
        *("sent", "step", "timeout", "waited"),
    )

    def __init__(
        self,
        group: Group,
        call: Call,
        channel: Channel,
        program: Iterable[Program],
        buffers: Sequence[memoryview] = (),
        *,
        combine: Combine | None = None,
        result: Callable[[], T] | None = None,
    ) -> None:
        self.group = group
        self.call = call
        self.channel = channel
        self.is_collective = channel.kind is Kind.COLLECTIVE
        self.buffers: Sequence[memoryview] = buffers
        self.combine = combine
        self.timeout = call.timeout
        self.deadline = call.started + call.timeout
        self.ask_at = call.started + group.engine.ask_every
        self.sender = -1
        self.waited = 0.0
        self.sent = self.received = 0
        self.step: Step | PostedRound | None = None
        self.over = False
        self.error: Exception | None = None
        self._steps: Iterator[Program] = iter(program)
        self._finish = result
        self._result: T | None = None
        self._callbacks: list[Callable[[Work[T]], object]] = []

    # The user's side ------------------------------------------------------------------------

    @property
    def op_name(self) -> str:
        """Name of the collective or message, such as `all_reduce`."""
        return self.call.name

    def done(self) -> bool:
        """Return whether `wait` would return, or raise, at once. Moves bytes without waiting."""
        engine = self.group.engine
        if not self.over:
            engine.poll(self)
        elif engine.callbacks:  # another rank's thread may have ended it
            engine.run_callbacks()
        return self.over

    def wait(self, timeout: float | None = None) -> T:
        """Block until it is done and return its result; again, the same object.

        Raises its error, each time it is called. `timeout` is in seconds from now, and replaces
        that of the call; when it passes, the work fails.
        """
        if not self.over:
            group = self.group
            wait = group.engine.wait  # first: it raises in a child that was forked
            if timeout is not None:
                self.timeout = check_timeout(timeout)
                self.deadline = group.engine.now() + timeout
                group.engine.watchdog.forget(self)
            try:
                wait(self)
            except BaseException as interruption:
                with group.engine.lock:
                    group.abandon(self, interruption)
                raise
        elif self.group.engine.callbacks:
            self.group.engine.run_callbacks()
        error = self.error
        if error is not None:
            raise error.again() if isinstance(error, DistributedError) else error
        if self._finish is not None:
            with self.group.engine.finishing:  # another thread may wait for it, or be called back
                if self._finish is not None:
                    self._result = self._finish()
                    self._finish = None
        return self._result  # type: ignore[return-value]

    def go_on(self) -> None:
        """Let it move on from now by itself: perhaps no thread waits for it."""
        if not self.over:
            self.group.engine.transport.background(self, patience=0.0)

    def cancel(self, reason: str) -> None:
        """End it; its memory is the caller's again. A collective breaks its group.

        A message that has not arrived goes to the next receive; one that was not sent never is.
        """
        with self.group.engine.lock:
            self.group.abandon(self, reason)
            self.group.engine.run_ready()

    def on_done(self, callback: Callable[[Work[T]], object]) -> None:
        """Call `callback(work)` once, when it is done, well or not; at once if it is.

        It is called by a thread of this rank that waits or polls, or by the one in the background,
        with no lock held. It may issue works, and wait for others. Its exceptions are logged.
        """
        engine = self.group.engine
        with engine.lock:
            if not self.over:
                self._callbacks.append(callback)
                return
            engine.callbacks.append((callback, self))
        engine.run_callbacks()

    # The engine's side ----------------------------------------------------------------------

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the operation, for errors."""
        return self.call.name

    @property
    def sequence(self) -> int:  # type: ignore[override]
        """Number of the operation in its group, for errors."""
        return self.call.sequence

    def advance(self) -> None:
        """Go on from a complete step, as far as possible without waiting. Lock held."""
        if torch.is_inference_mode_enabled():
            outside_inference_mode(self.advance)
            return
        engine = self.group.engine
        try:
            for item in self._steps:
                if self.over:
                    return
                if isinstance(item, Round):
                    complete = engine.post(self, item)
                else:
                    complete = engine.begin(self, item)
                if not complete:
                    return
            if not self.over and self._may_end():
                self._end()
        except Exception as error:
            self.group.work_failed(self, error)
        except BaseException as interruption:
            # The thread may wait for another work; the program cannot be resumed after this.
            self.group.abandon(self, interruption)
            raise

    @override
    def fail(self, error: Exception) -> None:
        """End with an error: write nothing more into the caller's memory."""
        if self.over:
            return
        self.error = error
        self._finish = None  # it may refer to this work
        self.group.engine.history.note_on(error)
        step, self.step = self.step, None
        if step is not None:
            step.cancel()
        self._end()

    def _may_end(self) -> bool:
        """Return whether it is complete, as its steps are: not while ranks disagree."""
        if not self.is_collective:
            return True
        checker, matching = self.group.checker, self.group.engine.matching
        if checker.desync is not None:
            return False
        sender = matching.unexpected_from(self.channel) if matching.unexpected else None
        if sender is not None:
            checker.got_unexpected_message(self.sequence, sender)
        return sender is None

    def _end(self) -> None:
        self.over = True
        step, self.step = self.step, None
        if type(step) is PostedRound and step.receives:
            self.sender = step.receives[0].peer
        if self._callbacks:
            self.group.engine.callbacks.extend((each, self) for each in self._callbacks)
            self._callbacks = []
        self.group.work_ended(self)
        # Reference cycles would keep the memory until the garbage collector runs.
        self.buffers, self.combine, self._steps = (), None, iter(())

    @override
    def attend(self) -> float:
        return self.group.attend(self)

    @override
    def expire(self, error: DistributedError) -> None:
        self.group.work_failed(self, error)

    @override
    def parts(self) -> Iterable[Work[Any]]:
        return (self,)

    @override
    def waits_for(self) -> list[int]:
        step = self.group.head_of_queue(self).step
        return step.waits_for() if step is not None else []

    @override
    def describe(self) -> str:
        return self.call.describe()


class AnyOf(Wait):
    """The wait for the first of several works of one rank, of any groups. It moves no bytes.

    receive from rank 1   - - - - - - - - -
    receive from rank 2   - - - - done          here the thread goes on
    send to rank 3        - - - - - - - - -

    timeout   seconds; when they have passed, the wait ends with an error, and the works go on

    Raises ValueError for works of several ranks.
    """

    group: Group
    name = "wait_any"
    sequence = -1
    is_collective = False

    def __init__(self, group: Group, works: Iterable[Work[Any]], timeout: float = math.inf) -> None:
        self.group = group
        self.works = tuple(works)
        if any(each.group.engine is not group.engine for each in self.works):
            raise ValueError("wait_any takes what one rank waits for: these are of several ranks")
        self.timeout = timeout
        self.deadline = group.engine.now() + timeout
        self.error = None

    def wait(self) -> None:
        """Block until one is done. Raise errors of the wait, not of the works."""
        if not self.over:
            self.group.engine.wait(self)
        if self.error is not None:
            raise self.error

    @property
    def over(self) -> bool:  # type: ignore[override]
        """Return whether one is over, or the wait has ended with an error."""
        return self.error is not None or any(each.over for each in self.works)

    @override
    def attend(self) -> float:
        due = min(each.attend() for each in self.works)
        now, watchdog = self.group.engine.now(), self.group.engine.watchdog
        due = min(due, watchdog.check_deadline(self, now) - now)
        due = min(due, watchdog.check_patience(self, now) - now)
        return 0.0 if self.over else due

    @override
    def expire(self, error: DistributedError) -> None:
        self.fail(error)

    @override
    def fail(self, error: Exception) -> None:
        if not self.over:
            self.error = error
            self.group.engine.history.note_on(error)

    @override
    def parts(self) -> Iterable[Work[Any]]:
        return self.works

    @override
    def waits_for(self) -> list[int]:
        return list(dict.fromkeys(chain.from_iterable(each.waits_for() for each in self.works)))

    @override
    def describe(self) -> str:
        """Return the wait in words: `wait_any (recv #3, recv #0 and 5 more)`."""
        shown = ", ".join(each.describe() for each in self.works[:SHOWN])
        more = len(self.works) - SHOWN
        return f"{self.name} ({shown}{f' and {more} more' if more > 0 else ''})"
