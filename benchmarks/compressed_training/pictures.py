"""Loss against bytes, as a picture: where each row ends, and how it comes there."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from language_model.history import replace_file
from language_model.plot import GRID, INK, MUTED, SURFACE

from compressed_training.rows import DENSE
from compressed_training.runs import Runs
from compressed_training.summary import CLOSE, Summary, curve


def draw(path: Path, runs: Runs, summaries: Sequence[Summary], title: str) -> bool:
    """Write a PNG; False without matplotlib.

    left    bytes that a rank has sent in all, and the held-out loss at the end: the median of the
            seeds, with a bar from the lowest to the highest
    right   the held-out loss over the steps, median of the seeds
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - nothing else here needs it
    except ImportError:
        return False
    figure = Figure(figsize=(12, 5.5), dpi=120, layout="constrained", facecolor=SURFACE)
    ends, ways = figure.subplots(1, 2)
    colours = {one.row: f"C{number % 10}" for number, one in enumerate(summaries)}
    marks = {one.row: "os^Dv"[number // 10 % 5] for number, one in enumerate(summaries)}

    for one in sorted(summaries, key=lambda one: one.loss.median):
        low, middle, high = one.loss
        how = {"color": colours[one.row], "marker": marks[one.row], "capsize": 3}
        ends.errorbar(one.nbytes, middle, [[middle - low], [high - middle]], **how)
        ways.plot(
            *curve(runs.of(one.row)),
            color=colours[one.row],
            marker=marks[one.row],
            markersize=3,
            linewidth=1.2,
            label=one.row,
        )
    _label(ends, summaries)
    for one in summaries:
        if one.row == DENSE:
            for factor, style in ((1.0, "-"), (1 + CLOSE, "--")):
                ends.axhline(one.loss.median * factor, color=MUTED, linewidth=0.8, linestyle=style)
    ends.set_xscale("log")
    ends.set_xlabel("bytes sent by a rank, in all", color=MUTED)
    ends.set_ylabel("held-out loss at the end, nats a byte", color=MUTED)
    ends.set_title(f"{title}\ndense, and 3 % above it", loc="left", color=INK, fontsize=10)
    ways.set_xlabel("step", color=MUTED)
    ways.set_ylabel("held-out loss, nats a byte", color=MUTED)
    ways.set_yscale("log")
    ways.legend(frameon=False, fontsize=8, labelcolor=INK)
    for axes in (ends, ways):
        axes.set_facecolor(SURFACE)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=MUTED, which="both", length=0)

    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    replace_file(path, picture.getvalue())
    return True


def _label(axes: Any, summaries: Sequence[Summary]) -> None:
    """Names beside the points, above and below in turn, so that neighbours stay apart."""
    for number, one in enumerate(sorted(summaries, key=lambda one: (one.nbytes, one.loss.median))):
        axes.annotate(
            one.row,
            (one.nbytes, one.loss.median),
            xytext=(5, 6 if number % 2 else -11),
            textcoords="offset points",
            color=INK,
            fontsize=8,
        )
