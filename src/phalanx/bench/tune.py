"""From a benchmark's figures to the file that `auto` picks algorithms by (PHALANX_TUNING)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from phalanx.bench.records import Line, Made, Report
from phalanx.collectives.schedules import COLLECTIVES
from phalanx.collectives.tuning import FORMAT, Table, Tuning

__all__ = ["as_tuning", "tables_of"]


def as_tuning(report: Report) -> bytes:
    """The file: a table for each backend, number of ranks and collective that was measured."""
    tuning = Tuning(format=FORMAT, tables=tuple(tables_of(report)))
    return msgspec.json.format(msgspec.json.encode(tuning), indent=1) + b"\n"


def tables_of(report: Report) -> Iterator[Table]:
    """Of what was measured in ordinary memory, with algorithms asked for by name."""
    for made in report.made:
        lines = [line for line in report.lines if _belongs(line, made)]
        for collective, group in itertools.groupby(lines, lambda line: line.operation):
            seconds: dict[str, dict[int, float]] = {}
            for line in group:
                seconds.setdefault(line.contender.algorithm, {})[line.bytes] = line.median
            sizes = tuple(sorted(set.intersection(*(set(times) for times in seconds.values()))))
            if sizes:
                yield Table(
                    backend=made.backend,
                    hosts=made.hosts,
                    collective=collective,
                    sizes=sizes,
                    seconds={
                        name: tuple(round(times[size], 9) for size in sizes)
                        for name, times in seconds.items()
                    },
                )


def _belongs(line: Line, made: Made) -> bool:
    return (
        line.contender.peer == made.peer
        and line.contender.memory == "ordinary"
        and line.ranks == len(made.hosts)
        and line.contender.algorithm in COLLECTIVES.get(line.operation, {})
    )
