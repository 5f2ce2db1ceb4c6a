"""A whole benchmark: on ranks that are started here, or as one rank of a launcher's job."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from phalanx.bench.machine import describe_machine
from phalanx.bench.records import Ask, Message, Report
from phalanx.bench.start import run_ranks
from phalanx.launch.environment import read_environment

__all__ = ["run_bench"]


def run_bench(ask: Ask, ranks: Sequence[int], heard: Callable[[Message], None]) -> Report | None:
    """Measure `ask` with each number of `ranks`; `heard` gets every message as it comes.

    Under a launcher this process is one of its ranks, and their number is the launcher's; only
    rank 0 returns a report, the others None. Raises what `run_ranks` does.
    """
    world = read_environment(os.environ)
    report = Report(
        ask=ask,
        ranks=list(ranks) if world is None else [world.world_size],
        machine=describe_machine(),
    )

    def hear(message: Message) -> None:
        report.add(message)
        heard(message)

    if world is not None:
        from phalanx.bench.rank import run_rank  # noqa: PLC0415 -- only if this is one

        run_rank(ask, hear)
        return report if world.rank == 0 else None
    for number in ranks:
        for message in run_ranks(ask, number):
            hear(message)
    return report
