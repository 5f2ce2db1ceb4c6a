"""Training steps over a slow link: `python benchmarks/slow_link.py --help`. Needs root.

Two hosts are network namespaces, and what each sends is held to 100 Mbit/s by a token bucket. Two
ranks, one on each, train the language-model example over TCP in each of the ways of the table
(compressed_training/rows.py), in interleaved rounds of the same processes; `no communication` is
the same step of a rank that trains by itself. `busy` is the part of a step in which a rank had a
processor; the rest is the link, and whatever else the machine does.

Checked: the link gives what it should; after the first steps every way has the same bits as on two
ranks in one process; ranks have the same bits at the end.

The exit status is 1 if anything is wrong, or a row that is a target is not 5 times as fast as
dense on a link of 100 Mbit/s or less.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from compressed_training.rows import DENSE, Row, chosen, ddp
from compressed_training.timing import (
    ALONE,
    Timed,
    alone,
    in_one_process,
    link_speed,
    time_all,
    times_faster,
)
from compressed_training.training import read_lesson
from language_model.options import Options
from linked_hosts import HOSTS, LinkedHosts, NoLinkError
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import phalanx as px

FASTER = 5.0
SLOW = 100.0  # Mbit/s: on faster links no row has to be faster
HELD = (0.8, 1.02)  # of the rate: what a link that is held to it gives
FIRST = 6  # steps that are not timed, and compared with one process; some rows begin dense
ROWS = (
    "half,8 bits + ef,1 bit + ef,top 1 % + ef,top 1 % kept,"
    "power 4 + ef,power 4 bf16 + ef,power 4 bf16 kept"
)
SMALLER = 1 << 20  # bytes of a bucket: so dense training sends while it computes


def ways(names: str) -> dict[str, Row]:
    """What is timed."""
    others = chosen(name.strip() for name in names.split(","))
    return {
        ALONE: Row(alone),
        DENSE: others.pop(DENSE),
        "dense, 1 MiB buckets": Row(ddp(bucket_size=SMALLER)),
        **others,
    }


def work(asked: argparse.Namespace) -> None:
    """One rank's part. Rank 0 writes what all have found."""
    torch.set_num_threads(1)
    options = options_of(asked)
    lesson, table = read_lesson(options), ways(asked.only)
    with px.init("tcp") as backend:
        speeds = [link_speed(backend) for _ in range(3)]
        leads = backend.rank == 0
        with Progress(console=Console(stderr=True), disable=not leads) as progress:
            bar = progress.add_task("rounds", total=asked.rounds * len(table))
            timed = time_all(
                table,
                options,
                lesson,
                backend,
                rounds=asked.rounds,
                steps=asked.steps,
                first=FIRST,
                advanced=lambda: progress.advance(bar),
            )
        speed = torch.tensor(statistics.median(speeds))
        px.all_reduce_(speed, backend, px.ReduceOp.MIN)
        if leads:
            found = {"speed": speed.item(), "timed": {n: asdict(one) for n, one in timed.items()}}
            asked.work.write_text(json.dumps(found))


def measure(asked: argparse.Namespace, arguments: list[str]) -> tuple[float, dict[str, Timed]]:
    """The link's megabits a second, and what each way took."""
    with tempfile.TemporaryDirectory() as folder, LinkedHosts(asked.megabits) as hosts:
        result = Path(folder) / "timed.json"
        command = (sys.executable, __file__, *arguments, "--work", str(result))
        with hosts.job(*command) as processes:
            codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}: what they say is above")
        found = json.loads(result.read_text())
    return found["speed"], {name: Timed(**one) for name, one in found["timed"].items()}


def complaints(asked: argparse.Namespace, speed: float, timed: dict[str, Timed]) -> Iterator[str]:
    """What is wrong."""
    low, high = (part * asked.megabits for part in HELD)
    if not low <= speed <= high:
        yield f"the link gives {speed:.1f} Mbit/s, and not {asked.megabits:g}"
    options, table = options_of(asked), ways(asked.only)
    lesson = read_lesson(options)
    torch.set_num_threads(1)
    for name, one in timed.items():
        if one.begun != in_one_process(table[name], options, lesson, HOSTS, FIRST):
            yield f"{name}: other bits after {FIRST} steps than on ranks of one process"
        if name != ALONE and len(set(one.ended)) > 1:
            yield f"{name}: the ranks ended with other parameters"


def show(asked: argparse.Namespace, speed: float, timed: dict[str, Timed]) -> list[str]:
    """The table; and which targets are missed."""
    options, table = options_of(asked), ways(asked.only)
    title = (
        f"{options.layers} layers of {options.width}, {options.batch_size} x {options.context} "
        f"bytes a rank, a link of {speed:.1f} Mbit/s, median of {asked.rounds} rounds"
    )
    shown = Table(box=box.MARKDOWN)
    for number, heading in enumerate(
        ("", "ms a step", "of it busy", "dense's / this", "bytes a step")
    ):
        shown.add_column(heading, justify="right" if number else "left")
    plain, missed = timed[DENSE].seconds, []
    for name, one in timed.items():
        faster = times_faster(plain, one.seconds)
        milliseconds = f"{statistics.median(one.seconds) * 1e3:,.1f}"
        busy = f"{one.busy * 1e3:,.1f}"
        shown.add_row(name, milliseconds, busy, f"{faster:.2f}", f"{one.nbytes:,.0f}")
        if table[name].target and asked.megabits <= SLOW and faster < FASTER:
            missed.append(f"{name}: {faster:.1f} times as fast as dense: MISSES {FASTER:g}")
    console = Console(width=max(100, Console().width))
    console.print(title, shown, sep="\n")
    return missed


def options_of(asked: argparse.Namespace) -> Options:
    """The example's, with what was asked for."""
    names = ("layers", "width", "heads", "context", "batch_size", "data")
    return Options(**{name: getattr(asked, name) for name in names})


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabits", type=float, default=100.0, help="a second, out of each host")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="of each way in a round")
    parser.add_argument("--only", default=ROWS, metavar="ROW,...", help="default: %(default)s")
    for name in ("batch_size", "layers", "width", "heads", "context"):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=getattr(Options(), name))
    parser.add_argument("--data", help="text to learn from (default: Python's library)")
    parser.add_argument("--json", type=Path, help="also write all figures there")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # this is a rank
    asked = parser.parse_args()
    try:
        ways(asked.only)
    except ValueError as error:
        parser.error(str(error))
    if asked.work is not None:
        work(asked)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the hosts would stay
    try:
        speed, timed = measure(asked, sys.argv[1:])
    except NoLinkError as error:
        print(f"no slow link can be made here: {error}", file=sys.stderr)
        return 2
    missed = show(asked, speed, timed)
    if asked.json:
        figures = {"speed": speed, "timed": {name: asdict(one) for name, one in timed.items()}}
        asked.json.write_text(json.dumps(figures, indent=1) + "\n")
    wrong = list(complaints(asked, speed, timed))
    for text in [*(f"WRONG: {text}" for text in wrong), *missed]:
        print(text, file=sys.stderr)
    return 1 if wrong or missed else 0


if __name__ == "__main__":
    sys.exit(main())
