"""All to all: rank s has something of its own for every rank d.

The message from s to d is chunk p*s + d of a tensor that no rank ever has as a whole: rank r begins
with row r of the table below and ends with column r. Its own chunk, on the diagonal, stays.

              to 0   to 1   to 2
    from 0      0      1      2
    from 1      3      4      5
    from 2      6      7      8

Every rank sends and receives (p-1)/p of its tensor, which is the least there is. Either all pairs
exchange at once, or one after the other, so that no rank hears from more than one at a time.

    R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in
    MPICH. International Journal of High Performance Computing Applications 19 (2005).
"""

from __future__ import annotations

from .steps import Recv, Round, Schedule, Send

__all__ = ["direct_all_to_all", "pairwise_all_to_all"]


def direct_all_to_all(rank: int, size: int) -> Schedule:
    """All pairs exchange at once: one round.

    Each rank sends to its right-hand neighbour first, so that no rank is everybody's first.
    With 3 ranks:

        round 0   0 -1-> 1   0 -2-> 2   1 -5-> 2   1 -3-> 0   2 -6-> 0   2 -7-> 1
    """
    if size == 1:
        return
    exchanges = [_exchange(rank, size, k) for k in range(1, size)]
    yield tuple(send for send, _ in exchanges) + tuple(receive for _, receive in exchanges)


def pairwise_all_to_all(rank: int, size: int) -> Schedule:
    """In round k everybody sends to the k-th rank on the right: p-1 rounds (ibid.).

    With 3 ranks:

        round 0   0 -1-> 1   1 -5-> 2   2 -6-> 0
        round 1   0 -2-> 2   1 -3-> 0   2 -7-> 1
    """
    for k in range(1, size):
        yield _exchange(rank, size, k)


def _exchange(rank: int, size: int, k: int) -> Round:
    right, left = (rank + k) % size, (rank - k) % size
    return Send(right, rank * size + right), Recv(left, left * size + rank)
