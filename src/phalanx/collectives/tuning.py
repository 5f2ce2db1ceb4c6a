"""Measured times of algorithms on a user's own cluster, not estimates: `PHALANX_TUNING=FILE`.

`phalanx bench --tune FILE` measures every algorithm of every collective and writes the file; with
its path in the environment, `auto` picks by these times. Between two measured sizes, times are
interpolated on logarithmic scales; below the smallest they stay, above the largest they grow with
the bytes. Backends, hosts and collectives that the file does not know go by
the estimates of `cost.py`.

Every rank has to have the same file, or ranks pick different algorithms. So the collective carries
the file's hash in its signature: ranks whose files differ get a `DesyncError` that shows both.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import TypeVar

import msgspec
from xxhash import xxh3_64_hexdigest

from phalanx import files
from phalanx.collectives.schedules import COLLECTIVES
from phalanx.core.backend import Backend, SubBackend
from phalanx.errors import MisuseError, plain
from phalanx.wire.control import learned

VARIABLE = "PHALANX_TUNING"
FORMAT = "phalanx tuning 1"
MOST_BYTES = 64 << 20


class TuningTable(msgspec.Struct, frozen=True, kw_only=True):
    """One collective on one kind of cluster.

    backend   the class of the backend, such as `TcpBackend`
    hosts     for each rank the number of its host, as in `Backend.topology`
    sizes     bytes of the whole message (as `cost.choose` counts them), ascending
    seconds   algorithm -> its time at each of the sizes
    """

    backend: str
    hosts: tuple[int, ...]
    collective: str
    sizes: tuple[int, ...]
    seconds: dict[str, tuple[float, ...]]


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """A tuning file: a table for each collective."""

    format: str
    tables: tuple[TuningTable, ...]


Known = tuple[str, Mapping[tuple[str, tuple[int, ...], str], TuningTable]]  # the hash; tables


def root_of(backend: Backend) -> Backend:
    """Return the backend that a group is part of, or itself."""
    while isinstance(backend, SubBackend):
        backend = backend.parent
    return backend


def measured(
    collective: str, count: int, backend: Backend
) -> tuple[Mapping[str, float], str] | None:
    """Return the times for a message of `count` bytes in such a group, if it was measured: seconds
    of each algorithm, and the hash of the file.

    `MisuseError` if PHALANX_TUNING names no file of this kind.
    """
    tuning, tables = remembered(backend, "tuning", _load)
    kind = type(root_of(backend)).__name__
    table = tables.get((kind, _renumbered(backend.topology), collective))
    if table is None:
        return None
    at = partial(_at, table.sizes, count)
    return {name: at(seconds) for name, seconds in table.seconds.items()}, tuning


def tuning_of(backend: Backend) -> str:
    """Return the hash of this rank's file; empty without one."""
    return remembered(backend, "tuning", _load)[0]


def _load() -> Known:
    path = os.environ.get(VARIABLE, "")
    if not path:
        return "", {}
    try:
        content = files.read(path, MOST_BYTES, follow=True)
    except OSError as error:
        raise MisuseError(
            f"{VARIABLE}={path} cannot be read ({error}): unset it, or write the file with "
            "`phalanx bench --tune FILE` and put it on every host"
        ) from None
    tables = {
        (table.backend, _renumbered(table.hosts), table.collective): table
        for table in read_tuning(content, path).tables
    }
    return xxh3_64_hexdigest(content)[:8], tables


def read_tuning(content: bytes, path: str) -> Tuning:
    """Read and check the file. `MisuseError` names the problem with it."""
    try:
        tuning = msgspec.json.decode(content, type=learned(Tuning))
        if tuning.format != FORMAT:
            raise ValueError(f"its format is {tuning.format!r}, not {FORMAT!r}")
        for table in tuning.tables:
            _check(table)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MisuseError(
            f"{path} is no table of what algorithms took ({plain(str(error))}): write it again "
            "with `phalanx bench --tune FILE`"
        ) from None
    return tuning


def _check(table: TuningTable) -> None:
    where = f"{table.backend}, {len(table.hosts)} ranks, {table.collective}"
    sizes = table.sizes
    if not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"{where}: sizes are not positive and ascending")
    if not table.seconds:
        raise ValueError(f"{where}: no algorithm")
    for name, seconds in table.seconds.items():
        if name not in COLLECTIVES.get(table.collective, {}):
            raise ValueError(f"{where}: there is no algorithm {name!r}")
        if len(seconds) != len(sizes) or not all(0 < s < math.inf for s in seconds):
            raise ValueError(f"{where}, {name}: it takes one positive time for each size")


def _renumbered(hosts: tuple[int, ...]) -> tuple[int, ...]:
    """Return hosts numbered in the order in which they come."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)


def _at(sizes: tuple[int, ...], count: int, seconds: tuple[float, ...]) -> float:
    """Return the time for `count` bytes."""
    place = bisect.bisect_left(sizes, count)
    if place == 0:
        return seconds[0]
    if place == len(sizes):
        return seconds[-1] * count / sizes[-1]
    low, high = sizes[place - 1], sizes[place]
    part = math.log(count / low) / math.log(high / low)
    return float(seconds[place - 1] ** (1 - part) * seconds[place] ** part)


# ------------------------------------------------------------------------------
# A backend's memory of earlier calls: plans, and chosen algorithms.

KEPT = 1024  # the oldest go first

T = TypeVar("T")


def remember(backend: Backend, key: Hashable, value: T) -> T:
    """Keep a value on this backend for later calls, in place of the oldest one; returns it."""
    memo = backend.cache
    if len(memo) >= KEPT:
        memo.pop(next(iter(memo)), None)
    memo[key] = value
    return value


def remembered(backend: Backend, key: Hashable, make: Callable[[], T]) -> T:
    """The value that `make` gave for this key before, on this backend; else a new one."""
    value: T | None = backend.cache.get(key)  # type: ignore[assignment]
    return value if value is not None else remember(backend, key, make())
