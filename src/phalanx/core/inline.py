"""The fast path: the steps of a call, carried out by the thread that makes it.

    small, in shared memory    epoch                  complete here: neither queue nor `Work`
    large, in shared memory    epoch  epoch ...       each is waited for, until one takes too long
    by messages                round                  all of it is left

The rest becomes a `Work`, which goes on from the step that was not complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from phalanx.core.call import Call
from phalanx.core.group import Group
from phalanx.core.steps import Program, Round


class Spin(NamedTuple):
    """Seconds that a call looks at a step at most, with the lock held, until it is complete."""

    first: float
    later: float


BLOCKING = Spin(1.0, 1.0)
ASYNCHRONOUS = Spin(20e-6, 0.0)  # because a small collective finishes sooner than a thread switch


def run_inline(
    group: Group, call: Call, steps: Iterator[Program], spin: Spin
) -> Iterator[Program] | None:
    """Carry out steps as long as each is complete within the spin. Lock held.

    Return those that are left, beginning with `call.step`, which has begun. None if all are
    complete: the call is over. An error of a step is left, too, for the work that fails with it.
    """
    engine = group.engine
    counters, seconds = engine.counters, spin.first
    try:
        for step in steps:
            if isinstance(step, Round):
                call.step = None
                return chain((step,), steps)
            call.step = step
            step.begin(call)
            if counters is None:
                if not step.ready(spin=seconds):
                    return chain((step,), steps)
            elif not counters.ready(step, seconds):
                return chain((step,), steps)
            seconds = spin.later
    except BaseException as error:
        return _raising(error)
    call.step = None
    call.ended = engine.now()
    group.finished = call.sequence + 1
    engine.history.calls.append(call)
    if counters is not None:
        counters.ended(call)
    return None


def _raising(error: BaseException) -> Iterator[Program]:
    """Return steps that end in an error."""

    def fail() -> Program:
        raise error

    return iter(fail, None)
