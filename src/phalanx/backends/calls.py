"""Collectives as a backend sees them: programs of its engine, issued in the group's order."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from phalanx.backends.engine import Combine, Engine, Failure, Group, Operation, Step, caller
from phalanx.backends.engine.history import Record
from phalanx.backends.messages import Messages, check_timeout
from phalanx.backends.native import Call
from phalanx.errors import DistributedError
from phalanx.wire.frame import Channel, Kind

if TYPE_CHECKING:
    from phalanx.backends.shm.meeting import Meet


class Calls(Messages):
    """One rank's collectives with the other ranks of a group."""

    def __init__(self, engine: Engine, group: Group, *, timeout: float) -> None:
        super().__init__(engine, group, timeout=timeout)
        self._strict = os.environ.get("PHALANX_STRICT", "") == "1"

    def start(
        self,
        name: str,
        program: Iterable[Step],
        buffers: tuple[memoryview, ...] = (),
        *,
        combine: Combine | None = None,
        signature: str = "",
        fingerprint: int = 0,
        timeout: float | None = None,
        background: bool = False,
    ) -> Operation:
        """Issue a collective: this rank's steps. Returns at once.

        Every rank of the group issues its own part, in the same order. `fingerprint` has to be
        equal on all of them. With `background` it moves on while nobody waits for it.
        """
        group = self.group
        seconds = self._timeout(timeout)
        site = caller()
        if self._strict:
            fingerprint ^= xxh3_64_intdigest(str(site).encode())
        with self.engine.lock:
            sequence = group.next_sequence(fingerprint)
            operation = Operation(
                group,
                name,
                Channel(group.id, Kind.COLLECTIVE, sequence),
                sequence,
                program,
                buffers,
                combine=combine,
                signature=signature,
                fingerprint=fingerprint,
                trail=group.trail,
                site=site,
                timeout=seconds,
            )
            self.engine.issue(operation)
        if background and not operation.done:
            self.engine.in_background(operation)
        return operation

    def carry_out(
        self,
        name: str,
        steps: Iterator[Meet],
        *,
        signature: str = "",
        fingerprint: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Do a collective in which ranks only meet (`backends/shm`). Blocks until it is done.

        The same as `start` and `wait`. But where nothing is in the way, and the others come soon,
        no operation has to be made, queued, and woken up.
        """
        group, engine = self.group, self.engine
        if timeout is not None:
            check_timeout(timeout)
        site = caller()
        if self._strict:
            fingerprint ^= xxh3_64_intdigest(str(site).encode())
        with engine.lock:
            sequence, trail = group.next_sequence(fingerprint), group.trail
            began = monotonic()
            engine.glance(began)
            if group.is_free():
                try:
                    waiting = _carried_out(steps, trail)
                except BaseException as error:
                    steps = _raising(error)
                else:
                    if waiting is None:
                        group.was_done(
                            Record(
                                *(name, sequence, signature, group.suffix, site),
                                *(fingerprint, began, monotonic(), False),
                            )
                        )
                        return
                    steps = chain((waiting,), steps)
            operation = Operation(
                group,
                name,
                Channel(group.id, Kind.COLLECTIVE, sequence),
                sequence,
                steps,
                signature=signature,
                fingerprint=fingerprint,
                trail=trail,
                site=site,
                timeout=self._timeout(timeout),
            )
            self._issue(operation)
        self.wait(operation)

    def call(
        self,
        call: Call,
        *,
        signature: str = "",
        fingerprint: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Do a collective that is the library's own (`Backend.native`). Blocks until it is done.

        The same as `start` and `wait`, but that no operation is made where it is over soon.
        """
        group, engine = self.group, self.engine
        name, site, seconds = call.collective, caller(), self._timeout(timeout)
        with engine.lock:
            sequence, trail = group.next_sequence(fingerprint), group.trail
            began = monotonic()
            engine.glance(began)
            step: Step | None = call
            if group.is_free():
                step = engine.begin_call(group, call, seconds)
                if step is None:
                    ended = monotonic()
                    self._waited(ended - began)
                    group.was_done(
                        Record(
                            *(name, sequence, signature, group.suffix, site),
                            *(fingerprint, began, ended, False),
                        )
                    )
                    return
            operation = Operation(
                group,
                name,
                Channel(group.id, Kind.COLLECTIVE, sequence),
                sequence,
                (step,),
                signature=signature,
                fingerprint=fingerprint,
                trail=trail,
                site=site,
                timeout=seconds,
            )
            self._issue(operation)
        self.wait(operation)

    def _issue(self, operation: Operation) -> None:
        """Begin it here and now; an interrupt that comes meanwhile ends it. Lock held."""
        try:
            self.engine.issue(operation)
        except Exception:
            raise
        except BaseException as interruption:
            self.group.abandon(operation, f"interrupted by {type(interruption).__name__}")
            raise

    def fail(self, error: DistributedError, *, culprit: int | None = None) -> None:
        """Break the group on every rank because of an error of this one, which raises it itself.

        For code above the collectives that finds out, between two of them, that this rank cannot
        go on: the others wait for it, and learn here why it will not come. They blame the error's
        `peer`, or else this rank; or `culprit`, a rank of the job that need not be a member.
        """
        with self.engine.lock:
            ranks, blamed = self.group.ranks, self.rank if error.peer is None else error.peer
            whole = ranks[blamed] if culprit is None else culprit
            failure = Failure(type(error), whole, ranks[self.rank], str(error))
            self.group.fail(failure)
            self.engine.run_ready()


def _carried_out(steps: Iterator[Meet], trail: int) -> Meet | None:
    """Do one step after the other; the one to which not everybody has come soon enough, or None."""
    for meet in steps:
        meet.begin(trail)
        if not meet.spin():
            return meet
    return None


def _raising(error: BaseException) -> Iterator[Meet]:
    """Steps that end in an error."""

    def fail() -> Meet:
        raise error

    return iter(fail, None)
