"""What the things beside a training step cost it: `python benchmarks/step_costs.py --help`.

A DDP step of a small model runs in interleaved rounds of the same processes:

    bare      the step alone
    notice    and `Notice.given()` after each
    scalars   and `Scalars.log()` of a tensor and a number after each, into JSON lines

A round is some steps in a row. What a kind costs is the median, over the rounds, of its time less
that of `bare` in the same round. Every rank's replica is compared with rank 0's in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

import phalanx
from phalanx import Backend


@contextmanager
def bare(backend: Backend) -> Iterator[Callable[[int], object]]:
    """Nothing."""
    yield lambda step: None


@contextmanager
def notice(backend: Backend) -> Iterator[Callable[[int], object]]:
    """Asks after each step whether a rank was told to leave."""
    with phalanx.Notice(backend, signals=()) as given:
        yield lambda step: given.given()


@contextmanager
def scalars(backend: Backend) -> Iterator[Callable[[int], object]]:
    """Logs two scalars after each step, of which every tenth has a record in a file."""
    loss = torch.ones(())
    with TemporaryDirectory() as folder:  # rank 0 writes into its own
        shared = phalanx.broadcast_object(folder, backend)
        with phalanx.Scalars(backend, [f"jsonl:{shared}/a.jsonl"]) as means:
            yield lambda step: means.log(step, loss=loss, lr=0.1)


KINDS = {"bare": bare, "notice": notice, "scalars": scalars}


def benchmark_rank(backend: Backend) -> dict[str, list[float]]:
    """What each process runs: seconds of a step in each round, for each kind."""
    options = json.loads(os.environ["PHALANX_BENCHMARK"])
    torch.set_num_threads(1)
    torch.manual_seed(backend.rank)
    width, steps = options["width"], options["steps"]
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    model = phalanx.DDP(torch.nn.Sequential(*layers), backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(8, width)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    names = list(KINDS)
    with ExitStack() as stack:
        after_step = {kind: stack.enter_context(KINDS[kind](backend)) for kind in KINDS}
        for number in range(options["rounds"] + 1):  # the first round warms up
            turn = number % len(names)
            for kind in names[turn:] + names[:turn]:
                backend.barrier()
                began = perf_counter()
                for step in range(number * steps, (number + 1) * steps):
                    optimizer.zero_grad()
                    model(inputs).square().mean().backward()
                    optimizer.step()
                    after_step[kind](step)
                if number:
                    seconds[kind].append((perf_counter() - began) / steps)
    for name, value in model.state_dict().items():
        if not torch.equal(value, phalanx.broadcast(value, backend)):
            raise AssertionError(f"rank {backend.rank} has another {name} than rank 0")
    return seconds


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--width", type=int, default=64, help="of the model's four layers")
    parser.add_argument("--rounds", type=int, default=301, help="rounds that count")
    parser.add_argument("--steps", type=int, default=32, help="in a round")
    options = parser.parse_args()
    os.environ["PHALANX_BENCHMARK"] = json.dumps(vars(options))
    ranks = phalanx.spawn(benchmark_rank, options.ranks, options.backend)
    table = Table(title=f"a step of DDP, {options.ranks} ranks, {options.backend}, slowest rank")
    for heading in ("", "median us", "added us", "quartiles", "of the step"):
        table.add_column(heading, justify="right")
    slowest = {
        kind: [max(round_) for round_ in zip(*(rank[kind] for rank in ranks), strict=True)]
        for kind in KINDS
    }
    for kind, values in slowest.items():
        added = [(each - alone) * 1e6 for each, alone in zip(values, slowest["bare"], strict=True)]
        low, middle, high = statistics.quantiles(added) if kind != "bare" else (0.0, 0.0, 0.0)
        step = statistics.median(slowest["bare"]) * 1e6
        table.add_row(
            *(kind, f"{statistics.median(values) * 1e6:,.1f}", f"{middle:+.1f}"),
            *(f"{low:+.1f} - {high:+.1f}", f"{middle / step:+.2%}"),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
