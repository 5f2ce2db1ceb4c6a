"""What is requested of a benchmark: from the words of a command line, checked before it starts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from phalanx.collectives.schedules import COLLECTIVES
from phalanx.errors import InvalidWorldSizeError, MisuseError
from phalanx.tools.bench.operations import EXPANDED, MEMORY_KINDS, OPERATIONS
from phalanx.tools.bench.peers import MACHINE, PEERS, PeerTable

TIME, PEAK = "time", "peak"
"""What can be measured."""

_ALGORITHMS = ("auto", "all", "fixed", *(name for rows in COLLECTIVES.values() for name in rows))


class BenchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    operations  names of `OPERATIONS`
    backends    names of peers, each once
    sizes       bytes of a message, ascending
    rounds      that count
    seconds     that a round of small messages should take, for each entry
    memories    names of `MEMORY_KINDS`, for peers that have them
    algorithms  by name, for peers that have any; "fixed" is each of them, "all" `auto`, too
    threads     of torch in each rank
    timeout     seconds that a rank waits for another
    baseline    the name of the peer that the others are compared with
    width       of the layers of what is trained; 0: each operation's own
    measure     "time"; "peak" of memory, where an operation has one of interest
    steps       of training whose peak of memory is measured
    gives_back  what is freed goes back to the system at once (see `peak.py`)
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


def make_request(
    operations: Sequence[str],
    *,
    backends: str,
    sizes: str,
    factor: int = 8,
    rounds: int = 11,
    seconds: float = 0.02,
    memory: str = "ordinary,registered",
    algorithms: str = "auto",
    machine: bool = True,
    threads: int = 1,
    baseline: str = "gloo",
    width: int = 0,
    measure: str = "time,peak",
    steps: int = 10,
    peers: PeerTable = PEERS,
) -> BenchRequest:
    """What the words mean. `MisuseError` for one that means nothing here, listing what there is."""
    named = [part for name in operations for part in EXPANDED.get(name, (name,))]
    _check("operation", named, [*(name for name in OPERATIONS if name != "copy"), *EXPANDED])
    taking_part = _words(backends)
    _check("backend", [*taking_part, baseline], peers)
    if machine:
        taking_part += MACHINE
    memories, figures, by_name = _words(memory), _words(measure), _words(algorithms)
    _check("kind of memory", memories, MEMORY_KINDS)
    _check("algorithm", by_name, _ALGORITHMS)
    _check("figure", figures, (TIME, PEAK))
    if rounds < 1 or threads < 1 or not 0 < seconds < 60:
        raise MisuseError(
            f"--rounds {rounds}, --threads {threads}, --seconds {seconds:g}: it takes a round, a "
            "thread, and a time of less than a minute"
        )
    if figures == [PEAK] and not any(OPERATIONS[name].peak for name in named):
        with_peak = ", ".join(name for name, row in OPERATIONS.items() if row.peak)
        raise MisuseError(
            f"--measure {measure}: the peak of memory is measured of {with_peak} alone"
        )
    if steps < 1:
        raise MisuseError(f"--steps {steps}: there is no peak of memory without a step")
    if width < 0:
        raise MisuseError(f"--width {width}: a layer has one feature at least; 0 is the usual size")
    return BenchRequest(
        operations=tuple(dict.fromkeys(named)),
        backends=tuple(dict.fromkeys(taking_part)),
        sizes=tuple(parse_sizes(sizes, factor)),
        rounds=rounds,
        seconds=seconds,
        memories=tuple(memories),
        algorithms=tuple(by_name),
        threads=threads,
        baseline=baseline,
        width=width,
        measure=tuple(figures),
        steps=steps,
    )


def make_tuning_request(operations: Sequence[str], **options: Any) -> BenchRequest:
    """What to measure so that `auto` can pick by it: every algorithm of Phalanx's own backends.

    Options as for `make_request`; those that make no sense here are overruled.
    """
    options |= {"memory": "ordinary", "algorithms": "fixed", "machine": False, "measure": TIME}
    request = make_request(operations or list(COLLECTIVES), **options)
    peers = options.get("peers", PEERS)
    ours = tuple(name for name in request.backends if peers[name].ours)
    if not ours or not set(request.operations) <= COLLECTIVES.keys():
        raise MisuseError(
            f"--tune compares the algorithms of {', '.join(COLLECTIVES)} on Phalanx's own backends"
        )
    return msgspec.structs.replace(request, backends=ours)


def parse_ranks(text: str) -> list[int]:
    """`"2,4"` -> [2, 4]. `InvalidWorldSizeError` for what is no number of ranks above one."""
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


def _check(what: str, words: Sequence[str], known: Iterable[str]) -> None:
    names = list(dict.fromkeys(known))
    for word in words:
        if word not in names:
            raise MisuseError(f"there is no {what} {word!r}; there are: {', '.join(names)}")


# ------------------------------------------------------------------------------
# Sizes of messages, as they are requested and shown: `8..256M`, `8,64K,16M`. K is 1024.

_UNITS = "KMG"
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


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
        raise MisuseError(f"{text!r} is no size of a message: write bytes, such as 8, 64K or 16M")
    return int(found[1]) << 10 * (1 + _UNITS.find(found[2].upper()) if found[2] else 0)


def show_size(size: int) -> str:
    """65536 -> `"64K"`; what is no round number of units stays a number of bytes."""
    unit = 0
    while size and unit < len(_UNITS) and size % 1024 == 0:
        size, unit = size >> 10, unit + 1
    return f"{size}{_UNITS[unit - 1] if unit else ''}"
