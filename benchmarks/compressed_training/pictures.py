"""Loss against bytes, as a picture: where each row ends, and how it comes there."""

from __future__ import annotations

import io
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from language_model.history import replace_file
from language_model.plot import GRID, INK, MUTED, SURFACE

from compressed_training.rows import DENSE
from compressed_training.runs import Runs
from compressed_training.summary import CLOSE, Summary, curve


def draw(path: Path, runs: Runs, summaries: Sequence[Summary], title: str) -> bool:
    """Write a PNG; False without matplotlib.

    Rows whose loss is no number at the end are left out.

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
    summaries = [one for one in summaries if isfinite(one.loss.high + one.loss.low)]
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
    ends.margins(x=0.15, y=0.3)
    ends.set_xlabel("bytes sent by a rank, in all", color=MUTED)
    ends.set_ylabel("held-out loss at the end, nats a byte", color=MUTED)
    ends.set_title(f"{title}\ndense, and 3 % above it", loc="left", color=INK, fontsize=10)
    ways.set_xlabel("step", color=MUTED)
    ways.set_ylabel("held-out loss, nats a byte", color=MUTED)
    first = max((curve(runs.of(one.row))[1][1] for one in summaries), default=1.0)
    ways.set_ylim(top=1.1 * first)  # what all begin with says nothing
    ways.legend(
        frameon=False, fontsize=8, labelcolor=INK, loc="center left", bbox_to_anchor=(1.0, 0.5)
    )
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
    """Names beside the points, slanted, so that neighbours stay apart; below those that are close
    to dense; one for those that fall together.
    """
    groups: list[list[Summary]] = []
    for one in sorted(summaries, key=lambda one: (one.nbytes, one.loss.median)):
        near = groups[-1][0] if groups else one
        together = one.nbytes < 1.02 * near.nbytes and one.loss.median < 1.01 * near.loss.median
        if groups and together:
            groups[-1].append(one)
        else:
            groups.append([one])
    dense = min((one.loss.median for one in summaries if one.row == DENSE), default=0.0)
    for group in groups:
        up = group[0].loss.median > (1 + CLOSE) * dense
        end = max(one.loss.high for one in group) if up else min(one.loss.low for one in group)
        axes.annotate(
            ",  ".join(one.row for one in group),
            (group[0].nbytes, end),
            xytext=(-2, 5 if up else -5),
            textcoords="offset points",
            rotation=45 if up else -45,
            rotation_mode="anchor",
            verticalalignment="baseline" if up else "top",
            color=INK,
            fontsize=8,
        )
