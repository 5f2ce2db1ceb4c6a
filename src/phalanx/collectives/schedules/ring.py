"""The ring: every rank talks to its two neighbours only, and every link is busy all the time.

An all-reduce is two trips around the ring. On the first, the partial sum of each chunk travels from
rank to rank and takes up a contribution at every stop, until it is complete on the last; on the
second, the complete chunks go around. With contributions a, b, c of ranks 0, 1, 2, this is what
stands in the three chunks of each rank, at the start and after each round:

             start         round 0       round 1       round 2       round 3
    rank 0   a   a   a     a   ac  a     abc ac  a     abc ac  abc   abc abc abc
    rank 1   b   b   b     b   b   ab    b   abc ab    abc abc ab    abc abc abc
    rank 2   c   c   c     bc  c   c     bc  c   abc   bc  abc abc   abc abc abc

Each rank sends and receives 2(p-1)/p * n bytes, which is the least there is, in 2(p-1) rounds: the
algorithm for large tensors.

    P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations.
    Journal of Parallel and Distributed Computing 69 (2009).
"""

from __future__ import annotations

from .steps import Combine, Recv, Schedule, Send

__all__ = ["ring_all_gather", "ring_broadcast", "ring_reduce_scatter"]


def ring_reduce_scatter(rank: int, size: int) -> Schedule:
    """Chunk c ends, reduced, on rank c after p-1 rounds of n/p bytes (Patarasuk & Yuan 2009).

    With 4 ranks:

        round 0   0 +3+> 1   1 +0+> 2   2 +1+> 3   3 +2+> 0
        round 1   0 +2+> 1   1 +3+> 2   2 +0+> 3   3 +1+> 0
        round 2   0 +1+> 1   1 +2+> 2   2 +3+> 3   3 +0+> 0
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        yield Send(right, (rank - k - 1) % size), Combine(left, (rank - k - 2) % size)


def ring_all_gather(rank: int, size: int) -> Schedule:
    """Chunk c starts on rank c and ends on every rank after p-1 rounds of n/p bytes (ibid.).

    With 4 ranks:

        round 0   0 -0-> 1   1 -1-> 2   2 -2-> 3   3 -3-> 0
        round 1   0 -3-> 1   1 -0-> 2   2 -1-> 3   3 -2-> 0
        round 2   0 -2-> 1   1 -3-> 2   2 -0-> 3   3 -1-> 0
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        yield Send(right, (rank - k) % size), Recv(left, (rank - k - 1) % size)


def ring_broadcast(rank: int, size: int) -> Schedule:
    """Rank 0's p chunks go down the chain 0 -> 1 -> ... -> p-1, one after the other.

    Chunk k enters the chain in round k and reaches rank r in round k + r - 1: 2(p-1) rounds of n/p
    bytes. No rank sends more than n bytes, and the last sends none (P. Patarasuk, A. Faraj, X.
    Yuan: Pipelined broadcast on Ethernet switched clusters, IPDPS 2006).

    With 4 ranks:

        round 0   0 -0-> 1
        round 1   0 -1-> 1   1 -0-> 2
        round 2   0 -2-> 1   1 -1-> 2   2 -0-> 3
        round 3   0 -3-> 1   1 -2-> 2   2 -1-> 3
        round 4              1 -3-> 2   2 -2-> 3
        round 5                         2 -3-> 3
    """
    for k in range(2 * (size - 1)):
        incoming, outgoing = k - rank + 1, k - rank
        steps: list[Send | Recv] = []
        if rank + 1 < size and 0 <= outgoing < size:
            steps.append(Send(rank + 1, outgoing))
        if rank > 0 and 0 <= incoming < size:
            steps.append(Recv(rank - 1, incoming))
        yield tuple(steps)
