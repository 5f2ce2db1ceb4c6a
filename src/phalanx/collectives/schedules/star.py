"""The star: rank 0 is the hub, and everybody else talks to the hub only.

The shape of a parameter server, and the fewest rounds there can be: one. The hub carries all the
traffic, p-1 times the tensor, so it suits tensors of a few bytes and worlds of a few ranks. The hub
folds what comes in rank order.

    M. Li et al.: Scaling distributed machine learning with the parameter server. OSDI 2014.

`count` is the number of chunks, from chunk 0 on, that move as a whole.
"""

from __future__ import annotations

from .steps import Combine, Recv, Schedule, Send

__all__ = ["star_broadcast", "star_gather", "star_reduce", "star_scatter"]

HUB = 0


def star_reduce(rank: int, size: int, *, count: int = 1) -> Schedule:
    """Everybody's chunks are reduced on the hub, in rank order, in one round.

    With 4 ranks:

        round 0   1 +0+> 0   2 +0+> 0   3 +0+> 0
    """
    if size == 1:
        return
    if rank == HUB:
        yield tuple(Combine(peer, 0, count) for peer in range(1, size))
    else:
        yield (Send(HUB, 0, count),)


def star_broadcast(rank: int, size: int, *, count: int = 1) -> Schedule:
    """The hub's chunks go to everybody in one round.

    With 4 ranks:

        round 0   0 -0-> 1   0 -0-> 2   0 -0-> 3
    """
    if size == 1:
        return
    if rank == HUB:
        yield tuple(Send(peer, 0, count) for peer in range(1, size))
    else:
        yield (Recv(HUB, 0, count),)


def star_scatter(rank: int, size: int) -> Schedule:
    """Chunk c, of the hub's p chunks, goes to rank c in one round.

    With 4 ranks:

        round 0   0 -1-> 1   0 -2-> 2   0 -3-> 3
    """
    if size == 1:
        return
    if rank == HUB:
        yield tuple(Send(peer, peer) for peer in range(1, size))
    else:
        yield (Recv(HUB, rank),)


def star_gather(rank: int, size: int) -> Schedule:
    """Chunk c, of rank c, goes to the hub in one round: the inverse of `star_scatter`.

    With 4 ranks:

        round 0   1 -1-> 0   2 -2-> 0   3 -3-> 0
    """
    if size == 1:
        return
    if rank == HUB:
        yield tuple(Recv(peer, peer) for peer in range(1, size))
    else:
        yield (Send(HUB, rank),)
