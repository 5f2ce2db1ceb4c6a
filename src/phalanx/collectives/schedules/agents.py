"""Who acts for whom where ranks are on several hosts: each chunk has an owner, and its agents.

A chunk's owner is on one host. On every other host one rank is its agent there: the chunks that a
host does not own are dealt to its ranks in order, to all about equally many. So the chunks for
which a rank acts follow each other, but for its host's own between them. With ranks 0, 1, 2 on one
host and 3, 4 on the other, for the chunk that is owned by rank

                   0   1   2   3   4
    acts on A      0   1   2   0   1      host A: ranks 0 1 2
    acts on B      3   3   4   3   4      host B: ranks 3 4

Ranks of a host need not follow each other, and hosts need not have equally many.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TypeAlias

__all__ = ["Agents", "Hosts", "runs"]

Hosts: TypeAlias = Sequence[int]  # for each rank the number of its host; any numbers will do
Run: TypeAlias = tuple[int, int]  # (chunk, count)


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
        here, others = self.ranks_on[host], len(self.owners) - len(self._owned[host])
        chunks: dict[int, list[int]] = {rank: [] for rank in here}
        place = 0
        for chunk, owner in enumerate(self.owners):
            if self.hosts[owner] == host:
                chunks[owner].append(chunk)
            else:
                chunks[here[place * len(here) // others]].append(chunk)
                place += 1
        return {rank: list(runs(numbers)) for rank, numbers in chunks.items()}

    def several_on_a_host(self) -> bool:
        """Whether any host has more than one rank."""
        return len(self.ranks_on) < len(self.hosts)

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
