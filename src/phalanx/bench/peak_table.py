"""Peaks of memory as tables to read, and as JSON."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from phalanx.bench.peers.table import PEERS
from phalanx.bench.peers.training import task_of
from phalanx.bench.records import Peak, Report

__all__ = ["peak_notes", "peak_tables", "peaks_as_json"]

_MODES = {False: "", True: ", freed memory given back"}


def peak_tables(report: Report) -> Iterator[Table]:
    """A table for each operation, number of ranks, and way of freeing."""
    key = lambda peak: (peak.ranks, peak.operation, peak.gives_back)  # noqa: E731
    for (ranks, operation, gives_back), peaks in itertools.groupby(
        sorted(report.peaks, key=key), key
    ):
        yield _table(report, operation, ranks, gives_back, list(peaks))


def _table(
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
