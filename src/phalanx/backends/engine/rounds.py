"""One round, bound to bytes: the sends and receives that may happen together.

Collectives are written over chunk numbers; a plan binds them to byte ranges once, and what a
backend gets to see is this. Peers are ranks of the group. `buffer` says in which of the
operation's buffers the range lies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

ANY = -1  # as the peer of a receive: whoever sends first


class SendBytes(NamedTuple):
    """`buffers[buffer][start:stop]` goes to `peer`."""

    peer: int
    start: int
    stop: int
    buffer: int = 0


class ReceiveBytes(NamedTuple):
    """What `peer` (or `ANY`) sends is written to `buffers[buffer][start:stop]`, or combined."""

    peer: int
    start: int
    stop: int
    buffer: int = 0
    combine: bool = False


class Round(NamedTuple):
    """Sends and receives that do not depend on each other."""

    sends: tuple[SendBytes, ...] = ()
    receives: tuple[ReceiveBytes, ...] = ()


Step = Any
"""What an engine carries out, and an operation waits for: a `Round`, or what it has besides."""


def ring_barrier(rank: int, size: int) -> tuple[Round, ...]:
    """Nobody leaves before everybody has come: a token goes round the ring twice.

    The first wave tells rank 0 that all have come, the second tells all that rank 0 knows.

        0 -> 1 -> 2 -> 0     all are here
        0 -> 1 -> 2 -> 0     all may leave

    2p messages of no bytes.
    """
    if size == 1:
        return ()
    send = Round(sends=(SendBytes((rank + 1) % size, 0, 0),))
    receive = Round(receives=(ReceiveBytes((rank - 1) % size, 0, 0),))
    wave = (send, receive) if rank == 0 else (receive, send)
    return wave + wave
