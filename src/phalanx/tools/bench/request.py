"""From the words of a command line to what is measured, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from phalanx.collectives.schedules import COLLECTIVES
from phalanx.errors import InvalidWorldSizeError, MisuseError
from phalanx.tools.bench.operations import EXPANDED, MEMORIES, OPERATIONS
from phalanx.tools.bench.peers.table import PEERS
from phalanx.tools.bench.records import PEAK, TIME, Ask, parse_sizes

_ALGORITHMS = (
    "auto",
    "all",
    "fixed",
    *dict.fromkeys(name for rows in COLLECTIVES.values() for name in rows),
)
_LEAST_ROUNDS = 1


def make_ask(
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
) -> Ask:
    """What the words mean. `MisuseError` for one that means nothing here, listing what there is."""
    measured = [name for name, row in OPERATIONS.items() if name != "copy"]
    named = [part for name in operations for part in EXPANDED.get(name, (name,))]
    _check("operation", named, dict.fromkeys([*measured, *EXPANDED]))
    peers = _words(backends)
    _check("backend", peers, PEERS)
    _check("backend", [baseline], PEERS)
    if machine:
        peers += [name for name, row in PEERS.items() if row.machine and name not in peers]
    kinds = _words(memory)
    _check("kind of memory", kinds, MEMORIES)
    wanted = _words(algorithms)
    _check("algorithm", wanted, dict.fromkeys(_ALGORITHMS))
    if rounds < _LEAST_ROUNDS or threads < 1 or not 0 < seconds < 60:
        raise MisuseError(
            f"--rounds {rounds}, --threads {threads}, --seconds {seconds:g}: it takes a round, a "
            "thread, and a time of less than a minute"
        )
    figures = _words(measure)
    _check("figure", figures, dict.fromkeys((TIME, PEAK)))
    if figures == [PEAK] and not any(OPERATIONS[name].held for name in named):
        held = ", ".join(name for name, row in OPERATIONS.items() if row.held)
        raise MisuseError(f"--measure {measure}: the peak of memory is measured of {held} alone")
    if steps < 1:
        raise MisuseError(f"--steps {steps}: there is no peak of memory without a step")
    if width < 0:
        raise MisuseError(f"--width {width}: a layer has one feature at least; 0 is the usual size")
    return Ask(
        operations=tuple(dict.fromkeys(named)),
        backends=tuple(peers),
        sizes=tuple(parse_sizes(sizes, factor)),
        rounds=rounds,
        seconds=seconds,
        memories=tuple(kinds),
        algorithms=tuple(wanted),
        threads=threads,
        baseline=baseline,
        width=width,
        measure=tuple(figures),
        steps=steps,
    )


def make_tuning_ask(operations: Sequence[str], **options: Any) -> Ask:
    """What to measure so that `auto` can pick by it: every algorithm of Phalanx's own backends.

    Options as for `make_ask`; those that make no sense here are overruled.
    """
    options |= {"memory": "ordinary", "algorithms": "fixed", "machine": False, "measure": TIME}
    ask = make_ask(operations or list(COLLECTIVES), **options)
    ours = tuple(name for name in ask.backends if PEERS[name].ours)
    if not ours or not set(ask.operations) <= COLLECTIVES.keys():
        raise MisuseError(
            f"--tune compares the algorithms of {', '.join(COLLECTIVES)} on Phalanx's own backends"
        )
    return msgspec.structs.replace(ask, backends=ours)


def parse_ranks(text: str) -> list[int]:
    """`"2,4"` -> [2, 4]. `InvalidWorldSizeError` for what is no number of ranks above one."""
    numbers = []
    for word in _words(text):
        if not word.isdigit() or int(word) < 2:
            raise InvalidWorldSizeError(
                f"--ranks {text}: {word!r} is no number of ranks; it takes two or more"
            )
        numbers.append(int(word))
    return numbers


def _words(text: str) -> list[str]:
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise MisuseError(f"{text!r} names nothing")
    return words


def _check(what: str, words: Sequence[str], known: Mapping[str, object]) -> None:
    for word in words:
        if word not in known:
            raise MisuseError(f"there is no {what} {word!r}; there are: {', '.join(known)}")
