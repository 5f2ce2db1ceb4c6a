"""The binomial tree under rank 0: ceil(log2 p) rounds, for small tensors.

A rank's parent is the rank without its lowest bit. In rounds of distance d, ranks that are odd
multiples of d talk to the parent d below them; the subtree of such a rank v is [v, v + d), cut off
at p. The tree of 8 ranks:

    0
    |-- 1
    |-- 2
    |   `-- 3
    `-- 4
        |-- 5
        `-- 6
            `-- 7

Reducing and gathering go up, d = 1, 2, 4, ...; broadcasting and scattering go down the same edges
in the opposite order.

    R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in
    MPICH. International Journal of High Performance Computing Applications 19 (2005).

`count` is the number of chunks, from chunk 0 on, that move as a whole.
"""

from __future__ import annotations

from phalanx.collectives.schedules.steps import Combine, Recv, Schedule, Send

__all__ = ["tree_broadcast", "tree_gather", "tree_reduce", "tree_scatter"]


def tree_reduce(rank: int, size: int, *, count: int = 1) -> Schedule:
    """Everybody's chunks are reduced on rank 0 in ceil(log2 p) rounds (binomial tree).

    With 8 ranks:

        round 0   1 +0+> 0              3 +0+> 2              5 +0+> 4              7 +0+> 6
        round 1              2 +0+> 0                                    6 +0+> 4
        round 2                                    4 +0+> 0
    """
    for d in _upwards(size):
        if _is_child(rank, d):
            yield (Send(rank - d, 0, count),)
        elif _is_parent(rank, size, d):
            yield (Combine(rank + d, 0, count),)
        else:
            yield ()


def tree_broadcast(rank: int, size: int, *, count: int = 1) -> Schedule:
    """Rank 0's chunks go to everybody in ceil(log2 p) rounds (binomial tree).

    With 8 ranks:

        round 0   0 -0-> 4
        round 1   0 -0-> 2              4 -0-> 6
        round 2   0 -0-> 1   2 -0-> 3   4 -0-> 5   6 -0-> 7
    """
    for d in _downwards(size):
        if _is_child(rank, d):
            yield (Recv(rank - d, 0, count),)
        elif _is_parent(rank, size, d):
            yield (Send(rank + d, 0, count),)
        else:
            yield ()


def tree_scatter(rank: int, size: int) -> Schedule:
    """Chunk c, of rank 0's p chunks, goes to rank c in ceil(log2 p) rounds (binomial tree).

    The chunks of a subtree go to its head as one message; rank 0 sends (p-1)/p * n bytes.
    With 6 ranks:

        round 0   0 -4:6-> 4
        round 1   0 -2:4-> 2
        round 2   0 -1-> 1     2 -3-> 3     4 -5-> 5
    """
    for d in _downwards(size):
        if _is_child(rank, d):
            yield (Recv(rank - d, rank, _subtree(rank, size, d)),)
        elif _is_parent(rank, size, d):
            yield (Send(rank + d, rank + d, _subtree(rank + d, size, d)),)
        else:
            yield ()


def tree_gather(rank: int, size: int) -> Schedule:
    """Chunk c, of rank c, goes to rank 0 in ceil(log2 p) rounds: the inverse of `tree_scatter`.

    With 6 ranks:

        round 0   1 -1-> 0                  3 -3-> 2                  5 -5-> 4
        round 1                2 -2:4-> 0
        round 2                                          4 -4:6-> 0
    """
    for d in _upwards(size):
        if _is_child(rank, d):
            yield (Send(rank - d, rank, _subtree(rank, size, d)),)
        elif _is_parent(rank, size, d):
            yield (Recv(rank + d, rank + d, _subtree(rank + d, size, d)),)
        else:
            yield ()


def _upwards(size: int) -> list[int]:
    """The distances 1, 2, 4, ... below `size`: ceil(log2(size)) of them."""
    return [1 << k for k in range((size - 1).bit_length())]


def _downwards(size: int) -> list[int]:
    return _upwards(size)[::-1]


def _is_child(rank: int, d: int) -> bool:
    return rank % (2 * d) == d


def _is_parent(rank: int, size: int, d: int) -> bool:
    return rank % (2 * d) == 0 and rank + d < size


def _subtree(head: int, size: int, d: int) -> int:
    """The number of ranks in [head, head + d), cut off at `size`."""
    return min(d, size - head)
