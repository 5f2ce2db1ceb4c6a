"""What it costs that ranks which disagree are told so: `python benchmarks/agreement.py --help`.

Four kinds of the same all_reduce run in interleaved rounds of the same processes, over TCP:

    off      agreement's parts replaced by constants: the caller's line, the history of calls,
             the comparison of fingerprints, the looks at what others have asked and at messages
             that were not expected. (The fingerprint itself is worked out once for each plan, and
             has its place in the header in any case.)
    on       as it is
    strict   PHALANX_STRICT=1: the callers' lines are compared, too
    traced   PHALANX_TRACE: every call is written to a file

A round is some calls in a row; what a kind costs is the median, over the rounds, of its time
divided by that of `off` in the same round, so that what the machine does besides counts little.
Every result is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

import phalanx
from phalanx import Backend
from phalanx.core import backend as backend_module
from phalanx.core import matching
from phalanx.core.call import UNKNOWN_SITE
from phalanx.core.checker import Checker
from phalanx.core.group import Group
from phalanx.core.recorder import History, Trace

KINDS = ("off", "on", "strict", "traced")
LIMIT = 0.05  # of the time of a call at 4 KiB, for agreement
WIDTH = 100  # columns that the table needs, also when it goes to a file


@contextmanager
def without_agreement() -> Iterator[None]:
    """The same code, with constants where it sees to it that ranks agree."""

    def constant(value: Any) -> Any:
        return lambda *_: value

    with ExitStack() as stack:
        for owner, name, value in (
            (backend_module, "call_site", constant(UNKNOWN_SITE)),
            (History, "add", constant(None)),
            (Checker, "begins", constant(None)),
            (Checker, "ended", constant(None)),
            (Group, "may_finish", constant(True)),
            (matching, "_misfit", constant(None)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


@contextmanager
def traced(backend: Backend, trace: Trace | None) -> Iterator[None]:
    """Every call is written down."""
    engine = backend.engine
    engine.trace, engine.matching.traced = trace, True
    try:
        yield
    finally:
        engine.trace, engine.matching.traced = None, False


def strict_group(backend: Backend) -> Backend:
    """A group of all ranks that compares the callers' lines."""
    with patch.dict(os.environ, {"PHALANX_STRICT": "1"}):
        return backend.subgroup(range(backend.world_size))


def measure(
    backend: Backend, size: int, rounds: int, calls: int, folder: str
) -> dict[str, list[float]]:
    """One rank's part: seconds of a call in each round, for each kind."""
    torch.set_num_threads(1)
    everyone = range(backend.world_size)
    groups = {kind: backend.subgroup(everyone) for kind in KINDS} | {
        "strict": strict_group(backend)
    }
    with patch.dict(os.environ, {"PHALANX_TRACE": folder}):
        trace = Trace.wanted(backend.rank, backend.world_size, backend.engine.now)
    settings: dict[str, Any] = {
        "off": without_agreement,
        "traced": partial(traced, backend, trace),
    }
    tensor = torch.empty(max(1, size // 4))
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):  # the first round warms up
        for place in range(len(KINDS)):
            kind = KINDS[(number + place) % len(KINDS)]  # each comes after each of the others
            group = groups[kind]
            tensor.fill_(1.0)
            with ExitStack() as stack:
                if kind in settings:
                    stack.enter_context(settings[kind]())
                group.barrier()
                began = perf_counter()
                for _ in range(calls):
                    phalanx.all_reduce_(tensor, group)
                elapsed = (perf_counter() - began) / calls
            if not bool((tensor == float(backend.world_size) ** calls).all()):
                raise AssertionError(f"{kind}: {size} bytes were summed wrongly")
            if number:
                seconds[kind].append(elapsed)
    return seconds


def benchmark_rank(backend: Backend) -> dict[str, list[float]]:
    """What each spawned process runs; its options come through the environment."""
    return measure(backend, **json.loads(os.environ["PHALANX_BENCHMARK"]))


def costs(seconds: dict[str, list[float]]) -> dict[str, float]:
    """For each kind, the part of a call's time that it adds to `off`."""
    return {
        kind: statistics.median(
            ours / off for ours, off in zip(seconds[kind], seconds["off"], strict=True)
        )
        - 1
        for kind in KINDS
    }


def show(seconds: dict[str, list[float]], title: str, console: Console) -> None:
    """The table."""
    table = Table(title=title)
    for heading in ("", "median us", "lowest us", "more than off", "of the lowest"):
        table.add_column(heading, justify="right")
    added = costs(seconds)
    for kind, values in seconds.items():
        table.add_row(
            kind,
            f"{statistics.median(values) * 1e6:,.1f}",
            f"{min(values) * 1e6:,.1f}",
            f"{added[kind]:+.1%}",
            f"{min(values) / min(seconds['off']) - 1:+.1%}",
        )
    console.print(table)


def main() -> None:
    """Run it; the exit status is 1 if agreement costs more than its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=201, help="rounds that count")
    parser.add_argument("--calls", type=int, default=50, help="in a round; at most 100")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PHALANX_BENCHMARK"] = json.dumps(
            {
                "size": options.bytes,
                "rounds": options.rounds,
                "calls": min(100, options.calls),  # or the sums leave the range of float32
                "folder": folder,
            }
        )
        seconds = phalanx.spawn(benchmark_rank, options.ranks, "tcp")[0]
    title = f"all_reduce_ of {options.bytes:,} bytes, {options.ranks} ranks over TCP"
    show(seconds, title, Console(width=max(WIDTH, Console().width)))
    if options.json:
        options.json.write_text(json.dumps(seconds, indent=1) + "\n")
    cost = costs(seconds)["on"]
    verdict = "within" if cost <= LIMIT else "ABOVE"
    print(f"agreement costs {cost:.1%} of a call: {verdict} the limit of {LIMIT:.0%}")
    raise SystemExit(cost > LIMIT)


if __name__ == "__main__":
    main()
