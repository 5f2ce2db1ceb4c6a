"""Is the working tree as fast as a commit? `python benchmarks/gate.py --help`.

Both versions' ranks live side by side, and are timed in turn, in pairs:

    pair 1   row a: base tree   row b: base tree   ...        who is not timed is idle
    pair 2   row a: tree base   row b: tree base   ...

A time is that of the slowest rank, whose own is the median of some stretches of calls
(gate_rank.py), or that of a program in fresh processes. What counts is each pair's ratio, the
tree's time / the base's: what the machine does besides, and how it changes while this runs, is
the same for both.

A row fails if the lower bound of the median ratio is above its limit: 1.05, or what
`SLOWER_ON_PURPOSE` says. The bounds are ratios themselves, those of the lowest and highest rank
each of which is beyond the median with a probability of 5 % at most, whatever the distribution
(H. A. David and H. N. Nagaraja, Order Statistics, 3rd edition, 2003, section 7.1).

Two processes of the same code may differ by some percent for as long as they live. So a row that
would fail is timed again in fresh processes, and all its pairs count together, `TIMES` times.

Every result is checked. A row whose library is missing is left out, and said to be.

The exit status is 1 if a row fails, 2 if something could not be measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gate_processes import (
    GateError,
    Ranks,
    Version,
    git,
    lacks,
    make_versions,
    run_once,
    variables_by_hand,
)
from gate_rank import MOST_CALLS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

BASE = "8165af3"
PAIRS = 30
LIMIT = 1.05
CONFIDENCE = 0.95
TIMES = 3
SLOWER_ON_PURPOSE: Mapping[str, tuple[float, str]] = {
    "all_reduce 8 B, mpi, 2 ranks": (1.4, "every tenth call tells a neighbour the rolling hash"),
    "send_recv 8 B, mpi, 2 ranks": (2.5, "messages go over the mesh, not by MPI"),
}
"""Row -> its limit, and the reason why it may be slower."""

STRETCH, BLOCK = 0.001, 0.1  # seconds that a stretch and one side of a pair should take
STEPS = 50  # of the demo
SIZES = {"8 B": 8, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
COMMUNICATION = (
    ("all_reduce", ("shm", "tcp"), (2, 4), tuple(SIZES)),
    ("all_reduce", ("gloo", "mpi"), (2,), ("8 B", "1 MiB")),
    ("send_recv", ("gloo", "mpi"), (2,), ("8 B", "1 MiB")),
)

IMPORT = """
import json, time, torch
began = time.process_time()
import phalanx
phalanx.init, phalanx.DDP, phalanx.FSDP, phalanx.all_reduce
print(json.dumps({"seconds": time.process_time() - began, "file": phalanx.__file__}))
"""
HELP = """
import json, runpy, sys, time
sys.argv = ["phalanx", "--help"]
began = time.process_time()
try:
    runpy.run_module("phalanx", run_name="__main__")
except SystemExit as end:
    assert not end.code
seconds = time.process_time() - began
print(json.dumps({"seconds": seconds, "file": sys.modules["phalanx"].__file__}))
"""


class Row(NamedTuple):
    """What is compared: a task of some ranks (gate_rank.py), or a program of its own."""

    name: str
    backend: str = ""
    ranks: int = 2
    task: str = ""
    nbytes: int = 0
    program: Callable[[Version, Path], float] | None = None


def run_script(script: str, version: Version, folder: Path) -> float:
    """The processor's seconds that a fresh process says on its last line."""
    written = run_once(version, "import", folder / "script.out", (["-c", script], {}))
    said = json.loads(written.splitlines()[-1])
    version.check(said["file"])
    return float(said["seconds"])


def run_demo(version: Version, folder: Path) -> float:
    """The seconds of the demo's first steps by its own log, which has to show that it learned.

    They are those of the steps: no start, held-out losses, checkpoint, and sample.
    """
    out = folder / "demo"
    shutil.rmtree(out, ignore_errors=True)
    few = ["--eval-every", "0", "--checkpoint-every", "0", "--sample-bytes", "1"]
    command = ["examples/train_language_model.py", "--steps", str(STEPS), "--out", str(out), *few]
    ranks = ((command, variables) for variables in variables_by_hand(2))
    run_once(version, "demo", folder / "demo.out", *ranks)
    log = json.loads((out / "log.json").read_text())
    learned = log["final"]["held_out_before"] - log["final"]["held_out_after"]
    if len(log["steps"]) != STEPS or not learned > 1:
        raise GateError(f"{version.name}: the demo learned {learned:g} nats a byte in its steps")
    return float(log["final"]["seconds"])


def rows() -> Iterator[Row]:
    """All rows."""
    for task, backends, worlds, sizes in COMMUNICATION:
        for backend, ranks, size in itertools.product(backends, worlds, sizes):
            name = f"{task} {size}, {backend}, {ranks} ranks"
            yield Row(name, backend, ranks, task, SIZES[size])
    for task in ("ddp", "fsdp"):
        for backend in ("shm", "tcp"):
            yield Row(f"{task} step, {backend}, 2 ranks", backend, 2, task)
    yield Row(f"demo, {STEPS} steps, 2 ranks", program=run_demo)
    yield Row("import phalanx, torch apart", program=partial(run_script, IMPORT))
    yield Row("phalanx --help", program=partial(run_script, HELP))


def bounds(ratios: Sequence[float]) -> tuple[float, float]:
    """Between which the median lies; each holds with `CONFIDENCE`. Fewer than five say nothing.

    The k-th lowest of n is above the median if fewer than k of n are below it: by the binomial
    distribution. k is the highest for which that is improbable enough.
    """
    count, below, k = len(ratios), 0, 0
    while (below := below + math.comb(count, k)) <= (1 - CONFIDENCE) * 2**count:
        k += 1
    if k == 0:
        return 0.0, math.inf
    ordered = sorted(ratios)
    return ordered[k - 1], ordered[-k]


class Outcome(NamedTuple):
    """A row's times, pair by pair."""

    row: str
    base: list[float]
    tree: list[float]

    @property
    def ratios(self) -> list[float]:
        """The tree's time / the base's, of pairs that are whole."""
        return [tree / base for base, tree in zip(self.base, self.tree, strict=False)]

    @property
    def fails(self) -> bool:
        """Whether the row is slower than it may be."""
        return bounds(self.ratios)[0] > SLOWER_ON_PURPOSE.get(self.row, (LIMIT, ""))[0]

    @property
    def verdict(self) -> str:
        """For people; `unclear` passes: more pairs would tell."""
        _, high = bounds(self.ratios)
        limit, reason = SLOWER_ON_PURPOSE.get(self.row, (LIMIT, ""))
        found = "faster" if high < 1 / LIMIT else "as fast" if high <= limit else "unclear"
        found = "SLOWER" if self.fails else found
        return f"{found}; limit {limit:g} on purpose: {reason}" if reason else found


class Gate:
    """Both versions' ranks, started when a row first needs them, and what times each row."""

    def __init__(self, versions: Sequence[Version], folder: Path) -> None:
        self._versions, self._folder = versions, folder
        self._ranks: dict[tuple[str, int], list[Ranks]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prepare(self, row: Row) -> tuple[Callable[[], float], Callable[[], float]]:
        """Start and warm up what the row needs; returns what times the base, and the tree."""
        if row.program is not None:
            base, tree = (partial(row.program, one, self._folder) for one in self._versions)
            base(), tree()  # they compile
            return base, tree
        both = self._ranks.setdefault((row.backend, row.ranks), [])
        for version in self._versions[len(both) :]:
            both.append(Ranks(version, row.backend, row.ranks, self._folder))
            self._stack.callback(both[-1].close)
        for calls in (1, 8):  # the first connects, and touches memory
            seconds, _ = (ranks.time(row.task, row.nbytes, calls, 0.0) for ranks in both)
        calls = min(MOST_CALLS, max(1, round(STRETCH / seconds)))
        base, tree = (partial(one.time, row.task, row.nbytes, calls, BLOCK) for one in both)
        return base, tree


def compare(gate: Gate, table: Mapping[Row, Outcome], pairs: int, console: Console) -> None:
    """Time the rows, pair by pair; each outcome gets as many more."""
    shows = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*shows, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("", total=pairs * len(table))
        sides = {}
        for row in table:
            progress.update(bar, description=f"warming up {row.name}")
            sides[row] = gate.prepare(row)
        for pair in range(pairs):
            if not console.is_terminal:
                console.print(f"pair {pair + 1} of {pairs}")
            for row, outcome in table.items():
                progress.update(bar, description=row.name)
                for side in (0, 1) if pair % 2 == 0 else (1, 0):
                    (outcome.base, outcome.tree)[side].append(sides[row][side]())
                progress.advance(bar)


def table_of(outcomes: Iterable[Outcome], left_out: Mapping[str, str], title: str) -> Table:
    """For people."""
    table = Table(title=title)
    for number, heading in enumerate(("", "base us", "tree us", "tree / base", "low", "high", "")):
        table.add_column(heading, justify="right" if 0 < number < 6 else "left")
    for outcome in outcomes:
        microseconds = (f"{statistics.median(times) * 1e6:,.1f}" for times in outcome[1:])
        ratios = (statistics.median(outcome.ratios), *bounds(outcome.ratios))
        table.add_row(
            outcome.row, *microseconds, *(f"{ratio:.3f}" for ratio in ratios), outcome.verdict
        )
    for name, reason in left_out.items():
        table.add_row(name, *[""] * 5, f"left out: {reason}")
    return table


def chosen(only: Sequence[str]) -> tuple[list[Row], dict[str, str]]:
    """The rows that have one of these texts in their names; and of those why some are left out."""
    wanted = [row for row in rows() if not only or any(text in row.name for text in only)]
    reasons = {backend: lacks(backend) for backend in {row.backend for row in wanted}}
    left_out = {row.name: reasons[row.backend] for row in wanted if reasons[row.backend]}
    return [row for row in wanted if row.name not in left_out], left_out


def measure(outcomes: Mapping[Row, Outcome], commit: str, pairs: int, console: Console) -> str:
    """Fill in the outcomes; returns what has come in between, if anything."""
    try:
        with tempfile.TemporaryDirectory(prefix="gate-") as name:
            folder = Path(name)
            versions = make_versions(commit, folder)
            table = outcomes
            for _ in range(TIMES):
                with Gate(versions, folder) as gate:
                    compare(gate, table, pairs, console)
                table = {row: one for row, one in outcomes.items() if one.fails}
                if not table:
                    break
    except GateError as error:
        return str(error)
    except KeyboardInterrupt:
        return "interrupted"
    return ""


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default=BASE, help="a commit (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of each row")
    parser.add_argument("--only", action="append", default=[], help="rows with this in their name")
    parser.add_argument("--list", action="store_true", help="name all rows, and do nothing")
    parser.add_argument("--json", type=Path, help="also write all times there, in seconds")
    asked = parser.parse_args()
    if asked.list:
        print(*(row.name for row in rows()), sep="\n")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the ranks would stay
    try:
        commit = git("rev-parse", "--verify", f"{asked.base}^{{commit}}").decode().strip()
    except GateError as error:
        parser.error(str(error))
    table, left_out = chosen(asked.only)
    if asked.pairs < 1 or not (table or left_out):
        parser.error("that compares nothing; --list names all rows")
    outcomes = {row: Outcome(row.name, [], []) for row in table}
    problem = measure(outcomes, commit, asked.pairs, Console(stderr=True))
    measured = [one for one in outcomes.values() if one.ratios]
    busy = f"load {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores"
    title = f"the working tree / {commit[:10]}: {asked.pairs} pairs a row, bounds of 95 %, {busy}"
    console = Console(width=max(110, Console().width))
    console.print(table_of(measured, left_out, title))
    if asked.json:
        times = {one.row: {"base": one.base, "tree": one.tree} for one in measured}
        figures = {"base": commit, "rows": times, "left out": left_out}
        asked.json.write_text(json.dumps(figures, indent=1) + "\n")
    if problem:
        print(problem, file=sys.stderr)
        return 2
    failed = [one.row for one in measured if one.fails]
    print(f"slower than allowed: {'; '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
