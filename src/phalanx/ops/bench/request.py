"""The request of a benchmark, and its ranks' answers: the messages between the processes.

A request is made from the words of a command line, and checked before anything starts.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from phalanx.collectives.schedules import COLLECTIVES
from phalanx.errors import InvalidWorldSizeError, MisuseError
from phalanx.launch.environment import read_environment
from phalanx.ops.bench.operations import (
    EXPANDED,
    MEMORY_KINDS,
    OPERATIONS,
    OPTIMIZERS,
    STEPS,
    TASKS,
)
from phalanx.ops.bench.peaks import Peak, lacks_peaks
from phalanx.ops.bench.peers import MACHINE, PEERS, PeerTable

_SCHEDULES = [name for rows in COLLECTIVES.values() for name in rows]
_ALGORITHMS = ("auto", "all", "fixed", *_SCHEDULES, *STEPS)


class BenchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request, from the options of `phalanx bench` (`cli/bench.py`)."""

    operations: tuple[str, ...]  # names of `OPERATIONS`
    backends: tuple[str, ...]  # names of peers, each once
    sizes: tuple[int, ...]  # bytes of a message, ascending
    rounds: int = 11
    seconds: float = 0.02
    memories: tuple[str, ...]  # names of `MEMORY_KINDS`, for peers that have them
    algorithms: tuple[str, ...]  # of peers that have any; "fixed": each by name, "all": also auto
    threads: int = 1
    timeout: float = 240.0  # seconds that a rank waits for another
    baseline: str = "gloo"
    width: int = 0  # of the layers of a trained model; 0: each operation's own
    optimizer: str = "sgd"  # of a trained model: a name of `OPTIMIZERS`
    beside: int = 0  # busy processes on each host, beside the ranks
    back_to_back: bool = False  # a figure is the median of `MANY_CALLS` or more, not their mean
    peaks: bool = False  # also the peaks of memory. Ranks that are asked for these take no times

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.threads < 1 or not 0 < self.seconds < 60:
            raise MisuseError(
                f"--rounds {self.rounds}, --threads {self.threads}, --seconds {self.seconds:g}: it "
                "takes a round, a thread, and a time of less than a minute"
            )
        if self.beside < 0:
            raise MisuseError(f"--beside {self.beside}: no or some busy processes can be started")
        if self.width < 0:
            raise MisuseError(
                f"--width {self.width}: a layer has one feature at least; 0 is the usual size"
            )

    @property
    def circumstances(self) -> str:
        """Return unusual circumstances, for a title."""
        busy = "" if self.beside == 1 else "es"
        beside = f", beside {self.beside} busy process{busy}" if self.beside else ""
        return beside + (", back to back" if self.back_to_back else "")


def make_request(
    operations: Sequence[str],
    *,
    backends: str,
    sizes: str,
    factor: int = 8,
    memory: str = "ordinary,registered",
    algorithms: str = "auto",
    machine: bool = True,
    tune: bool = False,
    peers: PeerTable = PEERS,
    **others: Any,
) -> BenchRequest:
    """Return the request in the words. `MisuseError` for an unknown one, listing the known ones.

    others   the other fields of a `BenchRequest`

    With `tune` it is the request of a tuning file: every algorithm of Phalanx's own backends, of
    every collective unless some are named. Options that make no sense then are overruled.
    """
    if tune:
        operations = operations or list(COLLECTIVES)
        memory, algorithms, machine = "ordinary", "fixed", False
    named = [part for name in operations for part in EXPANDED.get(name, (name,))]
    _check("operation", named, [*(name for name in OPERATIONS if name != "copy"), *EXPANDED])
    taking_part = _words(backends)
    _check("backend", taking_part, peers)
    memories = _check("kind of memory", _words(memory), MEMORY_KINDS)
    by_name = _check("algorithm", _words(algorithms), _ALGORITHMS)
    if tune:
        taking_part = [name for name in taking_part if peers[name].ours]
        if not taking_part or not set(named) <= COLLECTIVES.keys():
            of = ", ".join(COLLECTIVES)
            raise MisuseError(f"--tune compares the algorithms of {of} on Phalanx's own backends")
    made = BenchRequest(
        operations=tuple(dict.fromkeys(named)),
        backends=tuple(dict.fromkeys([*taking_part, *(MACHINE if machine else ())])),
        sizes=tuple(parse_sizes(sizes, factor)),
        memories=tuple(memories),
        algorithms=tuple(by_name),
        **others,
    )
    _check("backend", [made.baseline], peers)
    _check("optimizer", [made.optimizer], OPTIMIZERS)
    if made.peaks:
        _check_peaks(made)
    return made


def parse_ranks(text: str) -> list[int]:
    """Return `"2,4"` as [2, 4]. `InvalidWorldSizeError` for anything but numbers above one."""
    words = _words(text)
    for word in words:
        if not word.isdigit() or int(word) < 2:
            raise InvalidWorldSizeError(
                f"--ranks {text}: {word!r} is no number of ranks; it takes two or more"
            )
    return [int(word) for word in words]


def _words(text: str) -> list[str]:
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise MisuseError(f"{text!r} names nothing")
    return words


def _check(what: str, words: list[str], known: Iterable[str]) -> list[str]:
    names = list(dict.fromkeys(known))
    for word in words:
        if word not in names:
            raise MisuseError(f"there is no {what} {word!r}; there are: {', '.join(names)}")
    return words


def _check_peaks(request: BenchRequest) -> None:
    """Refuse peaks of memory where they cannot be measured."""
    others = [name for name in request.operations if name not in TASKS]
    if others:
        of = " and ".join(TASKS)
        raise MisuseError(f"--peaks is for training steps, {of}, and not for {', '.join(others)}")
    if read_environment(os.environ) is not None:
        raise MisuseError(
            "--peaks starts processes of its own for each library: run it without a launcher"
        )
    if reason := lacks_peaks():
        raise MisuseError(f"--peaks: {reason}")


# ------------------------------------------------------------------------------
# Sizes of messages, as they are requested and shown: `8..256M`, `8,64K,16M`. K is 1024.

_UNITS = "KMG"
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_sizes(text: str, factor: int = 8) -> list[int]:
    """Return bytes, ascending, each once, from a list of sizes or ranges.

    A range `8..256M` holds its first size, `factor` times that, and so on, and its last.
    `MisuseError` for a part that is neither, a range that falls, and a factor below 2.
    """
    if factor < 2:
        raise MisuseError(f"--factor {factor}: sizes of a range have to grow, by 2 or more")
    sizes: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        size = _parse_size(first)
        end = _parse_size(last) if dots else size
        if end < size:
            raise MisuseError(f"{part!r} falls: write the smaller size first")
        while size < end:
            sizes.add(size)
            size *= factor
        sizes.add(end)
    return sorted(sizes)


def _parse_size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise MisuseError(f"{text!r} is no size of a message: write bytes, as in 8,64K or 8..16M")
    return int(found[1]) << 10 * (1 + _UNITS.find(found[2].upper()) if found[2] else 0)


def show_size(size: int) -> str:
    """Return 65536 as `"64K"`; a number without whole units stays a number of bytes."""
    unit = 0
    while size and unit < len(_UNITS) and size % 1024 == 0:
        size, unit = size >> 10, unit + 1
    return f"{size}{_UNITS[unit - 1] if unit else ''}"


# ------------------------------------------------------------------------------
# The ranks' answers: `Message`s. A text is the progress in words.


class Entry(msgspec.Struct, frozen=True):
    """The subject of a timing: a peer, a kind of memory, and an algorithm if one was requested."""

    peer: str
    memory: str = "ordinary"
    algorithm: str = "auto"

    def __str__(self) -> str:
        memory = self.memory if self.memory != "ordinary" else ""
        algorithm = self.algorithm if self.algorithm != "auto" else ""
        return " ".join(word for word in (self.peer, algorithm, memory) if word)


class ResultLine(msgspec.Struct, kw_only=True, tag="line"):
    """One entry's figures for one size of message."""

    operation: str
    ranks: int
    bytes: int  # of a rank's input or output, the larger; a little more than requested, perhaps
    entry: Entry
    calls: int  # in a round, one after the other
    # Of a call, in each round: the slowest rank's time, divided by the number of calls; back to
    # back, its median call.
    seconds: list[float]
    bus: float  # the factor of the bus bandwidth
    wrong: int | None = 0  # elements, on all ranks, in all rounds; None: results have no meaning
    optimizer: float | None = None  # seconds that it took of a training step, on the slowest rank
    peaks: dict[str, Peak] = {}  # of memory, by names of `peaks.environments()`

    @property
    def median(self) -> float:
        """Seconds of a call in the median round."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Bounds between which half of the rounds lie."""
        seconds = self.seconds if len(self.seconds) > 1 else 2 * self.seconds
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return low, high

    def times(self, other: ResultLine) -> float:
        """Return the ratio of a call's time to the other's: medians, one over the other.

        Rounds of training steps are few and long: each is compared with the other's of the same
        round, under the same load of the machine, and the median of these ratios counts.
        """
        if OPERATIONS[self.operation].training:
            pairs = zip(self.seconds, other.seconds, strict=True)
            return statistics.median(own / others for own, others in pairs)
        return self.median / other.median

    def __str__(self) -> str:
        return f"{self.operation} {show_size(self.bytes)} x {self.ranks} ranks, {self.entry}"


class LeftOut(msgspec.Struct, tag="left out", frozen=True):
    """A requested peer that is not measured; `operation` "": not in any operation."""

    peer: str
    ranks: int
    reason: str
    operation: str = ""


class BackendInfo(msgspec.Struct, tag="backend", frozen=True):
    """The class of a participating backend of Phalanx's own, and each rank's host."""

    peer: str
    backend: str
    hosts: tuple[int, ...]


Message = ResultLine | LeftOut | BackendInfo | Peak | str
