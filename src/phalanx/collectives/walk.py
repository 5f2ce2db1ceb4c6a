"""What an algorithm costs where ranks are on several hosts, counted on its schedule.

There are two kinds of links, and all ranks of a host share one way out of it and one way in. So it
depends on who is where: a ring leaves each host once if its ranks follow each other, and p times if
they do not. A round takes

    the latency of its slowest link
    + the messages of the busiest rank * their overhead
    + bytes / bandwidth: of the busiest rank inside its host, or of the busiest host's way out or
      in, whichever takes longer

and an algorithm, its rounds one after the other. All of that grows with the tensor in a straight
line, of which this finds the two numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from phalanx.backends.links import LinkCost, Links
from phalanx.collectives.schedules import Algorithm, Combine, Hosts, Round, Send

LARGE = 64  # ranks; in a larger group not all are looked at
HELD_ASIDE = 1.25  # what a byte costs that is held aside on its arrival and folded afterwards


class Pace(NamedTuple):
    """How long a collective takes: `fixed + per_byte * bytes` seconds."""

    fixed: float
    per_byte: float

    def seconds(self, count: int) -> float:
        """For a tensor of `count` bytes."""
        return self.fixed + self.per_byte * count


class _Traffic:
    """What comes and goes in one round, of one rank or one host."""

    def __init__(self) -> None:
        self.out = self.in_ = 0.0

    def seconds(self, link: LinkCost) -> float:
        moved = max(self.out, self.in_) if link.duplex else self.out + self.in_
        return moved / link.bandwidth


def walk(row: Algorithm, hosts: Hosts, links: Links, *, share: float | None = None) -> Pace:
    """The pace of an algorithm for ranks on these hosts.

    share   of the tensor that a chunk is; by default, one of all chunks

    In a large group it looks at the ranks of four hosts: the largest, the smallest, that of rank 0,
    which has most to do in a tree or a star, and that of the last, where a chain ends.
    """
    size = len(hosts)
    part = share or 1 / row.chunks(size)
    seen = _ranks_to_look_at(hosts)
    fixed = per_byte = 0.0
    for ranks in zip(*(row.schedule(rank, size) for rank in seen), strict=True):
        once, each = _round(dict(zip(seen, ranks, strict=True)), hosts, links)
        fixed += once
        per_byte += each * part
    return Pace(fixed, per_byte)


def _ranks_to_look_at(hosts: Hosts) -> list[int]:
    ranks = range(len(hosts))
    if len(hosts) <= LARGE:
        return list(ranks)
    counts = Counter(hosts)
    largest, smallest = (find(counts, key=counts.__getitem__) for find in (max, min))
    return [rank for rank in ranks if hosts[rank] in (largest, smallest, hosts[0], hosts[-1])]


def _round(ranks: Mapping[int, Round], hosts: Hosts, links: Links) -> tuple[float, float]:
    """Seconds of one round, of which `ranks` is what each rank does; and for each byte of a chunk.

    Who sends while its peer does, too, finds what came when it looks: half the time it need not be
    woken. A peer that is not looked at is taken to do as the rank does.
    """
    latency = busiest = inside = 0.0
    crossing = {hosts[rank]: _Traffic() for rank in ranks}
    for rank, steps in ranks.items():
        here, work, own = hosts[rank], 0.0, _Traffic()
        held = _held_aside(steps)
        both_ways = len({isinstance(step, Send) for step in steps}) == 2
        for step in steps:
            link = links.inside if hosts[step.peer] == here else links.between
            traffic = own if hosts[step.peer] == here else crossing[here]
            work += link.overhead
            if isinstance(step, Send):
                traffic.out += step.count
            else:
                traffic.in_ += step.count * (HELD_ASIDE if held and traffic is own else 1)
            if not isinstance(step, Send) or step.peer not in ranks:
                latency = max(latency, link.latency / 2 if both_ways else link.latency)
        busiest, inside = max(busiest, work), max(inside, own.seconds(links.inside))
    between = max(traffic.seconds(links.between) for traffic in crossing.values())
    return latency + busiest, max(inside, between)


def _held_aside(steps: Round) -> bool:
    chunks = [step.chunk for step in steps if isinstance(step, Combine)]
    return len(set(chunks)) < len(chunks)
