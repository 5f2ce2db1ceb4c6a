"""The measured numbers of this repository, on one page: `make numbers` rewrites docs/numbers.md.

    make numbers
    make numbers ARGS="--only steps,memory"

Each part of the page is what one command found: these commands run one after the other, and check
their results themselves. With the tables stand the command, the day, the commit and the machine. A
command that fails leaves its part as it was, and then the exit status is 1. Those between hosts
need root; `loss` takes half an hour, the others about as long together.

README shows a few of the rows, and is rewritten with them.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pages
from compressed_training.rows import DENSE
from picture import draw
from rich.console import Console

from phalanx.ops.bench.request import show_size
from phalanx.ops.machine import describe_machine

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "numbers.md", ROOT / "README.md"
FOLDER = "FOLDER"  # stands in a command for a temporary folder, into which it writes
FIGURES = "figures.json"
WIDTH = "240"  # columns of a terminal, so that no cell of a table is broken


class Found(NamedTuple):
    """What a command has printed, and written into its file."""

    printed: str
    written: str = ""


Shown = Callable[[Sequence[Found]], Iterator[str]]


class Part(NamedTuple):
    """A part of the page.

    commands  in the repository; `FOLDER` is another one for each
    show      yields the lines of the tables of what they have found
    file      that each writes in its folder
    readme    as `show`, for README, if it has this part
    picture   of time over size, of what `phalanx bench` has found
    environ   besides today's
    """

    commands: Sequence[str]
    show: Shown
    file: str = FIGURES
    readme: Shown | None = None
    picture: Path | None = None
    environ: Mapping[str, str] = MappingProxyType({})


# ------------------------------------------------------------------------------
# Tables of Markdown.


def printed(found: Sequence[Found]) -> Iterator[str]:
    """The tables that a program prints, as they are, each with the line above it as its title."""
    for one in found:
        above = ""
        for line in one.printed.splitlines():
            text = re.sub(r"^\[rank \d+\] ", "", line).strip()
            if text.startswith("|"):
                if not above.startswith("|"):
                    yield from ("", *([f"**{above}**", ""] if above else []))
                yield text
            above = text or above


def written(found: Sequence[Found]) -> Iterator[str]:
    """The table that a program writes."""
    for one in found:
        yield from one.written.splitlines()


def bench_lines(found: Sequence[Found]) -> Iterator[Mapping[str, Any]]:
    """The figures that `phalanx bench --json` writes."""
    for one in found:
        yield from json.loads(one.written)["lines"]


def row(cells: Sequence[object]) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def headings(cells: Sequence[str], left: int = 1) -> Iterator[str]:
    """The first two lines of a table, whose first `left` columns are words."""
    yield row(cells)
    yield "|" + "---|" * left + "---:|" * (len(cells) - left)


def number(value: float) -> str:
    """With a digit after the point, if it is less than 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


NAMES = {
    "shm": "shm",
    "shm registered": "shm, registered",
    "tcp": "tcp",
    "gloo": "Gloo",
    "mpi": "OpenMPI",
}

GLOO, OURS = "Gloo", ("shm", "shm, registered", "tcp")


def collectives(
    found: Sequence[Found], sizes: Sequence[int] = (), ranks: Sequence[int] = ()
) -> Iterator[str]:
    """Microseconds by size, and Gloo's over Phalanx's: a table for each operation and ranks."""
    for (operation, of_ranks), group in itertools.groupby(
        bench_lines(found), lambda line: (line["operation"], line["ranks"])
    ):
        if ranks and of_ranks not in ranks:
            continue
        by_size: dict[int, dict[str, float]] = {}
        for line in group:
            if name := NAMES.get(line["contender"]):
                by_size.setdefault(line["bytes"], {})[name] = line["median_us"]
        shown = [name for name in NAMES.values() if any(name in us for us in by_size.values())]
        ratios = [name for name in OURS if name in shown] if GLOO in shown else []
        yield from ("", f"**{operation}, {of_ranks} ranks**", "")
        yield from headings(["bytes", *shown, *(f"{GLOO} / {name}" for name in ratios)], 0)
        for size, us in by_size.items():
            if not sizes or size in sizes:
                cells = [number(us[name]) if name in us else "" for name in shown]
                times = [f"{us[GLOO] / us[name]:.1f}" if name in us else "" for name in ratios]
                yield row([show_size(size), *cells, *times])


STEPS = {
    "shm": "Phalanx, shm",
    "tcp": "Phalanx, tcp",
    "stock": "torch's wrapper over Phalanx",
    "stock+group-memory": "torch's wrapper over Phalanx, in its memory",
    "gloo": "torch's wrapper over Gloo",
    "alone": "the step without communication",
}


def steps(found: Sequence[Found]) -> Iterator[str]:
    """Milliseconds of a step, and how many times as long torch's own takes over Gloo."""
    yield from headings(["", *(f"{name}{of}" for name in ("DDP", "FSDP") for of in (", ms", ""))])
    by_operation: dict[str, dict[str, Mapping[str, Any]]] = {"ddp": {}, "fsdp": {}}
    for line in bench_lines(found):
        by_operation[line["operation"]][line["contender"]] = line
    for peer, name in STEPS.items():
        cells: list[str] = []
        for lines in by_operation.values():
            if line_of := lines.get(peer):
                gloo = lines["gloo"]["median_us"] / line_of["median_us"]
                cells += [f"{line_of['median_us'] / 1e3:,.0f}", f"{gloo:.1f}"]
            else:
                cells += ["", ""]
        yield row([name, *cells])


def peaks(found: Sequence[Found]) -> Iterator[str]:
    """MiB of the rank that had most, as it is and with freed memory given back."""
    yield from headings(["", "peak", "given back"])
    for line in bench_lines(found):
        most = [max(line[f"{way}_bytes"]["training"]) / (1 << 20) for way in ("peak", "held")]
        yield row([STEPS[line["contender"]], *(f"{mib:,.0f}" for mib in most)])


def tries(found: Sequence[Found]) -> Iterator[str]:
    """Rows of how often something went well, and the slowest."""
    yield from headings(["", "right", "worst"])
    for one in found:
        for cells in re.findall(r"^(\S.*?) +(\d+ of \d+) +worst (.+)$", one.printed, re.MULTILINE):
            yield row(cells)


def formulas(found: Sequence[Found]) -> Iterator[str]:
    """The least and the most of the peaks of all runs and ranks, each as a part of its formula."""
    by_name: dict[str, list[float]] = {}
    for name, of in re.findall(
        r"^(?:\S*\.(?:py )?)?(.+): (\d\.\d\d)$", "\n".join(one.printed for one in found), re.M
    ):
        by_name.setdefault(name, []).append(float(of))
    yield from headings(["", "measured, of the formula"])
    for name, parts in by_name.items():
        yield row([name, f"{min(parts):.2f} to {max(parts):.2f}"])


def crossings(found: Sequence[Found]) -> Iterator[str]:
    """Milliseconds of a step by the link, and how many times as long a dense one takes."""
    links = [json.loads(one.written) for one in found]
    yield from headings(
        ["", *(f"{link['speed']:,.0f} Mbit/s{of}" for link in links for of in (", ms", ""))]
    )
    dense = [statistics.median(link["timed"][DENSE]["seconds"]) for link in links]
    for name in links[0]["timed"]:
        cells: list[str] = []
        for link, plain in zip(links, dense, strict=True):
            seconds = statistics.median(link["timed"][name]["seconds"])
            cells += [f"{seconds * 1e3:,.0f}", f"{plain / seconds:.2f}"]
        yield row([name, *cells])


# ------------------------------------------------------------------------------
# The parts.

JSON = f"--json {FOLDER}/{FIGURES}"
OTHERS = "python benchmarks/other_libraries.py"
SLOW_LINK = f"python benchmarks/slow_link.py {JSON}"
CROSSING = (
    f"{SLOW_LINK} --width 512 --heads 8 --batch-size 1 --rounds 5 --steps 1 "
    "--only 'half,8 bits + ef,top 1 % kept,power 4 bf16 kept'"
)
SIZES_OF_README = tuple(8 << bits for bits in (0, 9, 15, 18, 21, 25))
TRUSTED = MappingProxyType({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
KEPT = MappingProxyType(
    {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
)

PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "all_reduce": Part(
            [f"phalanx bench all_reduce --ranks 2,4 --sizes 8..256M --rounds 15 {JSON}"],
            collectives,
            readme=partial(collectives, sizes=SIZES_OF_README, ranks=[2]),
            picture=ROOT / "docs" / "images" / "all_reduce.png",
        ),
        "mpi": Part(
            [f"mpirun -n 2 {OTHERS} all_reduce --backends shm,mpi --rounds 15 {JSON}"],
            collectives,
            environ=TRUSTED,
        ),
        "collectives": Part(
            [f"phalanx bench all_gather reduce_scatter broadcast --sizes 8,64K,1M,64M {JSON}"],
            collectives,
        ),
        "busy": Part(
            [f"phalanx bench all_reduce --sizes 8,64K,1M,64M --beside 1 {JSON}"], collectives
        ),
        "steps": Part(
            [f"{OTHERS} ddp fsdp --backends shm,tcp,stock,stock+group-memory,gloo {JSON}"],
            steps,
            readme=steps,
        ),
        "memory": Part(
            [f"{OTHERS} fsdp --backends shm,tcp,stock+group-memory,gloo --peaks {JSON}"], peaks
        ),
        "formulas": Part(
            ["python -m pytest -s tests/benchmarks/test_memory_by_strategy.py"] * 4, formulas
        ),
        "joined": Part(
            [
                "python benchmarks/step_costs.py --kinds bare joined --layers 6 --width 1024 "
                "--samples 32 --steps 2 --rounds 151"
            ],
            printed,
        ),
        "links": Part(["env PHALANX_TLS=off python benchmarks/links.py --control reno"], printed),
        "tls": Part(["python benchmarks/tls.py"], printed, readme=printed),
        "wide": Part(["python tests/scripts/wide.py --ranks 16,64,256,1024"], printed),
        "bubble": Part(["phalanx run -n 2 benchmarks/pipeline_bubble.py"], printed, environ=KEPT),
        "blame": Part(
            [
                "python tests/scripts/blame.py kills stops silence ends partitions holds closes "
                "--times 20"
            ],
            tries,
        ),
        "loss": Part(
            [
                "python benchmarks/loss_against_bytes.py --steps 300 --eval-every 50 "
                f"--out {FOLDER}/runs"
            ],
            written,
            file="runs/table.md",
        ),
        "slow_link": Part([SLOW_LINK], printed),
        "crossings": Part(
            [f"{CROSSING} --megabits {megabits}" for megabits in (100, 1000, 2000)], crossings
        ),
        "thresholds": Part(["python benchmarks/shm_thresholds.py --rounds 9"], printed),
    }
)


# ------------------------------------------------------------------------------
# Running them.


def run(part: Part) -> list[Found]:
    """What the part's commands have found. RuntimeError if one of them fails.

    To miss a target is no failure: the numbers say so.
    """
    found = []
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"COLUMNS": WIDTH, "OMP_NUM_THREADS": "1", "PATH": scripts}
    for command in part.commands:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                shlex.split(command.replace(FOLDER, folder)),
                cwd=ROOT,
                env={**environ, **part.environ},
                capture_output=True,
                text=True,
                check=False,
            )
            said = f"{done.stdout}{done.stderr}"
            missed = done.returncode == 1 and "MISS" in said and "WRONG" not in said
            if done.returncode and not missed:
                raise RuntimeError(f"exit code {done.returncode}\n{said}")
            file = Path(folder, part.file)
            found.append(Found(done.stdout, file.read_text() if file.exists() else ""))
    return found


def circumstances(load: float) -> str:
    """When and where this is measured."""
    machine = describe_machine()
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    system = pages.short_system(machine["system"])
    facts = [
        f"{day}, commit {commit()}",
        f"{machine['cores']} cores of {machine['processor']}, {system}",
        f"Python {machine['python']}, torch {machine['packages']['torch']}",
        f"load average {load:.1f} before",
    ]
    return "; ".join(facts)


def commit() -> str:
    """Of the sources."""
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
    changed = git(["git", "status", "--porcelain", "--", "src"]).stdout
    short: str = git(["git", "rev-parse", "--short=8", "HEAD"]).stdout.strip()
    return f"{short} and changes" if changed else short


def page_part(part: Part, found: Sequence[Found], where: str) -> str:
    """What stands on the page between the part's marks."""
    commands = dict.fromkeys(command.replace(f"{FOLDER}/", "") for command in part.commands)
    shown = ["```console", *commands, "```", "", f"{where}.", "", *part.show(found)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(shown))


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and rewrite; the exit status is 1 if a command has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,...", help="%(default)s")
    names = parser.parse_args(words).only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    failed = 0
    for name in names:
        part, where = PARTS[name], circumstances(os.getloadavg()[0])
        try:
            with Console(stderr=True).status(f"{name}: {'; '.join(part.commands)}"):
                found = run(part)
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = 1
            continue
        pages.rewrite(PAGE, name, page_part(part, found, where))
        if part.readme is not None:
            pages.rewrite(README, name, "\n".join(part.readme(found)))
        if part.picture is not None:
            draw(found[0].written.encode(), part.picture)
    return failed


if __name__ == "__main__":
    sys.exit(main())
