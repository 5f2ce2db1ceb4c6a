"""Who acts for whom where ranks are on several hosts: each chunk has an owner, and its agents.

A chunk's owner is on one host. On every other host one rank is its agent there: the one at the
same place, in proportion, so that all ranks of a host act for about as many chunks. With ranks 0,
1, 2 on one host and 3, 4 on the other, for the chunk that is owned by rank

                   0   1   2   3   4
    acts on A      0   1   2   0   2      host A: ranks 0 1 2
    acts on B      3   4   4   3   4      host B: ranks 3 4

Ranks of a host need not follow each other, and hosts need not have equally many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

__all__ = ["Agents", "Hosts"]

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
        self.ranks_on: dict[int, list[int]] = {}
        self._places: list[int] = []  # for each rank, how many of its host come before it
        for rank, host in enumerate(hosts):
            neighbours = self.ranks_on.setdefault(host, [])
            self._places.append(len(neighbours))
            neighbours.append(rank)

    def agent(self, chunk: int, host: int) -> int:
        """The rank that acts for this chunk on a host; on its owner's host, that is the owner."""
        owner = self.owners[chunk]
        at_home, here = len(self.ranks_on[self.hosts[owner]]), self.ranks_on[host]
        # Place j of k is the part of the host from j/k to (j+1)/k: whoever has its middle.
        return here[(2 * self._places[owner] + 1) * len(here) // (2 * at_home)]

    def chunks_of(self, host: int) -> dict[int, list[Run]]:
        """For each rank of a host the chunks for which it acts, as runs; each host has them all."""
        chunks: dict[int, list[int]] = {rank: [] for rank in self.ranks_on[host]}
        for chunk in range(len(self.owners)):
            chunks[self.agent(chunk, host)].append(chunk)
        return {rank: list(_runs(numbers)) for rank, numbers in chunks.items()}

    def several_on_a_host(self) -> bool:
        """Whether any host has more than one rank."""
        return len(self.ranks_on) < len(self.hosts)

    @staticmethod
    def by_place(hosts: Hosts) -> list[int]:
        """The ranks, those first that are first on their host: as owners of chunks 0, 1, 2, ...

        In this order the chunks for which a rank acts follow each other, on whatever host.
        """
        all_ = Agents(hosts, ())

        def place(rank: int) -> float:
            return (2 * all_._places[rank] + 1) / (2 * len(all_.ranks_on[hosts[rank]]))

        return sorted(range(len(hosts)), key=place)


def _runs(numbers: Sequence[int]) -> Iterator[Run]:
    """[0, 1, 2, 5, 6] -> (0, 3), (5, 2)."""
    begin = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[begin], i - begin
            begin = i
