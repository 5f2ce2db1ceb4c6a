"""The cores of this host, and the share of each rank (`phalanx run --bind`).

A host with two memory nodes of four cores, and three ranks:

    node             0         1
    core          0 1 2 3   4 5 6 7
    --bind cores  a a b b   c c . .     as many for each, of its own; the rest stays free
    --bind numa   a a a a   c c c c     all cores of a node, which its ranks share
                  b b b b

A core is a physical one, with all its hardware threads. Only the cores that this process may use
count: a container, a control group (cpuset), Slurm or `taskset` may restrict it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from phalanx.errors import MisuseError

WAYS = ("cores", "numa")
SYSTEM = Path("/sys/devices/system")

T = TypeVar("T")
Processors = frozenset[int]  # as the system numbers them: hardware threads


def usable_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """Return the fair share of this process's cores for each of `ranks`, at least one."""
    return max(1, usable_cores() // ranks)


def bind(way: str, ranks: int) -> list[Processors]:
    """Return the processors of each of `ranks` on this host, bound in one of the `WAYS`.

    `MisuseError` for another way, for more ranks than cores, and on a system without a choice of
    cores.
    """
    if way not in WAYS:
        raise MisuseError(f"--bind {way}: it is one of {', '.join(WAYS)}")
    if not hasattr(os, "sched_setaffinity"):
        raise MisuseError(
            f"--bind {way} needs Linux: {platform.system()} lets no program choose its cores; "
            "leave --bind out"
        )
    nodes = cores_by_node(frozenset(os.sched_getaffinity(0)))
    if way == "numa":
        return shares([frozenset[int]().union(*cores) for cores in nodes], ranks)
    cores = [core for node in nodes for core in node]
    if ranks > len(cores):
        raise MisuseError(
            f"--bind cores: {ranks} ranks need a core each, and this process may use "
            f"{len(cores)}: start fewer ranks, or use --bind numa, or leave --bind out"
        )
    return shares(cores, ranks)


def shares(parts: Sequence[Processors], ranks: int) -> list[Processors]:
    """Return as many whole parts for each rank, or one that it shares with its neighbours."""
    each = len(parts) // ranks
    if each == 0:
        return [parts[rank * len(parts) // ranks] for rank in range(ranks)]
    return [
        frozenset[int]().union(*parts[rank * each : (rank + 1) * each]) for rank in range(ranks)
    ]


def cores_by_node(usable: Processors, system: Path = SYSTEM) -> list[list[Processors]]:
    """Return the cores of each memory node, each as its hardware threads; all of `usable`.

    Without information of the system all is one node, and each processor a core.
    """
    nodes = [_listed(path / "cpulist") & usable for path in _numbered(system / "node", "node")]
    nodes = [node for node in nodes if node]
    rest = usable.difference(*nodes)
    found = []
    for node in [*nodes, *([rest] if rest else [])]:
        cores: dict[Processors, None] = {}
        for number in sorted(node):
            path = system / f"cpu/cpu{number}/topology/thread_siblings_list"
            cores[(_listed(path) & node) | {number}] = None
        found.append(list(cores))
    return found


def _numbered(folder: Path, name: str) -> list[Path]:
    """Return the entries called `name` and a number there, in the order of the numbers."""
    found = [path for path in folder.glob(f"{name}*") if path.name[len(name) :].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[len(name) :]))


def _listed(path: Path) -> Processors:
    """Return the numbers in a file of the system such as `0-3,8`; none if it does not exist."""
    numbers: set[int] = set()
    with suppress(OSError, ValueError):
        for item in path.read_text().strip().split(","):
            first, _, last = item.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
