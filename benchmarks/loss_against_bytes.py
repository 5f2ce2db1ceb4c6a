"""Loss against bytes sent: `python benchmarks/loss_against_bytes.py --help`.

The language-model example is trained, from the same beginning, on the same batches and with the
same schedule, in each of the ways of a table (compressed_training/rows.py), for several seeds, on
ranks that are processes and talk over TCP. Of each run: the held-out loss, looked at in windows
that are the same for all, and the bytes that a rank has sent.

Checked: dense training has the losses of one process with the joined batch; ranks end with the same
bits; the bytes that are counted are those that the backend is given.

Every run that has ended is in the file at once; `--resume` makes those that are missing, or that
were made in another way than the row says now. The exit status is 1 if anything is wrong, or a row
that is a target misses it: 3 % above dense at equal steps, with 30 times fewer bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import torch
from compressed_training.pictures import draw
from compressed_training.rows import DENSE, chosen, rows
from compressed_training.runs import OtherRunsError, Runs
from compressed_training.summary import complaints, summarize, verdicts
from compressed_training.tables import markdown_of, table_of
from compressed_training.training import plain_losses, read_lesson, settings_of, train
from language_model.options import Options
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import phalanx as px

CHECKED = 5  # steps that are compared with one process


def make_missing(
    backend: px.Backend, options: Options, wanted: list[tuple[str, int]], path: Path, known: Runs
) -> None:
    """One rank's part: train these rows with these seeds. Rank 0 keeps what comes of them."""
    torch.set_num_threads(1)
    table, lesson = rows(), read_lesson(options)
    leads = backend.rank == 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not leads) as progress:
        bar = progress.add_task("steps", total=len(wanted) * options.steps)
        for number, (name, seed) in enumerate(wanted, start=1):
            what = f"run {number} of {len(wanted)}: {name}, seed {seed}"
            progress.update(bar, description=what)
            seeded = with_seed(options, seed)
            run = train(name, table[name], seeded, lesson, backend, lambda: progress.advance(bar))
            if leads:
                known.put(run)
                known.save(path)
                progress.console.print(f"{what}: {run.held_out[-1]:.3f}", markup=False)


def with_seed(options: Options, seed: int) -> Options:
    """The same training from another beginning, on other batches."""
    return Options(**{**vars(options), "seed": seed})


def check(known: Runs, options: Options) -> list[str]:
    """What is wrong with the runs."""
    lesson = read_lesson(options)
    found = []
    for run in known.runs:
        plain: list[float] = []
        if run.row == DENSE:
            steps = min(CHECKED, options.steps)
            ranks = known.settings["ranks"]
            plain = plain_losses(with_seed(options, run.seed), lesson, ranks, steps)
        found += complaints(run, plain)
    return found


def show(known: Runs, folder: Path) -> list[str]:
    """The table, the document's table, and the picture; and which targets are missed."""
    table, settings = rows(), known.settings
    summaries = summarize(known, table)
    seeds = max((one.seeds for one in summaries), default=0)
    of = f"medians of {seeds} seeds" if seeds > 1 else "one seed"
    title = (
        f"language model, {settings['layers']} layers of {settings['width']}, {settings['steps']} "
        f"steps, {settings['ranks']} ranks, {of}"
    )
    console = Console(width=max(120, Console().width))
    console.print(table_of(summaries, title=title, steps=settings["steps"]))
    (folder / "table.md").write_text(markdown_of(summaries, settings["steps"]))
    if not draw(folder / "loss_against_bytes.png", known, summaries, title):
        console.print("no picture: matplotlib is not installed")
    said = verdicts(summaries, table)
    for _, text in said:
        console.print(text, markup=False)
    return [text for reached, text in said if not reached]


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    example = Options()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    parser.add_argument("--only", default="", metavar="ROW,...", help="and dense; default: all")
    parser.add_argument("--resume", action="store_true", help="keep the runs that --out has")
    parser.add_argument("--out", type=Path, default=Path("runs/loss_against_bytes"))
    for name in ("steps", "batch_size", "layers", "width", "heads", "context", "eval_every"):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=getattr(example, name))
    parser.add_argument("--data", help="text to learn from (default: Python's library)")
    asked = parser.parse_args()
    options = Options(**{k: v for k, v in vars(asked).items() if k in vars(example) and k != "out"})
    options = Options(**{**vars(options), "resume": None})
    names = [name.strip() for name in asked.only.split(",") if name.strip()]

    settings, path = settings_of(options, asked.ranks), asked.out / "runs.json"
    known = Runs(settings)
    if path.exists():
        if not asked.resume:
            parser.error(f"{path} is there: --resume keeps its runs; or give another --out")
        try:
            known = Runs.load(path, settings)
        except OtherRunsError as error:
            parser.error(str(error))
    try:
        table = chosen(names)
    except ValueError as error:
        parser.error(str(error))
    wanted = [
        (name, seed)
        for seed in range(asked.seeds)
        for name, row in table.items()
        if known.find(name, str(row), seed) is None
    ]
    if wanted:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        part = partial(make_missing, options=options, wanted=wanted, path=path, known=known)
        try:
            px.spawn(part, asked.ranks, "tcp")
        except KeyboardInterrupt:
            print(f"interrupted: --resume goes on from {path}", file=sys.stderr)
            return 130
        known = Runs.load(path, settings)
    wrong = check(known, options)
    missed = show(known, asked.out)
    for text in wrong:
        print(f"WRONG: {text}", file=sys.stderr)
    return 1 if wrong or missed else 0


if __name__ == "__main__":
    sys.exit(main())
