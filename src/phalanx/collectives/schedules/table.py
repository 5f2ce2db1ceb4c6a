"""The table of algorithms: for each collective, one row per algorithm.

A row has two phases. In the first, contributions are combined; after it, every chunk is complete
on exactly one rank, its owner (which divides it, once, if the reduction is a mean). In the second,
complete chunks are passed on, and nothing is combined any more.

Ranks are as the schedules number them: where a collective has a root, that is rank 0 here, and
`for_root` turns a phase so that another rank plays it. The rows of `two_level` are for one host as
they stand here; `row_for` gives the row for others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from phalanx.collectives.schedules.halving_doubling import (
    core_chunks,
    doubling_all_gather,
    halving_doubling_all_gather,
    halving_doubling_broadcast,
    halving_reduce,
    halving_spread,
)
from phalanx.collectives.schedules.linear import (
    direct_all_gather,
    direct_all_to_all,
    direct_broadcast,
    direct_reduce_scatter,
    pairwise_all_to_all,
    ring_all_gather,
    ring_broadcast,
    ring_reduce_scatter,
    star_broadcast,
    star_gather,
    star_reduce,
    star_scatter,
)
from phalanx.collectives.schedules.steps import Schedule, ScheduleFunction, rooted, then, turned
from phalanx.collectives.schedules.tree import (
    tree_broadcast,
    tree_gather,
    tree_reduce,
    tree_scatter,
)
from phalanx.collectives.schedules.two_level import (
    Hosts,
    chunks_at_root,
    chunks_away,
    chunks_by_place,
    chunks_collected,
    two_level_all_gather,
    two_level_broadcast,
    two_level_collect,
    two_level_combine,
    two_level_reduce,
    two_level_reduce_scatter,
    two_level_share,
)
from phalanx.errors import InvalidRankError, InvalidWorldSizeError


@dataclass(frozen=True)
class Algorithm:
    """One way to do one collective."""

    name: str
    chunks: Callable[[int], int]
    """size -> the number of chunks into which the tensor is cut."""
    reduce: ScheduleFunction | None
    """Phase 1: contributions are combined. None: there is nothing to combine."""
    owned: Callable[[int, int], range]
    """(rank, size) -> the chunks that are complete on this rank, and its own, after phase 1."""
    spread: ScheduleFunction | None
    """Phase 2: complete chunks are passed on. None: they are where they belong."""
    placed: bool = False
    """Whether the functions also take `hosts=`; else it is the same on all hosts."""

    def at_once(self, size: int) -> bool:
        """Return whether all contributions to a chunk meet in one round, reduced in rank order."""
        return self.reduce is not None and (size == 2 or self.name in ("direct", "star"))

    def schedule(self, rank: int, size: int) -> Schedule:
        """Both phases, one after the other."""
        for phase in (self.reduce, self.spread):
            if phase is not None:
                yield from phase(rank, size)


_two_level = partial(Algorithm, "two_level", placed=True)


def _whole(move: Callable[..., Schedule]) -> ScheduleFunction:
    """`move` for all p chunks of a tensor that is cut into p."""
    return lambda rank, size: move(rank, size, count=size)


# For the table: how many chunks, ...


def _1(size: int) -> int:
    return 1


def _p(size: int, *, hosts: Hosts | None = None) -> int:
    return size


def _pp(size: int) -> int:
    return size * size


# ... and which are owned by a rank: its own, its row of p * p; the only one, or all, by the root.


def _own(rank: int, size: int, *, hosts: Hosts | None = None) -> range:
    return range(rank, rank + 1)


def _row(rank: int, size: int) -> range:
    return range(rank * size, (rank + 1) * size)


def _root_1(rank: int, size: int) -> range:
    return range(1) if rank == 0 else range(0)


def _root(rank: int, size: int) -> range:
    return range(size) if rank == 0 else range(0)


def _rows(*rows: Algorithm) -> Mapping[str, Algorithm]:
    return MappingProxyType({row.name: row for row in rows})


# fmt: off
COLLECTIVES: Mapping[str, Mapping[str, Algorithm]] = MappingProxyType({
    #             name                cut  reduce                 owned        spread
    "all_reduce": _rows(
        Algorithm("ring",             _p,  ring_reduce_scatter,   _own,        ring_all_gather),
        Algorithm("direct",           _p,  direct_reduce_scatter, _own,        direct_all_gather),
        Algorithm("tree",             _1,  tree_reduce,           _root_1,     tree_broadcast),
        Algorithm("halving_doubling", _p,  halving_reduce,        core_chunks, doubling_all_gather),
        Algorithm("star",             _1,  star_reduce,           _root_1,     star_broadcast),
        _two_level(_p, two_level_combine, chunks_by_place, two_level_share),
    ),
    "reduce_scatter": _rows(
        Algorithm("ring",             _p,  ring_reduce_scatter,   _own,        None),
        Algorithm("direct",           _p,  direct_reduce_scatter, _own,        None),
        Algorithm("tree",             _p,  _whole(tree_reduce),   _root,       tree_scatter),
        Algorithm("halving_doubling", _p,  halving_reduce,        core_chunks, halving_spread),
        Algorithm("star",             _p,  _whole(star_reduce),   _root,       star_scatter),
        _two_level(_p, two_level_reduce_scatter, _own, None),
    ),
    "all_gather": _rows(
        Algorithm("ring",             _p,  None, _own, ring_all_gather),
        Algorithm("direct",           _p,  None, _own, direct_all_gather),
        Algorithm("tree",             _p,  None, _own, then(tree_gather, _whole(tree_broadcast))),
        Algorithm("halving_doubling", _p,  None, _own, halving_doubling_all_gather),
        Algorithm("star",             _p,  None, _own, then(star_gather, _whole(star_broadcast))),
        _two_level(_p, None, _own, two_level_all_gather),
    ),
    "broadcast": _rows(
        Algorithm("ring",             _p,  None, _root,   ring_broadcast),
        Algorithm("direct",           _p,  None, _root,   direct_broadcast),
        Algorithm("tree",             _1,  None, _root_1, tree_broadcast),
        Algorithm("halving_doubling", _p,  None, _root,   halving_doubling_broadcast),
        Algorithm("star",             _1,  None, _root_1, star_broadcast),
        _two_level(chunks_away, None, chunks_at_root, two_level_broadcast),
    ),
    "reduce": _rows(
        Algorithm("ring",             _p,  ring_reduce_scatter,   _own,        star_gather),
        Algorithm("direct",           _p,  direct_reduce_scatter, _own,        star_gather),
        Algorithm("tree",             _1,  tree_reduce,           _root_1,     None),
        Algorithm("halving_doubling", _p,  halving_reduce,        core_chunks,
                                                              then(halving_spread, tree_gather)),
        Algorithm("star",             _1,  star_reduce,           _root_1,     None),
        _two_level(chunks_away, two_level_reduce, chunks_collected, two_level_collect),
    ),
    "gather": _rows(
        Algorithm("tree",             _p,  None, _own,  tree_gather),
        Algorithm("star",             _p,  None, _own,  star_gather),
    ),
    "scatter": _rows(
        Algorithm("tree",             _p,  None, _root, tree_scatter),
        Algorithm("star",             _p,  None, _root, star_scatter),
    ),
    "all_to_all": _rows(
        Algorithm("direct",           _pp, None, _row,  direct_all_to_all),
        Algorithm("pairwise",         _pp, None, _row,  pairwise_all_to_all),
    ),
})
"""Collective -> name of the algorithm -> its row."""
# fmt: on


REDUCING = frozenset(
    name for name, rows in COLLECTIVES.items() if any(row.reduce for row in rows.values())
)
"""The collectives that combine contributions."""

Turn: TypeAlias = Callable[[ScheduleFunction, int], ScheduleFunction]

ROOTED: Mapping[str, Turn] = MappingProxyType(
    {"broadcast": rooted, "reduce": rooted, "gather": turned, "scatter": turned}
)
"""The collectives that have a root, and how their schedules are made for one that is not rank 0."""


def for_root(collective: str, phase: ScheduleFunction, root: int) -> ScheduleFunction:
    """A phase of this collective for a root other than rank 0; without a root it stays as it is."""
    return ROOTED[collective](phase, root) if collective in ROOTED and root else phase


def _unknown(kind: str, name: str, known: Mapping[str, object]) -> str:
    return f"there is no {kind} {name!r}: it is one of {', '.join(known)}"


def row_for(
    collective: str, algorithm: str, hosts: Hosts | None = None, root: int = 0
) -> Algorithm:
    """The row of an algorithm for ranks on these hosts, with `root` as the schedules' rank 0.

    hosts   for each rank the number of its host; None: all are on one
    """
    if collective not in COLLECTIVES:
        raise ValueError(_unknown("collective", collective, COLLECTIVES))
    if algorithm not in COLLECTIVES[collective]:
        raise ValueError(_unknown("algorithm", algorithm, COLLECTIVES[collective]))
    row = COLLECTIVES[collective][algorithm]
    if hosts is None or not row.placed:
        return row
    there = {"hosts": (*hosts[root:], *hosts[:root])}
    return replace(
        row,
        chunks=partial(row.chunks, **there),
        reduce=row.reduce and partial(row.reduce, **there),
        owned=partial(row.owned, **there),
        spread=row.spread and partial(row.spread, **there),
    )


def schedule(
    collective: str,
    algorithm: str,
    rank: int,
    size: int,
    root: int = 0,
    hosts: Hosts | None = None,
) -> Schedule:
    """Return the rounds of `rank` of `size` in a collective, both phases; `root` if it has one.

    hosts   for each rank the number of its host; None: all are on one

    Raises ValueError for a name that the table has not, for a rank or root outside 0..size-1, for
    a root where the collective has none, and unless there is a host for each rank.
    """
    if size < 1:
        raise InvalidWorldSizeError(f"a world has 1 rank or more, not {size}", op=collective)
    for which, number in (("rank", rank), ("root", root)):
        if not 0 <= number < size:
            message = f"{which} {number} is not one of the {size} ranks 0..{size - 1}"
            raise InvalidRankError(message, peer=number, op=collective)
    if hosts is not None and len(hosts) != size:
        raise ValueError(f"hosts names the hosts of {len(hosts)} ranks, and there are {size}")
    row = row_for(collective, algorithm, hosts, root)
    if root != 0 and collective not in ROOTED:
        raise InvalidRankError(f"{collective} has no root, but root={root} was given", peer=root)
    return for_root(collective, row.schedule, root)(rank, size)
