"""Star, direct, ring and pairwise: algorithms whose messages do not depend on powers of two.

The star: rank 0 is the hub, and every other rank exchanges messages with the hub only. This is the
shape of a parameter server, and it takes one round. The hub carries all traffic, p-1 times the
tensor, and reduces in rank order: for tensors of a few bytes and groups of a few ranks.

    M. Li et al.: Scaling distributed machine learning with the parameter server. OSDI 2014.

`count` is the number of chunks, from chunk 0 on, that move as a whole.
"""

from __future__ import annotations

from functools import partial

from phalanx.collectives.schedules.steps import Combine, Recv, Schedule, Send, backwards, sparing

HUB = 0


def star_reduce(rank: int, size: int, *, count: int = 1) -> Schedule:
    """Everybody's chunks are reduced on the hub, in rank order, in one round.

    With 4 ranks:

        round 0   1 +0+> 0   2 +0+> 0   3 +0+> 0
    """
    yield from backwards(partial(star_broadcast, count=count))(rank, size)


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
    yield from backwards(star_scatter, take=Recv)(rank, size)


# ------------------------------------------------------------------------------
# Direct: every rank exchanges messages with every other at once, and reduces its own chunk.
#
# The bytes of the ring, 2(p-1)/p * n for an all-reduce, in two rounds instead of 2(p-1): for ranks
# with a fast path between any two of them, as in shared memory. It is the pairwise exchange of
# Thakur, Rabenseifner & Gropp (2005) with all its steps in one round. Chunks are reduced in rank
# order, whatever the order in which they come: the same contributions give the same bits.
#
#     R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in
#     MPICH. International Journal of High Performance Computing Applications 19 (2005).


def direct_reduce_scatter(rank: int, size: int) -> Schedule:
    """Everybody sends rank c its chunk c; rank c reduces them in rank order (pairwise exchange).

    One round; each rank sends p-1 messages of n/p bytes, to its right-hand neighbour first, so that
    no rank is everybody's first. With 3 ranks:

        round 0   0 +1+> 1   0 +2+> 2   1 +2+> 2   1 +0+> 0   2 +0+> 0   2 +1+> 1
    """
    if size == 1:
        return
    right = [(rank + k) % size for k in range(1, size)]
    yield *(Send(to, to) for to in right), *(Combine(peer, rank) for peer in reversed(right))


def direct_all_gather(rank: int, size: int) -> Schedule:
    """Rank c sends its chunk c to everybody (pairwise exchange).

    One round; each rank sends p-1 messages of n/p bytes. With 3 ranks:

        round 0   0 -0-> 1   0 -0-> 2   1 -1-> 2   1 -1-> 0   2 -2-> 0   2 -2-> 1
    """
    if size == 1:
        return
    right = [(rank + k) % size for k in range(1, size)]
    yield *(Send(to, rank) for to in right), *(Recv(peer, peer) for peer in reversed(right))


def direct_broadcast(rank: int, size: int) -> Schedule:
    """Rank 0 scatters its p chunks, and the others pass them on (scatter and all-gather).

    Two rounds; rank 0 sends 2(p-1) messages of n/p bytes and the others p-2 (E. Chan et al.:
    Collective communication: theory, practice, and experience, 2007). With 3 ranks:

        round 0   0 -1-> 1   0 -2-> 2
        round 1   0 -0-> 1   0 -0-> 2   1 -1-> 2   2 -2-> 1
    """
    yield from star_scatter(rank, size)
    yield from sparing(direct_all_gather, HUB)(rank, size)


# ------------------------------------------------------------------------------
# The ring: every rank talks to its two neighbours only, and every link is busy all the time.
#
# An all-reduce is two trips around the ring. On the first, the partial sum of each chunk travels
# from rank to rank and takes up a contribution at every stop, until it is complete on the last; on
# the second, the complete chunks go around. With contributions a, b, c of ranks 0, 1, 2, this is
# what stands in the three chunks of each rank, at the start and after each round:
#
#              start         round 0       round 1       round 2       round 3
#     rank 0   a   a   a     a   ac  a     abc ac  a     abc ac  abc   abc abc abc
#     rank 1   b   b   b     b   b   ab    b   abc ab    abc abc ab    abc abc abc
#     rank 2   c   c   c     bc  c   c     bc  c   abc   bc  abc abc   abc abc abc
#
# Each rank sends and receives 2(p-1)/p * n bytes, which is the least there is, in 2(p-1) rounds:
# the algorithm for large tensors.
#
#     P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations.
#     Journal of Parallel and Distributed Computing 69 (2009).


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


# ------------------------------------------------------------------------------
# All to all: rank s has something of its own for every rank d.
#
# The message from s to d is chunk p*s + d of a tensor that no rank ever has as a whole: rank r
# begins with row r of the table below and ends with column r. Its own chunk, on the diagonal,
# stays.
#
#               to 0   to 1   to 2
#     from 0      0      1      2
#     from 1      3      4      5
#     from 2      6      7      8
#
# Every rank sends and receives (p-1)/p of its tensor, which is the least there is. Either all pairs
# exchange at once, or one after the other, so that no rank hears from more than one at a time
# (Thakur, Rabenseifner & Gropp 2005).


def direct_all_to_all(rank: int, size: int) -> Schedule:
    """All pairs exchange at once: one round.

    Each rank sends to its right-hand neighbour first, so that no rank is everybody's first.
    With 3 ranks:

        round 0   0 -1-> 1   0 -2-> 2   1 -5-> 2   1 -3-> 0   2 -6-> 0   2 -7-> 1
    """
    if size == 1:
        return
    sends, receives = zip(*pairwise_all_to_all(rank, size), strict=True)
    yield sends + receives


def pairwise_all_to_all(rank: int, size: int) -> Schedule:
    """In round k everybody sends to the k-th rank on the right: p-1 rounds (ibid.).

    With 3 ranks:

        round 0   0 -1-> 1   1 -5-> 2   2 -6-> 0
        round 1   0 -2-> 2   1 -3-> 0   2 -7-> 1
    """
    for k in range(1, size):
        right, left = (rank + k) % size, (rank - k) % size
        yield Send(right, rank * size + right), Recv(left, left * size + rank)
