"""Recursive halving and doubling, for any number of ranks: log2 p rounds, and the ring's bytes.

q = 2^floor(log2 p) ranks do the work, the core; r = p - q are too many. So the first 2r ranks pair
up, (0, 1), (2, 3), ...: the even one hands its contribution to the odd one, which acts for both.
The core is numbered anew, 0..q-1, so that the chunks for which a new rank acts are contiguous, and
so are those of any run of new ranks. With p = 6 ranks, q = 4 and r = 2:

    rank        0    1    2    3    4    5
    new rank    .    0    .    1    2    3
    acts for    .   0:2   .   2:4  4:5  5:6     chunks, as Python writes ranges

Halving: new ranks j and j ^ q/2 exchange halves of the tensor, then j and j ^ q/4 quarters of it,
and so on, until each holds its own chunks, reduced. Doubling is the same backwards, with chunks
that are complete. If p = 2^k, an all-reduce takes 2 log2 p rounds and sends 2(p-1)/p * n bytes from
every rank, as few as the ring. Otherwise the pairs add two rounds, and their ranks send more.

    R. Rabenseifner: Optimization of collective reduction operations. ICCS 2004.
    R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in
    MPICH. International Journal of High Performance Computing Applications 19 (2005).
"""

from __future__ import annotations

from phalanx.collectives.schedules.steps import Recv, Run, Schedule, Send, backwards, sparing, then
from phalanx.collectives.schedules.tree import tree_scatter


def halving_reduce(rank: int, size: int) -> Schedule:
    """New rank j ends with its chunks reduced, after log2 q rounds of halving (Rabenseifner 2004).

    Before them, where there are pairs, the even rank hands its whole tensor to the odd one.
    With 6 ranks:

        round 0   0 +0:6+> 1                2 +0:6+> 3
        round 1                1 +4:6+> 4                3 +4:6+> 5   4 +0:4+> 1   5 +0:4+> 3
        round 2                1 +2:4+> 3                3 +0:2+> 1   4 +5+> 5     5 +4+> 4
    """
    yield from backwards(doubling_all_gather)(rank, size)


def halving_spread(rank: int, size: int) -> Schedule:
    """Odd ranks of pairs hand over the chunk of the even ones: chunk c is on rank c.

    After `halving_reduce` it makes a reduce-scatter. With 6 ranks:

        round 0   1 -0-> 0   3 -2-> 2
    """
    yield from _hand_over(rank, size, [_even_chunk(rank)])


def doubling_collect(rank: int, size: int) -> Schedule:
    """Even ranks of pairs hand their chunk to the odd ones: new rank j holds its chunks.

    The inverse of `halving_spread`; before doubling it makes an all-gather. With 6 ranks:

        round 0   0 -0-> 1   2 -2-> 3
    """
    yield from backwards(halving_spread, take=Recv)(rank, size)


def doubling_all_gather(rank: int, size: int) -> Schedule:
    """From new rank j holding its chunks to all chunks everywhere (Thakur et al. 2005).

    After log2 q rounds of doubling, the odd rank of a pair hands the whole tensor to the even one.
    After `halving_reduce` it makes an all-reduce. With 6 ranks:

        round 0   1 -0:2-> 3   3 -2:4-> 1   4 -4-> 5     5 -5-> 4
        round 1   1 -0:4-> 4   3 -0:4-> 5   4 -4:6-> 1   5 -4:6-> 3
        round 2   1 -0:6-> 0   3 -0:6-> 2
    """
    yield from _doubling(rank, size)
    yield from _hand_over(rank, size, [(0, size)])


def halving_doubling_all_gather(rank: int, size: int) -> Schedule:
    """From chunk c on rank c to all chunks everywhere: collect, double, hand over (ibid.).

    The even rank of a pair has its own chunk already and gets the others: every rank receives p-1
    chunks, which is the least there is. With 5 ranks:

        round 0   0 -0-> 1
        round 1                1 -0:2-> 2   2 -2-> 1     3 -3-> 4     4 -4-> 3
        round 2                1 -0:3-> 3   2 -0:3-> 4   3 -3:5-> 1   4 -3:5-> 2
        round 3                1 -1:5-> 0
    """
    yield from doubling_collect(rank, size)
    yield from _doubling(rank, size)
    even, _ = _even_chunk(rank)
    others = [(first, count) for first, count in ((0, even), (even + 1, size - even - 1)) if count]
    yield from _hand_over(rank, size, others)


def halving_doubling_broadcast(rank: int, size: int) -> Schedule:
    """Rank 0 scatters its chunks down a tree, and the others gather them (ibid.).

    With 4 ranks:

        round 0   0 -2:4-> 2
        round 1   0 -1-> 1                  2 -3-> 3
        round 2   0 -0-> 1                  2 -2-> 3     3 -3-> 2
        round 3   0 -0:2-> 2   1 -0:2-> 3                3 -2:4-> 1
    """
    yield from then(tree_scatter, sparing(halving_doubling_all_gather, 0))(rank, size)


def core_chunks(rank: int, size: int) -> range:
    """The chunks for which a rank acts in the core: none for the even rank of a pair."""
    _, r = _core(size)
    j = _new_rank(rank, r)
    return range(0) if j is None else range(_first_chunk(j, r), _first_chunk(j + 1, r))


def _doubling(rank: int, size: int) -> Schedule:
    q, r = _core(size)
    j = _new_rank(rank, r)
    for d in [1 << k for k in range(q.bit_length() - 1)]:
        if j is None:
            yield ()
        else:
            peer = _real_rank(j ^ d, r)
            yield Send(peer, *_block(j, d, r)), Recv(peer, *_block(j ^ d, d, r))


def _hand_over(rank: int, size: int, runs: list[Run]) -> Schedule:
    """One round, if there are pairs: the odd rank of each hands `runs` to the even one."""
    _, r = _core(size)
    if r > 0:
        take = Send if rank % 2 else Recv
        yield tuple(take(rank ^ 1, *run) for run in runs) if rank < 2 * r else ()


def _core(size: int) -> tuple[int, int]:
    """The size q of the core, and the number r of pairs."""
    q = 1 << (size.bit_length() - 1)
    return q, size - q


def _new_rank(rank: int, r: int) -> int | None:
    if rank >= 2 * r:
        return rank - r
    return rank // 2 if rank % 2 else None


def _real_rank(j: int, r: int) -> int:
    return 2 * j + 1 if j < r else j + r


def _first_chunk(j: int, r: int) -> int:
    return j + min(j, r)


def _block(j: int, d: int, r: int) -> Run:
    """The chunks of the d new ranks around j: [j', j' + d) with j' the multiple of d below j."""
    first = _first_chunk(j - j % d, r)
    return first, _first_chunk(j - j % d + d, r) - first


def _even_chunk(rank: int) -> Run:
    """The chunk of the even rank of the pair to which `rank` belongs."""
    return rank - rank % 2, 1
