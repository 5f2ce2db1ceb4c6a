"""A benchmark's figures as tables to read, and as JSON."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from rich.table import Table

from phalanx.collectives.schedules import COLLECTIVES
from phalanx.collectives.tuning import FORMAT, Tuning, TuningTable
from phalanx.tools.bench.operations import OPERATIONS
from phalanx.tools.bench.peers.table import PEERS
from phalanx.tools.bench.peers.training import task_of
from phalanx.tools.bench.records import LeftOut, Line, Made, Peak, Report, show_size

ALONE = "alone"

_BUSY = 0.25
"""Processes for each core, beyond which figures are doubtful."""


def tables(report: Report) -> Iterator[Table]:
    """A table for each operation and number of ranks, and then those of peaks of memory."""
    key = lambda line: (line.operation, line.ranks)  # noqa: E731
    for (operation, ranks), lines in itertools.groupby(report.lines, key):
        yield _table(report, operation, ranks, list(lines))
    yield from peak_tables(report)


def _table(report: Report, operation: str, ranks: int, lines: list[Line]) -> Table:
    timed = not OPERATIONS[operation].elements(OPERATIONS[operation].source, 1, 1)
    title = f"{operation}, {ranks} ranks"
    if OPERATIONS[operation].training:
        title += f": {task_of(operation, report.ask.width)}"
    table = Table(title=title, title_justify="left")
    rates = [f"of {ALONE}"] if OPERATIONS[operation].training else ["alg GB/s", "bus GB/s"]
    times = ["us", "lowest", "quartiles"]
    headings = ["bytes", "", *times, *rates, f"x {report.ask.baseline}", "wrong"]
    for heading in headings:
        side: Any = "left" if heading == "" else "right"
        table.add_column(heading, justify=side, no_wrap=True)
    for size, group in itertools.groupby(lines, lambda line: line.bytes):
        table.add_section()
        for number, line in enumerate(group):
            low, high = line.quartiles
            rates = [
                "" if timed else f"{rate / 1e9:.3f}"
                for rate in (line.algorithm_bandwidth, line.bus_bandwidth)
            ]
            if OPERATIONS[operation].training:
                alone = report.beside(line, ALONE)
                rates = [f"{_times(line, alone):.2f}" if alone is not None else ""]
            table.add_row(
                "" if number or timed else show_size(size),
                str(line.contender),
                _us(line.median),
                _us(min(line.seconds)),
                f"{_us(low)} - {_us(high)}",
                *rates,
                _ratio(report, line),
                f"[bold red]{line.wrong}[/bold red]" if line.wrong else "0",
                style="dim" if PEERS[line.contender.peer].machine else "",
            )
    return table


def _us(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:,.1f}" if us < 100 else f"{us:,.0f}"


def _ratio(report: Report, line: Line) -> str:
    base = report.beside(line, report.ask.baseline)
    if base is None or base is line or PEERS[line.contender.peer].machine:
        return ""
    return f"{_times(base, line):.2f}"


def _times(line: Line, other: Line) -> float:
    """How many times as long as the other's a call took: medians, one over the other.

    Rounds of training steps are few and long: each is compared with the other's of the same
    round, when the machine had as much else to do, and the median of these ratios counts.
    """
    if OPERATIONS[line.operation].training:
        pairs = zip(line.seconds, other.seconds, strict=True)
        return statistics.median(own / others for own, others in pairs)
    return line.median / other.median


def notes(report: Report) -> Iterator[str]:
    """What has to be said besides: who was left out, what is wrong, whether `auto` is right."""
    reasons: dict[tuple[str, str], list[LeftOut]] = {}
    for left in report.left_out:
        reasons.setdefault((left.peer, left.reason), []).append(left)
    for (peer, reason), all_left in reasons.items():
        ranks = [left.ranks for left in all_left]
        where = "" if set(ranks) == set(report.ranks) else f" with {_join(ranks)} ranks"
        what = _join(left.operation for left in all_left if left.operation)
        yield f"{peer} is left out{' of ' + what if what else ''}{where}: {reason}"
    load, cores = report.machine.get("load"), report.machine.get("cores")
    if load and cores and load > _BUSY * cores:
        yield (
            f"before it began {load:g} processes were running here, on {cores} cores: what others "
            "do takes time from those that only spin, most of all"
        )
    yield from _about_auto(report.lines)
    yield from peak_notes(report)
    for line in report.wrong:
        yield f"WRONG: {line.where()}: {line.wrong} elements were not what they had to be"
    if report.lines and not report.wrong:
        rounds = len(report.lines[0].seconds)
        yield (
            f"{len(report.lines)} lines, each the median of {rounds} rounds; every result is right"
        )


def _join(things: Iterable[object]) -> str:
    return ", ".join(str(thing) for thing in dict.fromkeys(things))


def _about_auto(lines: list[Line]) -> Iterator[str]:
    """How far `auto` is from the best algorithm asked for by name, where both were measured."""

    def key(line: Line) -> tuple[str, int, str, str]:
        return (line.operation, line.ranks, line.contender.peer, line.contender.memory)

    for (operation, ranks, peer, memory), group in itertools.groupby(sorted(lines, key=key), key):
        worst, where = 0.0, ""
        for size, same in itertools.groupby(
            sorted(group, key=lambda line: line.bytes), lambda line: line.bytes
        ):
            by_name = {line.contender.algorithm: line.median for line in same}
            auto = by_name.pop("auto", None)
            if auto is None or not by_name:
                continue
            best = min(by_name, key=by_name.__getitem__)
            if where == "" or auto / by_name[best] > worst:
                worst, where = auto / by_name[best], f"at {show_size(size)}, beside {best}"
        if where:
            what = peer if memory == "ordinary" else f"{peer} {memory}"
            yield (
                f"{operation}, {ranks} ranks, {what}: auto takes {worst:.2f} of the best "
                f"algorithm's time at most ({where})"
            )


def as_json(report: Report) -> bytes:
    """For programs: what was asked, the machine, and for each line its figures and all rounds."""
    lines = []
    for line in report.lines:
        low, high = line.quartiles
        base = report.beside(line, report.ask.baseline)
        alone = report.beside(line, ALONE)
        lines.append(
            {
                "operation": line.operation,
                "ranks": line.ranks,
                "bytes": line.bytes,
                "contender": str(line.contender),
                "peer": line.contender.peer,
                "memory": line.contender.memory,
                "algorithm": line.contender.algorithm,
                "calls": line.calls,
                "median_us": line.median * 1e6,
                "quartiles_us": [low * 1e6, high * 1e6],
                "lowest_us": min(line.seconds) * 1e6,
                "highest_us": max(line.seconds) * 1e6,
                "algorithm_GBps": line.algorithm_bandwidth / 1e9,
                "bus_GBps": line.bus_bandwidth / 1e9,
                f"of_{ALONE}": _times(line, alone) if alone else None,
                f"times_{report.ask.baseline}": _times(base, line) if base else None,
                "wrong": line.wrong,
                "rounds_us": [seconds * 1e6 for seconds in line.seconds],
            }
        )
    whole = {
        "ask": msgspec.to_builtins(report.ask),
        "machine": report.machine,
        "left_out": [
            {
                "peer": left.peer,
                "ranks": left.ranks,
                "operation": left.operation,
                "reason": left.reason,
            }
            for left in report.left_out
        ],
        "lines": lines,
        "peaks": peaks_as_json(report),
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


# ------------------------------------------------------------------------------
# Peaks of memory as tables to read, and as JSON.

_MODES = {False: "", True: ", freed memory given back"}


def peak_tables(report: Report) -> Iterator[Table]:
    """A table for each operation, number of ranks, and way of freeing."""
    key = lambda peak: (peak.ranks, peak.operation, peak.gives_back)  # noqa: E731
    for (ranks, operation, gives_back), peaks in itertools.groupby(
        sorted(report.peaks, key=key), key
    ):
        yield _peak_table(report, operation, ranks, gives_back, list(peaks))


def _peak_table(
    report: Report, operation: str, ranks: int, gives_back: bool, peaks: list[Peak]
) -> Table:
    title = f"{operation}, {ranks} ranks: peak MiB of a rank{_MODES[gives_back]}"
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in (
        "building",
        "training",
        "all ranks",
        "of it shared",
        f"x {report.ask.baseline}",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    base = next((peak for peak in peaks if peak.peer == report.ask.baseline), None)
    for peak in peaks:
        is_machine = PEERS[peak.peer].machine
        compared = base is not None and base is not peak and not is_machine
        table.add_row(
            peak.peer,
            _mib(max(held.building for held in peak.held)),
            _mib(peak.largest),
            _mib(sum(held.training for held in peak.held)),
            _mib(sum(held.shared for held in peak.held)),
            f"{base.largest / peak.largest:.2f}" if compared and base and peak.largest else "",
            style="dim" if is_machine else "",
        )
    return table


def peak_notes(report: Report) -> Iterator[str]:
    """The plain theory, and what the figures are."""
    for operation, ranks in dict.fromkeys((peak.operation, peak.ranks) for peak in report.peaks):
        task = task_of(operation, report.ask.width)
        yield (
            f"{operation}, {ranks} ranks: parameters are {_mib(task.model_bytes)} MiB, gradients "
            f"as much; shared out, both are {_mib(2 * task.model_bytes / ranks)} a rank, and "
            f"{_mib(task.layer_bytes)} more for each layer that is whole, or whose gradients are"
        )
    if report.peaks:
        yield (
            "peaks of memory are beyond what a process had before the model, on the rank that had "
            f"most; of building and wrapping it, and of {report.peaks[0].steps} steps; what ranks "
            "share counts once, divided among them"
        )


def _mib(count: float) -> str:
    return f"{count / (1 << 20):,.1f}"


def peaks_as_json(report: Report) -> list[dict[str, Any]]:
    """For programs: of each library what every rank had, in bytes, beside the plain theory."""
    found = []
    for peak in report.peaks:
        task = task_of(peak.operation, report.ask.width)
        found.append(
            {
                "operation": peak.operation,
                "ranks": peak.ranks,
                "peer": peak.peer,
                "gives_back": peak.gives_back,
                "steps": peak.steps,
                "building_bytes": [held.building for held in peak.held],
                "training_bytes": [held.training for held in peak.held],
                "shared_bytes": [held.shared for held in peak.held],
                "parameter_bytes": task.model_bytes,
                "gradient_bytes": task.model_bytes,
                "layer_bytes": task.layer_bytes,
            }
        )
    return found


# ------------------------------------------------------------------------------
# From a benchmark's figures to the file that `auto` picks algorithms by (PHALANX_TUNING).


def as_tuning(report: Report) -> bytes:
    """The file: a table for each backend, number of ranks and collective that was measured."""
    tuning = Tuning(format=FORMAT, tables=tuple(tables_of(report)))
    return msgspec.json.format(msgspec.json.encode(tuning), indent=1) + b"\n"


def tables_of(report: Report) -> Iterator[TuningTable]:
    """Of what was measured in ordinary memory, with algorithms asked for by name."""
    for made in report.made:
        lines = [line for line in report.lines if _belongs(line, made)]
        for collective, group in itertools.groupby(lines, lambda line: line.operation):
            seconds: dict[str, dict[int, float]] = {}
            for line in group:
                seconds.setdefault(line.contender.algorithm, {})[line.bytes] = line.median
            sizes = tuple(sorted(set.intersection(*(set(times) for times in seconds.values()))))
            if sizes:
                yield TuningTable(
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
