"""A benchmark's figures as files: JSON for programs, a picture, and the table that `auto` reads."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.collectives.schedules import COLLECTIVES
from phalanx.collectives.tuning import FORMAT, Tuning, TuningTable
from phalanx.errors import MisuseError
from phalanx.tools.bench.peers import MACHINE
from phalanx.tools.bench.request import show_size
from phalanx.tools.bench.results import BenchReport, Peak, ResultLine
from phalanx.tools.bench.tables import ALONE
from phalanx.tools.bench.training import task_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _indented(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def as_json(report: BenchReport) -> bytes:
    """What was requested, the machine, and for each line its figures and all rounds.

    For peaks of memory: what every rank had, in bytes, beside the plain theory.
    """
    left_out = [msgspec.to_builtins(left) for left in report.left_out]
    for left in left_out:
        del left["type"]
    return _indented(
        {
            "ask": msgspec.to_builtins(report.request),
            "machine": report.machine,
            "left_out": left_out,
            "lines": [_line_as_json(report, line) for line in report.lines],
            "peaks": [_peak_as_json(report, peak) for peak in report.peaks],
        }
    )


def _line_as_json(report: BenchReport, line: ResultLine) -> dict[str, Any]:
    low, high = line.quartiles
    base = report.beside(line, report.request.baseline)
    alone = report.beside(line, ALONE)
    return {
        "operation": line.operation,
        "ranks": line.ranks,
        "bytes": line.bytes,
        "contender": str(line.entry),
        "peer": line.entry.peer,
        "memory": line.entry.memory,
        "algorithm": line.entry.algorithm,
        "calls": line.calls,
        "median_us": line.median * 1e6,
        "quartiles_us": [low * 1e6, high * 1e6],
        "lowest_us": min(line.seconds) * 1e6,
        "highest_us": max(line.seconds) * 1e6,
        "algorithm_GBps": line.algorithm_bandwidth / 1e9,
        "bus_GBps": line.algorithm_bandwidth * line.bus / 1e9,
        f"of_{ALONE}": line.times(alone) if alone else None,
        f"times_{report.request.baseline}": base.times(line) if base else None,
        "wrong": line.wrong,
        "rounds_us": [seconds * 1e6 for seconds in line.seconds],
    }


def _peak_as_json(report: BenchReport, peak: Peak) -> dict[str, Any]:
    task = task_of(peak.operation, report.request.width)
    return {
        "operation": peak.operation,
        "ranks": peak.ranks,
        "peer": peak.peer,
        "gives_back": peak.gives_back,
        "steps": peak.steps,
        "building_bytes": [rank.building for rank in peak.by_rank],
        "training_bytes": [rank.training for rank in peak.by_rank],
        "shared_bytes": [rank.shared for rank in peak.by_rank],
        "parameter_bytes": task.model_bytes,
        "gradient_bytes": task.model_bytes,
        "layer_bytes": task.layer_bytes,
    }


# ------------------------------------------------------------------------------
# The file that `auto` picks algorithms by (PHALANX_TUNING).


def as_tuning(report: BenchReport) -> bytes:
    """A table for each backend, number of ranks and collective that was measured.

    Of what was measured in ordinary memory, with algorithms requested by name.
    """
    tables = []
    for info in report.backends:
        lines = [
            line
            for line in report.lines
            if (line.entry.peer, line.entry.memory) == (info.peer, "ordinary")
            and line.ranks == len(info.hosts)
            and line.entry.algorithm in COLLECTIVES.get(line.operation, {})
        ]
        for collective, group in itertools.groupby(lines, lambda line: line.operation):
            seconds: dict[str, dict[int, float]] = {}
            for line in group:
                seconds.setdefault(line.entry.algorithm, {})[line.bytes] = line.median
            sizes = tuple(sorted(set.intersection(*(set(times) for times in seconds.values()))))
            if sizes:
                tables.append(
                    TuningTable(
                        backend=info.backend,
                        hosts=info.hosts,
                        collective=collective,
                        sizes=sizes,
                        seconds={
                            name: tuple(round(times[size], 9) for size in sizes)
                            for name, times in seconds.items()
                        },
                    )
                )
    return _indented(Tuning(format=FORMAT, tables=tuple(tables)))


# ------------------------------------------------------------------------------
# The picture: time over size, both on logarithmic scales.


def check_plot(path: Path) -> None:
    """Raise `MisuseError`, before anything is measured, if there will be no picture."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 -- an extra

        mpl.use("Agg")
    except ImportError:
        raise MisuseError(
            f"--plot {path}: matplotlib is not installed; pip install 'phalanx[plot]', or leave "
            "--plot out"
        ) from None


def draw(report: BenchReport, path: Path) -> None:
    """Write a picture, with a panel for each operation and number of ranks, to `path`."""
    check_plot(path)
    from matplotlib.figure import Figure  # noqa: PLC0415

    panels: dict[str, list[ResultLine]] = {}
    for line in report.lines:
        if line.bytes:
            panels.setdefault(f"{line.operation}, {line.ranks} ranks", []).append(line)
    columns = max(1, min(2, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(6.4 * columns, 4.8 * rows), layout="constrained")
    axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, (title, lines) in zip(axes, panels.items(), strict=False):
        _draw_panel(panel, lines)
        panel.set_title(title)
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    figure.savefig(path, dpi=120)


def _draw_panel(panel: Axes, lines: list[ResultLine]) -> None:
    for number, entry in enumerate(dict.fromkeys(line.entry for line in lines)):
        own = [line for line in lines if line.entry == entry]
        sizes = [line.bytes for line in own]
        style = "--" if entry.peer in MACHINE else "-"
        colour = f"C{number % 10}"
        middle = [line.median * 1e6 for line in own]
        panel.plot(sizes, middle, style, marker=".", color=colour, label=str(entry))
        low, high = ([line.quartiles[edge] * 1e6 for line in own] for edge in (0, 1))
        panel.fill_between(sizes, low, high, color=colour, alpha=0.2)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    sizes = sorted({line.bytes for line in lines})
    shown: list[int] = []
    for size in sizes[:: max(1, len(sizes) // 8)]:
        if not shown or size >= 4 * shown[-1]:  # or one would be written over the other
            shown.append(size)
    panel.set_xticks(shown, [show_size(size) for size in shown])
    panel.minorticks_off()
    panel.set_xlabel("bytes")
    panel.set_ylabel("microseconds of a call; the band holds half of the rounds")
    panel.grid(visible=True, alpha=0.3)
    panel.legend(fontsize="small")
