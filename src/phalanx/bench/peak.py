"""The peak of memory of a training step: one rank of a pair that is there for this alone.

Each library is measured in processes of its own, made for it: in those that are timed all are
at home, and what one has freed another uses again.

    a small step       what is loaded, connected and started once is there, and does not count
    the model is made  -> `building`: whole on each rank, as users do, then wrapped
    some steps         -> `training`
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.bench.control import Control
from phalanx.bench.memory import Memory
from phalanx.bench.operations import Operation
from phalanx.bench.peers.peer import Peer
from phalanx.bench.records import Ask, Held, LeftOut, Peak
from phalanx.bench.resident import Meter

__all__ = ["measure_peak"]

_OVER = object()
_SMALL = 8
"""The width of layers that count for nothing."""


def measure_peak(
    name: str, peer: Peer, operation: Operation, ask: Ask, control: Control
) -> Peak | LeftOut:
    """What the peer's steps take on each rank. Every rank calls it, and gets the same."""
    held: list[int] = []
    for problem in _together(_phases(peer, operation, ask.steps, held), control):
        if problem:
            return LeftOut(name, control.size, problem, operation.name)
    return Peak(
        operation=operation.name,
        ranks=control.size,
        peer=name,
        gives_back=ask.gives_back,
        steps=ask.steps,
        held=[Held(*values) for values in control.gather(held)],
    )


def _together(phases: Iterator[None], control: Control) -> Iterator[str]:
    """Go through the phases, which all ranks begin together; yields any rank's problem in each."""
    going = True
    while going:
        here = ""
        try:
            going = next(phases, _OVER) is not _OVER
        except Exception as error:
            here = f"{type(error).__name__}: {error}"
        yield control.problem(here)


def _phases(peer: Peer, operation: Operation, steps: int, held: list[int]) -> Iterator[None]:
    """What a rank does between meetings; appends the fields of `Held`."""
    width, peer.width = peer.width, _SMALL
    step = peer.exchange(operation, 0, "ordinary", "auto", Memory())
    step.call()
    step.call()
    peer.width = width
    del step
    yield
    meter = Meter()
    yield
    step = peer.exchange(operation, 0, "ordinary", "auto", Memory())
    yield  # what is shared by two counts half for each, once both have it
    held.append(meter.peak())
    yield  # where ranks are threads, they have one peak
    meter.reset()
    yield
    for _ in range(steps):
        step.call()
    yield
    held += [meter.peak(), meter.shared()]
