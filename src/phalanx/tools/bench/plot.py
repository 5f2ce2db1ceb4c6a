"""A benchmark's figures as a picture: time over size, both on logarithmic scales."""

from __future__ import annotations

import itertools
from pathlib import Path

from phalanx.errors import MisuseError
from phalanx.tools.bench.records import Line, Report, show_size


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


def draw(report: Report, path: Path) -> None:
    """Write a picture, with a panel for each operation and number of ranks, to `path`."""
    check_plot(path)
    from matplotlib.figure import Figure  # noqa: PLC0415

    panels = [
        (key, [line for line in group if line.bytes])
        for key, group in itertools.groupby(report.lines, lambda line: (line.operation, line.ranks))
    ]
    panels = [panel for panel in panels if panel[1]]
    columns = max(1, min(2, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(6.4 * columns, 4.8 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for place, ((operation, ranks), lines) in enumerate(panels):
        panel = axes[place // columns][place % columns]
        _draw(panel, lines)
        panel.set_title(f"{operation}, {ranks} ranks")
    for place in range(len(panels), rows * columns):
        axes[place // columns][place % columns].set_axis_off()
    figure.savefig(path, dpi=120)


def _draw(panel: object, lines: list[Line]) -> None:
    from matplotlib.axes import Axes  # noqa: PLC0415

    assert isinstance(panel, Axes)
    names = list(dict.fromkeys(str(line.contender) for line in lines))
    sizes = sorted({line.bytes for line in lines})
    for number, name in enumerate(names):
        mine = [line for line in lines if str(line.contender) == name]
        xs = [line.bytes for line in mine]
        style = "--" if mine[0].contender.peer in ("socket", "copy") else "-"
        colour = f"C{number % 10}"
        middle = [line.median * 1e6 for line in mine]
        panel.plot(xs, middle, style, marker=".", color=colour, label=name)
        spread = [[edge * 1e6 for edge in line.quartiles] for line in mine]
        panel.fill_between(
            xs, [low for low, _ in spread], [high for _, high in spread], color=colour, alpha=0.2
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
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
