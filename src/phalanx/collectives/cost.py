"""The cost of each algorithm, and the choice of `auto`.

The model is Hockney's (1994) with a cost for each message that a rank has to handle, since a
Python program feels those:

    seconds = rounds * latency + messages * overhead + bytes / bandwidth

counted along the critical path, for p ranks and n bytes (Thakur, Rabenseifner & Gropp 2005, table
1). Algorithms in whose rounds ranks send and receive at the same time handle two messages a round;
if a byte costs processor time on both sides, as inside a host, they also move two for one. That is
a formula for each algorithm on one host. On several hosts the place of each rank matters, and the
same is counted on the schedules (`Pace`).

Every rank computes the same choice, from numbers that are the same on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

from phalanx.collectives.schedules import (
    COLLECTIVES,
    Algorithm,
    Combine,
    Hosts,
    Round,
    Send,
    row_for,
)
from phalanx.collectives.tuning import measured, remembered
from phalanx.core.backend import Backend
from phalanx.core.transport import LinkCost, Links


class CriticalPath(NamedTuple):
    """The rounds, messages and bytes on the critical path of one collective."""

    rounds: float
    messages: float  # in one direction
    bytes: float  # in one direction
    both_ways: bool = True  # ranks send and receive in the same round
    total: float = 0.0  # of a one-way algorithm, the bytes that all ranks send, if that is more


Formula = Callable[[int, float], CriticalPath]


class Choice(NamedTuple):
    """The algorithm that `auto` picked, and why: the estimated seconds of each."""

    algorithm: str
    estimates: Mapping[str, float]
    tuning: str = ""  # the hash of the file that says what was measured, if one does

    def __str__(self) -> str:
        ordered = sorted(self.estimates.items(), key=lambda item: item[1])
        listed = ", ".join(f"{name} {seconds * 1e6:,.0f} us" for name, seconds in ordered)
        how = f"measured (tuning {self.tuning})" if self.tuning else "estimated"
        return f"{self.algorithm}: {how} {listed}"


# To reduce from staging memory, when all of it is there, costs so much more than to reduce
# contributions while they arrive.
_FOLDED = 1.125


def _folded(p: int, n: float) -> float:
    """Return the cost of n bytes of contributions that all ranks send at once, staged if p > 2."""
    return n * (_FOLDED if p > 2 else 1)


# With few processors, a rank that works alone on a whole tensor leaves one of them idle at times.
_ALONE = 1.02


def _log(p: int) -> int:
    return (p - 1).bit_length()


def _one_way(rounds: float, messages: float, bytes: float, total: float = 0.0) -> CriticalPath:
    return CriticalPath(rounds, messages, bytes, both_ways=False, total=total)


# Halving and doubling: q ranks in the core; those outside hand everything in, and get it back.


def _halving_doubling(p: int, n: float) -> CriticalPath:
    rounds = p.bit_length() - 1
    q, extra = 1 << rounds, 2 if 1 << rounds != p else 0
    return CriticalPath(2 * rounds + extra, 2 * rounds + extra, 2 * n * (q - 1) / q + extra * n)


def _doubling(p: int, n: float, handed: float | None = None) -> CriticalPath:
    """handed   the bytes that ranks outside the core hand over; by default n"""
    rounds = p.bit_length() - 1
    q, extra = 1 << rounds, 1 << rounds != p
    moved = n * (q - 1) / q + extra * (n if handed is None else handed)
    return CriticalPath(rounds + 2 * extra, rounds + 2 * extra, moved)


def _halving(p: int, n: float) -> CriticalPath:
    return _doubling(p, n, n * (1 + 1 / p))


def _and_tree(path: CriticalPath, p: int, n: float) -> CriticalPath:
    """Besides, a tree scatters or gathers the chunks."""
    rounds, messages, moved, *_ = path
    return CriticalPath(rounds + _log(p), messages + _log(p), moved + n * (p - 1) / p)


_ONE_ROOT: Mapping[str, Formula] = {
    "tree": lambda p, n: _one_way(_log(p), _log(p), n * (p - 1) / p),
    "star": lambda p, n: _one_way(1, p - 1, n * (p - 1) / p),
}
FORMULAS: Mapping[str, Mapping[str, Formula]] = {
    "all_reduce": {
        "ring": lambda p, n: CriticalPath(2 * (p - 1), 2 * (p - 1), 2 * n * (p - 1) / p),
        "direct": lambda p, n: CriticalPath(2, 2 * (p - 1), (n + _folded(p, n)) * (p - 1) / p),
        "tree": lambda p, n: _one_way(
            2 * _log(p), 2 * _log(p), 2 * n * _log(p), total=2 * n * (p - 1)
        ),
        "halving_doubling": _halving_doubling,
        "star": lambda p, n: _one_way(2, 2 * (p - 1), _FOLDED * 2 * n * (p - 1)),
        "two_level": lambda p, n: CriticalPath(2, 2 * (p - 1), _FOLDED * 2 * n * (p - 1) / p),
    },
    "reduce_scatter": {
        "ring": lambda p, n: CriticalPath(p - 1, p - 1, n * (p - 1) / p),
        "direct": lambda p, n: CriticalPath(1, p - 1, _folded(p, n) * (p - 1) / p),
        "tree": lambda p, n: _one_way(2 * _log(p), 2 * _log(p), n * _log(p) + n * (p - 1) / p),
        "halving_doubling": _halving,
        "star": lambda p, n: _one_way(2, 2 * (p - 1), n * (p - 1) * (_FOLDED + 1 / p)),
        "two_level": lambda p, n: CriticalPath(1, p - 1, _FOLDED * n * (p - 1) / p),
    },
    "all_gather": {
        "ring": lambda p, n: CriticalPath(p - 1, p - 1, n * (p - 1) / p),
        "direct": lambda p, n: CriticalPath(1, p - 1, n * (p - 1) / p),
        "tree": lambda p, n: _one_way(2 * _log(p), 2 * _log(p), n * _log(p) + n * (p - 1) / p),
        "halving_doubling": _doubling,
        "star": lambda p, n: _one_way(2, 2 * (p - 1), n * (p - 1) * (1 + 1 / p)),
        "two_level": lambda p, n: CriticalPath(1, p - 1, n * (p - 1) / p),
    },
    "broadcast": {
        "ring": lambda p, n: CriticalPath(2 * p - 2, 2 * p - 2, n * (2 * p - 2) / p),
        "direct": lambda p, n: CriticalPath(2, 2 * p - 2, n * 2 * (p - 1) / p),
        "tree": lambda p, n: _one_way(_log(p), _log(p), n * _log(p), total=n * (p - 1)),
        "halving_doubling": lambda p, n: _and_tree(_doubling(p, n), p, n),
        "star": lambda p, n: _one_way(1, p - 1, n * (p - 1)),
        "two_level": lambda p, n: CriticalPath(2, 2 * p - 2, n * 2 * (p - 1) / p),
    },
    "reduce": {
        "ring": lambda p, n: CriticalPath(p, 2 * (p - 1), 2 * n * (p - 1) / p),
        "direct": lambda p, n: CriticalPath(2, 2 * (p - 1), (n + _folded(p, n)) * (p - 1) / p),
        "tree": lambda p, n: _one_way(_log(p), _log(p), n * _log(p), total=n * (p - 1)),
        "halving_doubling": lambda p, n: _and_tree(_halving(p, n), p, n),
        "star": lambda p, n: _one_way(1, p - 1, _FOLDED * n * (p - 1)),
        "two_level": lambda p, n: CriticalPath(2, 2 * (p - 1), (_FOLDED + 1) * n * (p - 1) / p),
    },
    "gather": _ONE_ROOT,
    "scatter": _ONE_ROOT,
    "all_to_all": {
        "direct": lambda p, n: CriticalPath(1, p - 1, n * (p - 1) / p),
        "pairwise": lambda p, n: CriticalPath(p - 1, p - 1, n * (p - 1) / p),
    },
}


def seconds(work: CriticalPath, link: LinkCost, ranks: int = 1, processors: float = inf) -> float:
    """Return the seconds on such links, if so many ranks share so many processors.

    With a processor for each rank only the critical path counts. With fewer, ranks that all have
    work at the same time wait for each other, and are woken in every round. Ranks of a tree are
    idle most of the time, and leave the processors to the others.
    """
    crowd = ranks / processors
    if not work.both_ways:
        moved = max(work.bytes, 2 * work.total / processors)  # either side takes a processor
        if crowd > 1:
            moved *= _ALONE
        return work.rounds * link.latency + work.messages * link.overhead + moved / link.bandwidth
    moved = work.bytes if link.duplex else 2 * work.bytes
    busy = 2 * work.messages * link.overhead + moved / link.bandwidth
    if crowd > 1:
        return crowd * (work.rounds * link.latency + busy)
    # Ranks that send at the same time find the message when they poll: about every second one
    # need not be woken.
    return work.rounds * link.latency / 2 + busy


def choose(collective: str, count: int, backend: Backend) -> Choice:
    """Choose the cheapest algorithm for a tensor of `count` bytes in this group.

    The root, if there is one, is taken to be rank 0: so every rank chooses the same.
    """

    def estimate() -> Choice:
        hosts, links, tuning = backend.topology, backend.links, ""
        known = measured(collective, count, backend)
        if known is not None:
            times, tuning = known
        elif len(set(hosts)) == 1:
            size = len(hosts)
            times = {
                name: seconds(formula(size, count), links.inside, size, links.processors)
                for name, formula in FORMULAS[collective].items()
            }
        else:
            paces = remembered(backend, ("paces", collective), lambda: _paces(collective, backend))
            times = {name: pace.seconds(count) for name, pace in paces.items()}
        return Choice(min(times, key=times.__getitem__), times, tuning)

    return remembered(backend, (collective, count), estimate)


def _paces(collective: str, backend: Backend) -> dict[str, Pace]:
    """Return each algorithm's cost in a group on several hosts."""
    hosts = backend.topology
    share = 1 / len(hosts) if collective == "all_to_all" else None
    return {
        name: walk(row_for(collective, name, hosts), hosts, backend.links, share=share)
        for name in COLLECTIVES[collective]
    }


# ------------------------------------------------------------------------------
# What an algorithm costs where ranks are on several hosts, counted on its schedule.
#
# There are two kinds of links, and all ranks of a host share its bandwidth out and in. So the order
# of ranks matters: a ring leaves each host once if its ranks are consecutive, and up to p times if
# they are not. A round takes
#
#     the latency of its slowest link
#     + the messages of the busiest rank * their overhead
#     + bytes / bandwidth: the longer of the busiest rank's inside, and the busiest host's out or in
#
# and an algorithm takes the sum of its rounds: a constant and a time for each byte, found here.

LARGE = 64  # ranks; of a larger group not all are looked at
HELD_ASIDE = 1.25  # cost of a byte that is staged on arrival and reduced afterwards


class Pace(NamedTuple):
    """The time of a collective: `fixed + per_byte * bytes` seconds."""

    fixed: float
    per_byte: float

    def seconds(self, count: int) -> float:
        """Return the seconds for a tensor of `count` bytes."""
        return self.fixed + self.per_byte * count


def walk(
    row: Algorithm, hosts: Hosts, links: Links, *, share: float | None = None, large: int = LARGE
) -> Pace:
    """Return the pace of an algorithm for ranks on these hosts.

    share   of the tensor that a chunk is; by default, one of all chunks
    large   of more ranks it looks at those of four hosts: the largest, the smallest, that of rank
            0, which has most to do in a tree or a star, and that of the last, the end of a chain
    """
    size, seen = len(hosts), list(range(len(hosts)))
    if size > large:
        counts = Counter(hosts)
        largest, smallest = (find(counts, key=counts.__getitem__) for find in (max, min))
        looked_at = (largest, smallest, hosts[0], hosts[-1])
        seen = [rank for rank in seen if hosts[rank] in looked_at]
    part = share or 1 / row.chunks(size)
    fixed = per_byte = 0.0
    for ranks in zip(*(row.schedule(rank, size) for rank in seen), strict=True):
        once, each = _round(dict(zip(seen, ranks, strict=True)), hosts, links)
        fixed += once
        per_byte += each * part
    return Pace(fixed, per_byte)


def _round(ranks: Mapping[int, Round], hosts: Hosts, links: Links) -> tuple[float, float]:
    """Return the seconds of a round, of the steps in `ranks`, and those for each byte of a chunk.

    A rank that sends while its peer does, too, finds the message when it looks: half the time it
    need not be woken. A peer that is not looked at is taken to do as the rank does.
    """
    latency = busiest = inside = 0.0
    crossing = {hosts[rank]: [0.0, 0.0] for rank in ranks}  # chunks out of, and into, each host
    for rank, steps in ranks.items():
        here, work, own = hosts[rank], 0.0, [0.0, 0.0]
        combined = [step.chunk for step in steps if isinstance(step, Combine)]
        staged = HELD_ASIDE if len(set(combined)) < len(combined) else 1
        both_ways = len({isinstance(step, Send) for step in steps}) == 2
        for step in steps:
            is_here, sends = hosts[step.peer] == here, isinstance(step, Send)
            link = links.inside if is_here else links.between
            traffic = own if is_here else crossing[here]
            if sends:
                traffic[0] += step.count
            else:
                traffic[1] += step.count * (staged if is_here else 1)
            work += link.overhead
            if not sends or step.peer not in ranks:
                latency = max(latency, link.latency / 2 if both_ways else link.latency)
        busiest, inside = max(busiest, work), max(inside, _moved(own, links.inside))
    between = max(_moved(traffic, links.between) for traffic in crossing.values())
    return latency + busiest, max(inside, between)


def _moved(traffic: list[float], link: LinkCost) -> float:
    """Return the seconds for so many bytes out and in."""
    return (max(traffic) if link.duplex else sum(traffic)) / link.bandwidth
