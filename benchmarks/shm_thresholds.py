"""The sizes at which collectives in shared memory change their way, measured on this machine.

    python benchmarks/shm_thresholds.py [--rounds N] [--only NAME]

For each threshold of `collectives/shm/plan.py`: one collective for which it decides, on 2 ranks (4
for `crowded_to`), with half of the threshold, as it is, and with twice of it. The three take turns,
in rounds of the same processes; the table has the median of each beside that of today's value.
Below 1 the other value would be faster here. Results are compared with those of one process.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import phalanx as px
from phalanx.collectives.shm import plan

CALLS = 8  # of a collective, timed together
FACTORS = (0.5, 1.0, 2.0)
MIB = 1 << 20


class Case(NamedTuple):
    """A collective for which a threshold decides.

    size        bytes of the tensor
    registered  whether it lies in shared memory
    fixed       other thresholds, so that this one decides
    """

    collective: str
    size: int
    registered: bool = False
    fixed: dict[str, int] = {}  # noqa: RUF012 - never changed
    ranks: int = 2


STAGED = {"reduced_from": 1 << 40, "broadcast_from": 1 << 40}
READ = {"reduced_from": 0, "broadcast_from": 0}
CASES = {
    "small": Case("all_reduce", 48 << 10),
    "piece": Case("broadcast", 16 * MIB, fixed=STAGED),
    "staged_by_all": Case("all_reduce", 8 * MIB, fixed=STAGED),
    "block": Case("all_reduce", 6 * MIB, registered=True),
    "block_of_large": Case("all_reduce", 16 * MIB, registered=True),
    "large": Case("all_reduce", 12 * MIB, registered=True),
    "step": Case("reduce_scatter", 16 * MIB, registered=True),
    "read": Case("all_reduce", 4 * MIB, fixed=READ),
    "read_least": Case("all_reduce", 4 * MIB, fixed=READ | {"read": 0}),
    "reduced_from": Case("all_reduce", 3 << 19),
    "broadcast_from": Case("broadcast", 2 * MIB),
    "crowded_to": Case("all_reduce", 4 * MIB, ranks=4),
}


def call_of(case: Case, tensor: Tensor, backend: px.Backend) -> Callable[[], Tensor]:
    """The collective, which overwrites the tensor or makes a result."""
    if case.collective == "all_reduce":
        return lambda: px.all_reduce_(tensor, backend, px.ReduceOp.MAX)
    if case.collective == "broadcast":
        return lambda: px.broadcast_(tensor, backend, 0)
    return lambda: px.reduce_scatter(tensor, backend, px.ReduceOp.MAX)


def measure(backend: px.Backend, name: str, rounds: int) -> list[float]:
    """The median of the seconds of a call, for each factor."""
    case, torch_threads = CASES[name], torch.get_num_threads()
    torch.set_num_threads(1)
    count = case.size // 4
    tensor = backend.empty(count) if case.registered else torch.empty(count)
    seconds: list[list[float]] = [[] for _ in FACTORS]
    for _ in range(rounds):
        for factor, found in zip(FACTORS, seconds, strict=True):
            value = int(getattr(plan.Thresholds(), name) * factor)
            plan.THRESHOLDS = plan.Thresholds()._replace(**{**case.fixed, name: value})
            backend.cache.clear()  # what was planned by the other value
            tensor.fill_(float(backend.rank))
            result = call_of(case, tensor, backend)()
            largest = 0.0 if case.collective == "broadcast" else float(backend.world_size - 1)
            if not bool((result == largest).all()):
                raise RuntimeError(f"rank {backend.rank}: {name} x {factor:g}: a wrong result")
            call = call_of(case, tensor, backend)
            backend.barrier()
            began = perf_counter()
            for _ in range(CALLS):
                call()
            found.append((perf_counter() - began) / CALLS)
    torch.set_num_threads(torch_threads)
    return [statistics.median(found) for found in seconds]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=CASES)
    asked = parser.parse_args()
    os.environ.setdefault("PHALANX_CMA", "allow")  # so that ordinary memory is read
    table = Table("threshold", "bytes", "of", "half", "today's", "twice", box=box.MARKDOWN)
    for name in [asked.only] if asked.only else CASES:
        case = CASES[name]
        times = px.spawn(partial(measure, name=name, rounds=asked.rounds), case.ranks, "shm")[0]
        today = times[1]
        kind = "registered" if case.registered else "ordinary"
        what = f"{case.collective} of {case.size >> 10} KiB, {kind}, {case.ranks} ranks"
        half, twice = (f"{seconds / today:.2f}" for seconds in (times[0], times[2]))
        value = getattr(plan.Thresholds(), name)
        table.add_row(name, f"{value >> 10} KiB", what, half, f"{today * 1e6:.0f} us", twice)
    console = Console(width=max(110, Console().width))
    console.print(table)


if __name__ == "__main__":
    main()
