"""A whole benchmark: on ranks that are started here, or as one rank of a launcher's job."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from phalanx.bench.machine import describe_machine
from phalanx.bench.records import Ask, Message, Report
from phalanx.bench.start import run_ranks
from phalanx.launch.environment import read_environment

__all__ = ["new_report", "run_bench"]


def new_report(ask: Ask, ranks: Sequence[int]) -> Report:
    """A report without figures. Under a launcher the number of ranks is the launcher's."""
    world = read_environment(os.environ)
    return Report(
        ask=ask,
        ranks=list(ranks) if world is None else [world.world_size],
        machine=describe_machine(),
    )


def run_bench(report: Report, heard: Callable[[Message], None]) -> bool:
    """Measure what the report asks; it fills up, and `heard` gets every message as it comes.

    Under a launcher this process is one of its ranks. Returns whether the report is this
    process's: on every rank but 0 it stays empty. Raises what `run_ranks` does.
    """

    def hear(message: Message) -> None:
        report.add(message)
        heard(message)

    world = read_environment(os.environ)
    if world is not None:
        from phalanx.bench.rank import run_rank  # noqa: PLC0415 -- only if this is one

        run_rank(report.ask, hear)
        return world.rank == 0
    for number in report.ranks:
        for message in run_ranks(report.ask, number):
            hear(message)
    return True
