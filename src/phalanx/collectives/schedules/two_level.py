"""Two levels: the ranks of a host work together first, so that each host sends its data once.

The ranks of a host share its network interface. A direct exchange of all p ranks sends every rank's
tensor through it; here a host's ranks first reduce tensors among themselves, and hand around those
that come in. The traffic between hosts is cut into a chunk for each rank, which goes to one rank on
each other host, its agent there: in as many streams as a host has ranks.

    all-reduce of n bytes, 2 hosts of 2 ranks        crosses from each host

    1. inside    0 <-> 1     2 <-> 3                                        reduce-scatter
    2. between   0 <-> 2     1 <-> 3                 n/2                    reduce-scatter
    3. between   0 <-> 2     1 <-> 3                 n/2                    all-gather
    4. inside    0 <-> 1     2 <-> 3                                        all-gather

With h hosts of equally many ranks, 2(h-1)/h * n bytes leave each for an all-reduce: the ring's, as
if each host were one rank. Each level is a direct exchange: one round, and sums in rank order. All
on one host, or one on each host, it is the direct exchange itself.

A reduction is a spread, run backwards: the receiver of a chunk sends it, and its sender reduces it.

    N. Karonis et al.: Exploiting hierarchy in parallel computer networks to optimize collective
    operation performance. IPDPS 2000.
    J. L. Träff, S. Hunold: Decomposing MPI collectives for exploiting multi-lane communication.
    IEEE CLUSTER 2020.

`hosts` is for each rank the number of its host; without it all are on one. Letters: n bytes, p
ranks, h hosts, k of the p ranks on a host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeAlias

from phalanx.collectives.schedules.steps import Recv, Run, Schedule, Send, Step, backwards, sparing

ROOT = 0


# ---------------------------------------------------------------------------- chunk c is of rank c


def two_level_reduce_scatter(rank: int, size: int, *, hosts: Hosts | None = None) -> Schedule:
    """Chunk c ends, reduced, on rank c: inside each host, then between hosts.

    (p-k)/p * n bytes leave each host: what its ranks do not own, once.
    With 3 ranks on hosts 0 0 1:

        round 0   0 +1+> 1   1 +0+> 0   1 +2+> 0
        round 1   0 +2+> 2                         2 +0+> 0   2 +1+> 1
    """
    yield from backwards(partial(two_level_all_gather, hosts=hosts))(rank, size)


def two_level_all_gather(rank: int, size: int, *, hosts: Hosts | None = None) -> Schedule:
    """Chunk c starts on rank c and ends on every rank: between hosts, then inside each.

    k(h-1)/p * n bytes leave each host: what its ranks own, once for each other host.
    With 3 ranks on hosts 0 0 1:

        round 0   0 -0-> 2              1 -1-> 2   2 -2-> 0
        round 1   0 -0-> 1   0 -2-> 1   1 -1-> 0
    """
    agents = Agents(hosts or (0,) * size, range(size))
    yield from _to_agents(rank, agents)
    yield from _inside(rank, agents)


# -------------------------------------------------------------- chunks are numbered by their places


def two_level_combine(rank: int, size: int, *, hosts: Hosts | None = None) -> Schedule:
    """The first half of an all-reduce: a reduce-scatter whose chunks are numbered by their places.

    The chunks for which a rank acts follow each other, and are one message. With 4 ranks on hosts
    0 0 1 1:

        round 0   0 +2:4+> 1   1 +0:2+> 0   2 +2:4+> 3   3 +0:2+> 2
        round 1   0 +1+> 2     1 +3+> 3     2 +0+> 0     3 +2+> 1
    """
    yield from backwards(partial(two_level_share, hosts=hosts))(rank, size)


def two_level_share(rank: int, size: int, *, hosts: Hosts | None = None) -> Schedule:
    """The second half of an all-reduce: an all-gather of these chunks.

    With 4 ranks on hosts 0 0 1 1:

        round 0   0 -0-> 2     1 -2-> 3     2 -1-> 0     3 -3-> 1
        round 1   0 -0:2-> 1   1 -2:4-> 0   2 -0:2-> 3   3 -2:4-> 2
    """
    agents = _by_place(hosts, size)
    yield from _to_agents(rank, agents)
    yield from _inside(rank, agents)


# ------------------------------------------------------------------------------------- with a root


def two_level_broadcast(rank: int, size: int, *, hosts: Hosts | None = None) -> Schedule:
    """Rank 0's tensor leaves its host once: in chunks that the ranks on the other hosts own.

    The root scatters the chunks inside its host, from where each goes to its owner; the owners'
    hosts exchange them; each host hands them around. n bytes leave the root's host, and each other
    one sends what its ranks own once to each of the h-2 others. With 4 ranks on hosts 0 0 1 1:

        round 0   0 -1-> 1
        round 1   0 -0-> 2   1 -1-> 3
        round 2   0 -0-> 1              2 -0-> 3   3 -1-> 2
    """
    agents = _away_from_root(hosts, size)
    yield from _scatter(rank, agents)
    yield from sparing(lambda rank, size: _deliver(rank, agents), ROOT)(rank, size)


def two_level_reduce(rank: int, size: int, *, hosts: Hosts | None = None) -> Schedule:
    """The broadcast backwards, until its chunks are complete on agents on the root's host.

    n bytes leave each host but the root's, once, and none leaves that.
    With 4 ranks on hosts 0 0 1 1:

        round 0   0 +1+> 1   1 +0+> 0   2 +1+> 3   3 +0+> 2
        round 1                         2 +0+> 0   3 +1+> 1
    """
    agents = _away_from_root(hosts, size)
    yield from backwards(lambda rank, size: _deliver(rank, agents))(rank, size)


def two_level_collect(rank: int, size: int, *, hosts: Hosts | None = None) -> Schedule:
    """The chunks that are complete on the root's host go to the root. The end of a reduction.

    With 4 ranks on hosts 0 0 1 1:

        round 0   1 -1-> 0
    """
    agents = _away_from_root(hosts, size)
    yield from backwards(lambda rank, size: _scatter(rank, agents), take=Recv)(rank, size)


# -------------------------------------------------------------- how many chunks, and who owns them


def chunks_by_place(rank: int, size: int, *, hosts: Hosts | None = None) -> range:
    """The chunk of a rank in `two_level_combine` and `two_level_share`."""
    chunk = _by_place(hosts, size).owners.index(rank)
    return range(chunk, chunk + 1)


def chunks_away(size: int, *, hosts: Hosts | None = None) -> int:
    """Return the number of chunks of a tensor with a root."""
    return len(_away_from_root(hosts, size).owners)


def chunks_at_root(rank: int, size: int, *, hosts: Hosts | None = None) -> range:
    """All chunks, on the root."""
    return range(chunks_away(size, hosts=hosts)) if rank == ROOT else range(0)


def chunks_collected(rank: int, size: int, *, hosts: Hosts | None = None) -> range:
    """The chunks that `two_level_reduce` completes on this rank: none away from the root's host."""
    agents = _away_from_root(hosts, size)
    whole = agents.chunks_of(agents.hosts[ROOT]).get(rank)  # one run: they follow each other there
    return _each(whole[0]) if whole else range(0)


# ------------------------------------------------------------------------------------- the rounds


def _to_agents(rank: int, agents: Agents, *, but: int | None = None) -> Schedule:
    """Owners send their chunks to the agents on all hosts `but` one: on the next host first."""
    here, hosts = agents.hosts[rank], list(agents.ranks_on)
    if len(hosts) - (but is not None) < 2:
        return
    if here == but:
        yield ()
        return
    acts_for = [(agents.owners[c], c) for run in agents.chunks_of(here)[rank] for c in _each(run)]
    others = [host for host in _circle(hosts, here) if host != but]
    mine = [chunk for owner, chunk in acts_for if owner == rank]
    sends = [(agents.agent(chunk, host), chunk) for host in others for chunk in mine]
    receives = [(owner, chunk) for owner, chunk in acts_for if owner != rank]
    yield *_messages(Send, sends), *_messages(Recv, receives)


def _inside(rank: int, agents: Agents) -> Schedule:
    """Each rank sends the chunks for which it acts to all others of its host."""
    if len(agents.ranks_on) == len(agents.hosts):  # one rank on each
        return
    chunks = agents.chunks_of(agents.hosts[rank])
    peers = _circle(list(chunks), rank)
    sends = [Send(peer, *run) for peer in peers for run in chunks[rank]]
    yield *sends, *(Recv(peer, *run) for peer in reversed(peers) for run in chunks[peer])


def _scatter(rank: int, agents: Agents) -> Schedule:
    """The root sends each rank of its host the chunks for which that acts."""
    chunks = agents.chunks_of(agents.hosts[ROOT])
    if len(chunks) == 1:
        return
    if rank == ROOT:
        yield tuple(
            Send(peer, *run) for peer in _circle(list(chunks), ROOT) for run in chunks[peer]
        )
    else:
        yield tuple(Recv(ROOT, *run) for run in chunks.get(rank, ()))


def _deliver(rank: int, agents: Agents) -> Schedule:
    """From agents on the root's host to the owners, to their agents, and to everybody."""
    home = agents.hosts[ROOT]
    if len(agents.ranks_on) > 1:
        pairs = [(agents.agent(chunk, home), owner) for chunk, owner in enumerate(agents.owners)]
        sends = [(owner, chunk) for chunk, (agent, owner) in enumerate(pairs) if agent == rank]
        receives = [(agent, chunk) for chunk, (agent, owner) in enumerate(pairs) if owner == rank]
        yield *_messages(Send, sends), *_messages(Recv, receives)
        yield from _to_agents(rank, agents, but=home)
    yield from _inside(rank, agents)


def _each(run: Run) -> range:
    return range(run[0], sum(run))


def _messages(take: type[Send] | type[Recv], pairs: list[tuple[int, int]]) -> list[Step]:
    """One for each run of chunks of a peer; `pairs` are (peer, chunk)."""
    chunks: dict[int, list[int]] = {}
    for peer, chunk in pairs:
        chunks.setdefault(peer, []).append(chunk)
    return [take(peer, *run) for peer, numbers in chunks.items() for run in runs(numbers)]


def _away_from_root(hosts: Hosts | None, size: int) -> Agents:
    """Chunks for the ranks on other hosts than the root's; on one host, for all.

    Enough that every rank of the root's host has some to hand on.
    """
    placed = hosts or (0,) * size
    ranks = Agents.by_place(placed)
    owners = [rank for rank in ranks if placed[rank] != placed[ROOT]] or ranks
    at_home = list(placed).count(placed[ROOT])
    return Agents(placed, [rank for rank in owners for _ in range(-(-at_home // len(owners)))])


def _by_place(hosts: Hosts | None, size: int) -> Agents:
    placed = hosts or (0,) * size
    return Agents(placed, Agents.by_place(placed))


def _circle(numbers: list[int], own: int) -> list[int]:
    """All but one's own, from the next one on, so that nobody is everybody's first."""
    place = numbers.index(own)
    return numbers[place + 1 :] + numbers[:place]


# ------------------------------------------------------------------------------
# Who acts for whom where ranks are on several hosts: each chunk has an owner, and its agents.
#
# A chunk's owner is on one host. On every other host one rank is its agent there: the chunks that a
# host does not own are dealt to its ranks in order, to all about equally many. So the chunks for
# which a rank acts follow each other, but for its host's own between them. With ranks 0, 1, 2 on
# one host and 3, 4 on the other, for the chunk that is owned by rank
#
#                    0   1   2   3   4
#     acts on A      0   1   2   0   1      host A: ranks 0 1 2
#     acts on B      3   3   4   3   4      host B: ranks 3 4
#
# Ranks of a host need not follow each other, and hosts need not have equally many.

Hosts: TypeAlias = Sequence[int]  # for each rank the number of its host; any numbers will do


class Agents:
    """The owners and agents of all chunks.

    hosts    for each rank the number of its host
    owners   for each chunk its owner
    """

    def __init__(self, hosts: Hosts, owners: Sequence[int]) -> None:
        self.hosts = hosts
        self.owners = owners
        self.ranks_on = _ranks_on(hosts)
        self._owned: dict[int, list[int]] = {host: [] for host in self.ranks_on}  # chunks
        for chunk, owner in enumerate(owners):
            self._owned[hosts[owner]].append(chunk)

    def agent(self, chunk: int, host: int) -> int:
        """The rank that acts for this chunk on a host; on its owner's host, that is the owner."""
        owner = self.owners[chunk]
        if self.hosts[owner] == host:
            return owner
        here, owned = self.ranks_on[host], self._owned[host]
        place = chunk - bisect_left(owned, chunk)  # among those that are not owned here
        return here[place * len(here) // (len(self.owners) - len(owned))]

    def chunks_of(self, host: int) -> dict[int, list[Run]]:
        """For each rank of a host the chunks for which it acts, as runs; each host has them all."""
        chunks: dict[int, list[int]] = {rank: [] for rank in self.ranks_on[host]}
        for chunk in range(len(self.owners)):
            chunks[self.agent(chunk, host)].append(chunk)
        return {rank: list(runs(numbers)) for rank, numbers in chunks.items()}

    @staticmethod
    def by_place(hosts: Hosts) -> list[int]:
        """All ranks, those first that are first on their host: as owners of chunks 0, 1, 2, ...

        So a rank's own chunk lies among those for which it acts: on equal hosts all are one run.
        """
        places = {
            rank: (place + 0.5) / len(ranks)
            for ranks in _ranks_on(hosts).values()
            for place, rank in enumerate(ranks)
        }
        return sorted(range(len(hosts)), key=places.__getitem__)


def _ranks_on(hosts: Hosts) -> dict[int, list[int]]:
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return ranks


def runs(numbers: Sequence[int]) -> Iterator[Run]:
    """[0, 1, 2, 5, 6] -> (0, 3), (5, 2)."""
    begin = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[begin], i - begin
            begin = i
