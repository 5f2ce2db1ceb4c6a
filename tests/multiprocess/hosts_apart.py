"""Several ranks on each of several hosts: network namespaces, joined by links of a known rate.

What crosses is read where the kernel counts it, at each host's interface: payload, headers and all.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from networks import Network
from ranks import Job

import phalanx
from phalanx import Backend, TcpBackend
from phalanx.collectives.cost import Choice, choose


class SharedHosts(Network):
    """Hosts with some ranks each, which follow each other: rank r is on host r // ranks.

    megabits   a second, that each host sends at most; None: as fast as it goes
    """

    def __init__(self, hosts: int, ranks: int, *, megabits: int | None = None) -> None:
        super().__init__(hosts)
        self.world_size = hosts * ranks
        self._ranks = ranks
        self._count = hosts
        self._megabits = megabits

    def host(self, number: int) -> str:
        """The host of a rank."""
        return super().host(number // self._ranks)

    def _make(self) -> None:
        super()._make()
        if self._megabits is not None:
            for host in range(self._count):
                # A busy machine looks a few hundred times a second: that much may go at once.
                self.slow_down(host, self._megabits, burst="512k")


class Measured(NamedTuple):
    """What one algorithm took on one rank."""

    seconds: float  # the median of a call
    sent: int  # bytes that left this rank's host in one call


class Report(NamedTuple):
    """What a rank found: of its group, of each algorithm, and what `auto` thinks of them."""

    topology: tuple[int, ...]
    figures: dict[str, Measured]
    choice: Choice


def all_reduces(
    backend: Backend, count: int, algorithms: list[str], rounds: int, megabits: int | None
) -> Report:
    """One rank's part: some calls of each algorithm, of tensors of `count` bytes.

    Rounds of the algorithms are interleaved, and every result is checked.
    """
    torch.set_num_threads(1)
    if megabits is not None:
        between = backend.links.between._replace(bandwidth=megabits * 1e6 / 8)
        backend.links = backend.links._replace(between=between)
    mine = torch.arange(count // 4, dtype=torch.float32) % 1024 + backend.rank
    p = backend.world_size
    due = torch.arange(count // 4, dtype=torch.float32) % 1024 * p + p * (p - 1) / 2
    seconds: dict[str, list[float]] = {name: [] for name in algorithms}
    sent: dict[str, list[int]] = {name: [] for name in algorithms}
    into = torch.empty_like(mine)
    for number in range(rounds + 1):  # the first round warms up
        for name in algorithms:
            backend.barrier()  # all have counted what went before
            before = bytes_out()
            backend.barrier()
            began = perf_counter()
            phalanx.all_reduce(mine, backend, algorithm=name, into=into)
            elapsed = perf_counter() - began
            backend.barrier()
            after = bytes_out()
            if not torch.equal(into, due):
                raise AssertionError(f"{name} summed {count} bytes wrongly")
            if number:
                seconds[name].append(elapsed)
                sent[name].append(after - before)
    figures = {
        name: Measured(statistics.median(seconds[name]), int(statistics.median(sent[name])))
        for name in algorithms
    }
    return Report(backend.topology, figures, choose("all_reduce", count, backend))


def bytes_out() -> int:
    """What has left this process's host so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise OSError("this host has no eth0")


def measure(
    network: SharedHosts,
    count: int,
    algorithms: list[str],
    rounds: int,
    megabits: int | None,
    kind: type[Backend] = TcpBackend,
) -> list[Report]:
    """Run that on every rank of a network; for each what it returned."""
    with Job(network.world_size, network=network, timeout=50.0, kind=kind) as job:
        outcomes = [
            job.start(rank, all_reduces, count, algorithms, rounds, megabits)
            for rank in range(network.world_size)
        ]
        reports = [outcome() for outcome in outcomes]
    failed = [report for how, report in reports if how != "returned"]
    assert not failed, failed[0]
    return [report for _, report in reports]
