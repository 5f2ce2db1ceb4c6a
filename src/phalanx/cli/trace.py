"""`phalanx trace`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from phalanx.launch.tracing import Merged

__all__ = ["trace_command"]


def trace_command(
    *,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="What PHALANX_TRACE named when the job ran.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Instead of FOLDER/merged.json."),
    ] = None,
) -> None:
    """Merge the traces of a job's ranks into one, and sum them up.

    A job that runs with `PHALANX_TRACE=FOLDER` in its environment leaves there what each rank did
    when. The merged trace opens in https://ui.perfetto.dev and in chrome://tracing.

        PHALANX_TRACE=traces phalanx run -n 4 train.py

        phalanx trace traces
    """
    from phalanx.launch.tracing import merge  # noqa: PLC0415 -- other commands need none of it

    _show(merge(folder, output))


def _show(merged: Merged) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False)
    for name in ("rank", "operations", "MiB", "waiting s", "moving s", "errors", "last", "by s"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in merged.ranks:
        table.add_row(
            str(rank.rank),
            str(rank.operations),
            f"{rank.bytes / (1 << 20):.1f}",
            f"{rank.waiting:.3f}",
            f"{rank.moving:.3f}",
            str(rank.errors),
            str(rank.last),
            f"{rank.late:.3f}",
        )
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    straggler = merged.straggler
    if straggler is not None:
        console.print(
            f"The others waited most for rank {straggler.rank}: it was last at {straggler.last} of "
            f"{merged.collectives} collectives, by {straggler.late:.3f} s in all."
        )
    for note in merged.notes:
        console.print(f"Note: {note}", markup=False)
    console.print(f"{merged.path}: open it in https://ui.perfetto.dev", markup=False)
