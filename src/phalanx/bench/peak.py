"""The peak of memory of a training step: one rank of a pair that is there for this alone.

Each library is measured in processes of its own, made for it: in those that are timed all are
at home, and what one has freed another uses again.

    a small step       what is loaded, connected and started once is there, and does not count
    the model is made  -> `building`: whole on each rank, as users do, then wrapped
    some steps         -> `training`
"""

from __future__ import annotations

from phalanx.bench.control import Control
from phalanx.bench.memory import Memory
from phalanx.bench.operations import Operation
from phalanx.bench.peers.peer import Peer
from phalanx.bench.records import Ask, Held, LeftOut, Peak
from phalanx.bench.resident import Meter

__all__ = ["measure_peak"]

_SMALL = 8
"""The width of layers that count for nothing."""


def measure_peak(
    name: str, peer: Peer, operation: Operation, ask: Ask, control: Control
) -> Peak | LeftOut:
    """What the peer's steps take on each rank. Every rank calls it, and gets the same."""
    here, own = "", (0, 0, 0)
    try:
        own = _hold(peer, operation, ask.steps, control)
    except Exception as error:
        here = f"{type(error).__name__}: {error}"
    if problem := control.problem(here):
        return LeftOut(name, control.size, problem, operation.name)
    return Peak(
        operation=operation.name,
        ranks=control.size,
        peer=name,
        gives_back=ask.gives_back,
        steps=ask.steps,
        held=[Held(*values) for values in control.gather(own)],
    )


def _hold(peer: Peer, operation: Operation, steps: int, control: Control) -> tuple[int, int, int]:
    """The peaks of building and of training, and what is shared in the end."""
    width, peer.width = peer.width, _SMALL
    small = peer.exchange(operation, 0, "ordinary", "auto", Memory())
    small.call()
    small.call()
    del small
    peer.width = width
    control.barrier()
    meter = Meter()
    control.barrier()
    step = peer.exchange(operation, 0, "ordinary", "auto", Memory())
    control.barrier()  # what is shared by two counts half for each, when both have it
    building = meter.peak()
    meter.reset()
    control.barrier()
    for _ in range(steps):
        step.call()
    control.barrier()
    return building, meter.peak(), meter.shared()
