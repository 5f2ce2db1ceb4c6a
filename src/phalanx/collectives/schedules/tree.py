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

Reducing and gathering go up, d = 1, 2, 4, ...; broadcasting and scattering go down again.

    R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in
    MPICH. International Journal of High Performance Computing Applications 19 (2005).

`count` is the number of chunks, from chunk 0 on, that move as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from phalanx.collectives.schedules.steps import Recv, Run, Schedule, Send, backwards


def tree_reduce(rank: int, size: int, *, count: int = 1) -> Schedule:
    """Everybody's chunks are reduced on rank 0 in ceil(log2 p) rounds (binomial tree).

    With 8 ranks:

        round 0   1 +0+> 0              3 +0+> 2              5 +0+> 4              7 +0+> 6
        round 1              2 +0+> 0                                    6 +0+> 4
        round 2                                    4 +0+> 0
    """
    yield from backwards(partial(tree_broadcast, count=count))(rank, size)


def tree_broadcast(rank: int, size: int, *, count: int = 1) -> Schedule:
    """Rank 0's chunks go to everybody in ceil(log2 p) rounds (binomial tree).

    With 8 ranks:

        round 0   0 -0-> 4
        round 1   0 -0-> 2              4 -0-> 6
        round 2   0 -0-> 1   2 -0-> 3   4 -0-> 5   6 -0-> 7
    """
    yield from _down(rank, size, lambda head, d: (0, count))


def tree_scatter(rank: int, size: int) -> Schedule:
    """Chunk c, of rank 0's p chunks, goes to rank c in ceil(log2 p) rounds (binomial tree).

    The chunks of a subtree go to its head as one message; rank 0 sends (p-1)/p * n bytes.
    With 6 ranks:

        round 0   0 -4:6-> 4
        round 1   0 -2:4-> 2
        round 2   0 -1-> 1     2 -3-> 3     4 -5-> 5
    """
    yield from _down(rank, size, lambda head, d: (head, min(d, size - head)))


def tree_gather(rank: int, size: int) -> Schedule:
    """Chunk c, of rank c, goes to rank 0 in ceil(log2 p) rounds: the inverse of `tree_scatter`.

    With 6 ranks:

        round 0   1 -1-> 0                  3 -3-> 2                  5 -5-> 4
        round 1                2 -2:4-> 0
        round 2                                          4 -4:6-> 0
    """
    yield from backwards(tree_scatter, take=Recv)(rank, size)


def _down(rank: int, size: int, run: Callable[[int, int], Run]) -> Schedule:
    """Down the tree, the longest edges first; run(v, d): the chunks for the subtree [v, v + d)."""
    for d in reversed([1 << k for k in range((size - 1).bit_length())]):
        if rank % (2 * d) == d:
            yield (Recv(rank - d, *run(rank, d)),)
        elif rank % (2 * d) == 0 and rank + d < size:
            yield (Send(rank + d, *run(rank + d, d)),)
        else:
            yield ()
