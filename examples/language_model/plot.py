"""The loss curve of a run, as a picture."""

from __future__ import annotations

import io
from pathlib import Path

from language_model.history import History, replace_file

SURFACE, INK, MUTED, GRID = "#fcfcfb", "#0b0b0b", "#52514e", "#e1e0d9"
BLUE, ORANGE = "#2a78d6", "#eb6834"


def draw_loss(path: Path, history: History, title: str) -> bool:
    """Write a PNG of training and held-out loss over the steps; False without matplotlib."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - nothing else here needs it
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained", facecolor=SURFACE)
    axes = figure.add_subplot(facecolor=SURFACE)

    steps = [point.step for point in history.steps]
    losses = [point.loss for point in history.steps]
    axes.plot(steps, losses, color=BLUE, alpha=0.3, linewidth=1)
    axes.plot(steps, _smooth(losses), color=BLUE, linewidth=2, label="training, smoothed")
    axes.plot(
        [point.step for point in history.held_out],
        [point.loss for point in history.held_out],
        color=ORANGE,
        linewidth=2,
        marker="o",
        markersize=7,
        markeredgecolor=SURFACE,
        markeredgewidth=1.5,
        clip_on=False,
        zorder=3,
        label="held out",
    )
    if history.held_out:
        last = history.held_out[-1]
        axes.annotate(
            f"{last.loss:.2f}",
            (last.step, last.loss),
            xytext=(0, 10),
            textcoords="offset points",
            ha="center",
            color=INK,
            fontsize=10,
        )
    axes.set_title(title, loc="left", color=INK, fontsize=12, pad=12)
    axes.set_xlabel("step", color=MUTED)
    axes.set_ylabel("loss (nats a byte)", color=MUTED)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#c3c2b7")
    axes.legend(frameon=False, labelcolor=INK)

    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    replace_file(path, picture.getvalue())
    return True


def _smooth(values: list[float], memory: float = 0.9) -> list[float]:
    """The exponential mean, unbiased at the beginning (as Adam's)."""
    smoothed: list[float] = []
    mean = 0.0
    for count, value in enumerate(values, start=1):
        mean = memory * mean + (1 - memory) * value
        smoothed.append(mean / (1 - memory**count))
    return smoothed
