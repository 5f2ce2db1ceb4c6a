"""Direct: everybody talks to everybody at once, and reduces its own chunk from all the others.

The bytes of the ring, 2(p-1)/p * n for an all-reduce, in two rounds instead of 2(p-1): for ranks
with a fast path between any two of them, as in shared memory. It is the pairwise exchange of
Thakur, Rabenseifner & Gropp (2005) with all its steps in one round. Chunks are folded in rank
order, whatever the order in which they come: the same contributions give the same bits.

    R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in
    MPICH. International Journal of High Performance Computing Applications 19 (2005).
"""

from __future__ import annotations

from .star import HUB, star_scatter
from .steps import Combine, Recv, Schedule, Send, sparing

__all__ = ["direct_all_gather", "direct_broadcast", "direct_reduce_scatter"]


def direct_reduce_scatter(rank: int, size: int) -> Schedule:
    """Everybody sends rank c its chunk c; rank c folds them in rank order (pairwise exchange).

    One round; each rank sends p-1 messages of n/p bytes, to its right-hand neighbour first, so that
    no rank is everybody's first. With 3 ranks:

        round 0   0 +1+> 1   0 +2+> 2   1 +2+> 2   1 +0+> 0   2 +0+> 0   2 +1+> 1
    """
    if size == 1:
        return
    sends = tuple(Send(peer, peer) for peer in _from_the_right(rank, size))
    yield sends + tuple(Combine(peer, rank) for peer in _from_the_left(rank, size))


def direct_all_gather(rank: int, size: int) -> Schedule:
    """Rank c sends its chunk c to everybody (pairwise exchange).

    One round; each rank sends p-1 messages of n/p bytes. With 3 ranks:

        round 0   0 -0-> 1   0 -0-> 2   1 -1-> 2   1 -1-> 0   2 -2-> 0   2 -2-> 1
    """
    if size == 1:
        return
    sends = tuple(Send(peer, rank) for peer in _from_the_right(rank, size))
    yield sends + tuple(Recv(peer, peer) for peer in _from_the_left(rank, size))


def direct_broadcast(rank: int, size: int) -> Schedule:
    """Rank 0 scatters its p chunks, and the others pass them on (scatter and all-gather).

    Two rounds; rank 0 sends 2(p-1) messages of n/p bytes and the others p-2 (E. Chan et al.:
    Collective communication: theory, practice, and experience, 2007). With 3 ranks:

        round 0   0 -1-> 1   0 -2-> 2
        round 1   0 -0-> 1   0 -0-> 2   1 -1-> 2   2 -2-> 1
    """
    yield from star_scatter(rank, size)
    yield from sparing(direct_all_gather, HUB)(rank, size)


def _from_the_right(rank: int, size: int) -> list[int]:
    return [(rank + k) % size for k in range(1, size)]


def _from_the_left(rank: int, size: int) -> list[int]:
    return [(rank - k) % size for k in range(1, size)]
