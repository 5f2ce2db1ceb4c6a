"""Time over size, of what `phalanx bench --json FILE` has measured, as a picture.

    phalanx bench all_gather --backends shm,gloo --ranks 2,4 --sizes 8..256M --json gather.json
    python benchmarks/picture.py gather.json gather.png

Both scales are logarithmic; there is a panel for each operation and number of ranks. The form of
the picture is that of its name, one of those that matplotlib writes.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from matplotlib.figure import Figure

from phalanx.files import replacing
from phalanx.ops.bench.peers import MACHINE
from phalanx.ops.bench.request import BenchRequest, show_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = dict[str, Any]
"""One of the file's "lines"."""


def draw(figures: bytes, path: Path) -> None:
    """Write a picture, with a panel for each operation and number of ranks, to `path`.

    `figures` is what `phalanx bench --json` has written.
    """
    found = json.loads(figures)
    lines: list[Line] = found["lines"]
    circumstances = msgspec.convert(found["ask"], BenchRequest).circumstances
    panels: dict[str, list[Line]] = {}
    for line in lines:
        if line["bytes"]:
            title = f"{line['operation']}, {line['ranks']} ranks{circumstances}"
            panels.setdefault(title, []).append(line)
    columns = max(1, min(2, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(6.4 * columns, 4.8 * rows), layout="constrained")
    axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, (title, own) in zip(axes, panels.items(), strict=False):
        _draw_panel(panel, own)
        panel.set_title(title)
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    with replacing(os.path.realpath(path)) as file, open(file, "wb", closefd=False) as out:
        figure.savefig(out, format=path.suffix[1:].lower(), dpi=120)


def _draw_panel(panel: Axes, lines: list[Line]) -> None:
    for number, name in enumerate(dict.fromkeys(line["contender"] for line in lines)):
        own = [line for line in lines if line["contender"] == name]
        sizes = [line["bytes"] for line in own]
        style = "--" if own[0]["peer"] in MACHINE else "-"
        colour = f"C{number % 10}"
        middle = [line["median_us"] for line in own]
        panel.plot(sizes, middle, style, marker=".", color=colour, label=name)
        low, high = zip(*(line["quartiles_us"] for line in own), strict=True)
        panel.fill_between(sizes, low, high, color=colour, alpha=0.2)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    sizes = sorted({line["bytes"] for line in lines})
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


def main() -> None:
    """Read the figures, and draw them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", type=Path, metavar="FILE.json")
    parser.add_argument("picture", type=Path, metavar="FILE.png")
    asked = parser.parse_args()
    known = Figure().canvas.get_supported_filetypes()
    if asked.picture.suffix[1:].lower() not in known:
        parser.error(f"{asked.picture}: a picture is a file of one of {', '.join(sorted(known))}")
    draw(asked.figures.read_bytes(), asked.picture)


if __name__ == "__main__":
    main()
