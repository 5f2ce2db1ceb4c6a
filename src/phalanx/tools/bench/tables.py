"""A benchmark's figures as tables to read, with notes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Literal

from rich.table import Table

from phalanx.tools.bench.operations import OPERATIONS
from phalanx.tools.bench.peers import MACHINE
from phalanx.tools.bench.request import show_size
from phalanx.tools.bench.results import BenchReport, Entry, LeftOut, Peak, ResultLine
from phalanx.tools.bench.training import task_of

ALONE = "alone"
"""The peer whose training step is compared with the others': it has no communication."""

_BUSY = 0.25
"""Processes for each core, beyond which figures are doubtful."""


def tables(report: BenchReport) -> Iterator[Table]:
    """A table for each operation and number of ranks, and then those of peaks of memory."""
    by_operation = itertools.groupby(report.lines, key=lambda line: (line.operation, line.ranks))
    for (operation, ranks), lines in by_operation:
        yield _table(report, operation, ranks, list(lines))

    def kind(peak: Peak) -> tuple[int, str, bool]:
        return (peak.ranks, peak.operation, peak.gives_back)

    for _, peaks in itertools.groupby(sorted(report.peaks, key=kind), key=kind):
        yield _peak_table(report, list(peaks))


def _new_table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        side: Literal["left", "right"] = "right" if heading else "left"
        table.add_column(heading, justify=side, no_wrap=True)
    return table


def _table(report: BenchReport, operation: str, ranks: int, lines: list[ResultLine]) -> Table:
    row = OPERATIONS[operation]
    title = f"{operation}, {ranks} ranks"
    rate_headings = ["alg GB/s", "bus GB/s"]
    if row.training:
        title += f": {task_of(operation, report.request.width)}"
        rate_headings = [f"of {ALONE}"]
    headings = ["bytes", "", "us", "lowest", "quartiles", *rate_headings]
    table = _new_table(title, *headings, f"x {report.request.baseline}", "wrong")
    for size, group in itertools.groupby(lines, lambda line: line.bytes):
        table.add_section()
        for number, line in enumerate(group):
            bandwidth = line.algorithm_bandwidth
            rates = [f"{rate / 1e9:.3f}" for rate in (bandwidth, bandwidth * line.bus)]
            if row.training:
                alone = report.beside(line, ALONE)
                rates = [f"{line.times(alone):.2f}" if alone is not None else ""]
            elif not row.source:  # no bytes are moved
                rates = ["", ""]
            base = report.beside(line, report.request.baseline)
            compared = base not in (None, line) and line.entry.peer not in MACHINE
            low, high = line.quartiles
            table.add_row(
                show_size(size) if number == 0 and row.source else "",
                str(line.entry),
                _us(line.median),
                _us(min(line.seconds)),
                f"{_us(low)} - {_us(high)}",
                *rates,
                f"{base.times(line):.2f}" if base is not None and compared else "",
                f"[bold red]{line.wrong}[/bold red]" if line.wrong else "0",
                style="dim" if line.entry.peer in MACHINE else "",
            )
    return table


def _us(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:,.1f}" if us < 100 else f"{us:,.0f}"


def _peak_table(report: BenchReport, peaks: list[Peak]) -> Table:
    """Of one operation, number of ranks, and way of freeing."""
    first, baseline = peaks[0], report.request.baseline
    mode = ", freed memory given back" if first.gives_back else ""
    table = _new_table(
        f"{first.operation}, {first.ranks} ranks: peak MiB of a rank{mode}",
        *("", "building", "training", "all ranks", "of it shared", f"x {baseline}"),
    )
    base = next((peak for peak in peaks if peak.peer == baseline), None)
    for peak in peaks:
        compared = peak is not base and peak.peer not in MACHINE and peak.largest
        table.add_row(
            peak.peer,
            _mib(max(rank.building for rank in peak.by_rank)),
            _mib(peak.largest),
            _mib(sum(rank.training for rank in peak.by_rank)),
            _mib(sum(rank.shared for rank in peak.by_rank)),
            f"{base.largest / peak.largest:.2f}" if base is not None and compared else "",
            style="dim" if peak.peer in MACHINE else "",
        )
    return table


def _mib(count: float) -> str:
    return f"{count / (1 << 20):,.1f}"


def notes(report: BenchReport) -> Iterator[str]:
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
    yield from _notes_on_auto(report.lines)
    yield from _notes_on_peaks(report)
    for line in report.wrong:
        yield f"WRONG: {line}: {line.wrong} elements were not what they had to be"
    if report.lines and not report.wrong:
        rounds = len(report.lines[0].seconds)
        yield (
            f"{len(report.lines)} lines, each the median of {rounds} rounds; every result is right"
        )


def _join(things: Iterable[object]) -> str:
    return ", ".join(str(thing) for thing in dict.fromkeys(things))


def _notes_on_auto(lines: list[ResultLine]) -> Iterator[str]:
    """How far `auto` is from the best algorithm requested by name, where both were measured."""
    medians: dict[tuple[str, int, str], dict[int, dict[str, float]]] = {}
    for line in lines:
        peer = str(Entry(line.entry.peer, line.entry.memory))
        by_size = medians.setdefault((line.operation, line.ranks, peer), {})
        by_size.setdefault(line.bytes, {})[line.entry.algorithm] = line.median
    for (operation, ranks, peer), by_size in sorted(medians.items()):
        worst: list[tuple[float, int, str]] = []
        for size, by_name in sorted(by_size.items()):
            auto = by_name.pop("auto", None)
            if auto is not None and by_name:
                best = min(by_name, key=by_name.__getitem__)
                worst.append((auto / by_name[best], size, best))
        if worst:
            ratio, size, best = max(worst, key=lambda found: found[0])
            yield (
                f"{operation}, {ranks} ranks, {peer}: auto takes {ratio:.2f} of the best "
                f"algorithm's time at most (at {show_size(size)}, beside {best})"
            )


def _notes_on_peaks(report: BenchReport) -> Iterator[str]:
    """The plain theory, and what the figures are."""
    for operation, ranks in dict.fromkeys((peak.operation, peak.ranks) for peak in report.peaks):
        task = task_of(operation, report.request.width)
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
