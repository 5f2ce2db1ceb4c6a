"""What the things beside a training step cost it: `python benchmarks/step_costs.py --help`.

A DDP step of a small model runs in interleaved rounds of the same processes:

    bare      the step alone
    notice    and `Notice.given()` after each
    scalars   and `Scalars.log()` of a tensor and a number after each, into JSON lines
    watched   the step alone, while `phalanx watch` runs on this host
    joined    the step in `DDP.step`, whose message goes with it

A round is some steps in a row. What a kind costs is the median, over the rounds, of its time less
that of `bare` in the same round: by the clock, of the slowest rank; and of processors, on the mean
of all ranks, which has less noise. Every rank's replica is compared with rank 0's in the end.

Between the rounds of `watched` that process is stopped until nobody publishes any more, nor counts.
What the threads that publish take of a processor is read from their own clocks, too. Such a round
has to take seconds, as states are published twice in one:

    python benchmarks/step_costs.py --kinds bare watched --width 768 --samples 128 --steps 20

`joined` with the step of `phalanx bench ddp` takes

    --kinds bare joined --layers 6 --width 1024 --samples 32 --steps 2
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import phalanx
from phalanx import Backend, ReduceOp
from phalanx.ops.observe.watch import folder as watch_folder

LINGER = 2 * watch_folder.PERIOD  # seconds after which nobody publishes any more


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


class Watcher:
    """`phalanx watch` of this job, which runs in the rounds of one kind only.

    shares   of a processor that this rank's thread took to publish, in each round
    """

    def __init__(self, backend: Backend) -> None:
        self.shares: list[float] = []
        self._backend = backend
        self._process: subprocess.Popen[bytes] | None = None
        if backend.rank == 0:
            words = [sys.executable, "-m", "phalanx", "watch", "--json"]
            words.append(os.environ[watch_folder.VARIABLE])
            self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @contextmanager
    def round(self) -> Iterator[None]:
        """Somebody watches in here, and all ranks publish."""
        self._signal(signal.SIGCONT)
        thread = self._until(published=True)
        assert thread is not None
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        began, used = perf_counter(), time.clock_gettime(clock)
        yield
        self.shares.append((time.clock_gettime(clock) - used) / (perf_counter() - began))
        self._signal(signal.SIGSTOP)
        self._until(published=False)
        engine = self._backend.engine
        engine.counters = engine.moved = None

    def _until(self, *, published: bool) -> threading.Thread | None:
        """Wait until all ranks have a thread that publishes, or none has; return this rank's."""
        name = f"phalanx rank {self._backend.rank} publishes"
        while True:
            thread = next((one for one in threading.enumerate() if one.name == name), None)
            fits = torch.tensor([float((thread is not None) is published)])
            if phalanx.all_reduce(fits, self._backend, ReduceOp.MIN).item():
                return thread
            time.sleep(0.05)

    def _signal(self, signum: int) -> None:
        if self._process is not None:
            self._process.send_signal(signum)


KINDS = {"bare": bare, "notice": notice, "scalars": scalars, "watched": bare, "joined": bare}


def train(model: phalanx.DDP, inputs: torch.Tensor, kind: str) -> None:
    """Forward and backward; the gradients are the same in each kind."""
    if kind == "joined":
        with model.step(len(inputs)) as step:
            step.backward(model(inputs).square().mean() * len(inputs))
    else:
        model(inputs).square().mean().backward()


Times = dict[str, list[tuple[float, float]]]


def benchmark_rank(backend: Backend) -> tuple[Times, list[float]]:
    """What each process runs: seconds of a step in each round, by the clock and of processors, for
    each kind; and the shares of the thread that publishes.
    """
    watch_folder.LINGER = LINGER
    options = json.loads(os.environ["PHALANX_BENCHMARK"])
    torch.set_num_threads(1)
    torch.manual_seed(backend.rank)
    width, steps = options["width"], options["steps"]
    layers = [torch.nn.Linear(width, width) for _ in range(options["layers"])]
    model = phalanx.DDP(torch.nn.Sequential(*layers), backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(options["samples"], width)
    names = options["kinds"]
    seconds: Times = {kind: [] for kind in names}
    around: dict[str, Callable[[], AbstractContextManager[None]]] = {}
    with ExitStack() as stack:
        after_step = {kind: stack.enter_context(KINDS[kind](backend)) for kind in names}
        watcher = Watcher(backend) if "watched" in names else None
        if watcher is not None:
            stack.callback(watcher.close)
            around["watched"] = watcher.round
        for number in range(options["rounds"] + 1):  # the first round warms up
            turn = number % len(names)
            for kind in names[turn:] + names[:turn]:
                with around.get(kind, nullcontext)():
                    backend.barrier()
                    began, used = perf_counter(), time.process_time()
                    for step in range(number * steps, (number + 1) * steps):
                        optimizer.zero_grad()
                        train(model, inputs, kind)
                        optimizer.step()
                        after_step[kind](step)
                    took = perf_counter() - began, time.process_time() - used
                    if number:
                        seconds[kind].append((took[0] / steps, took[1] / steps))
    for name, value in model.state_dict().items():
        if not torch.equal(value, phalanx.broadcast(value, backend)):
            raise AssertionError(f"rank {backend.rank} has another {name} than rank 0")
    return seconds, watcher.shares[1:] if watcher is not None else []


JOINED: dict[str, Callable[[list[float]], float]] = {"clock": max, "processor": statistics.mean}
"""What is measured of a step -> the number of all ranks."""


def cells(values: list[float], alone: list[float]) -> list[str]:
    """What the table shows of the rounds of a kind, and of the same rounds of `bare`."""
    added = [each - other for each, other in zip(values, alone, strict=True)]
    low, middle, high = statistics.quantiles(added)
    step = statistics.median(alone)
    error = 1.253 * (high - low) / 1.349 / len(added) ** 0.5  # if they are distributed normally
    return [
        *(f"{statistics.median(values):,.1f}", f"{middle:+.1f}", f"{low:+.1f} - {high:+.1f}"),
        *(f"{middle / step:+.2%}", f"{error / step:.2%}"),
    ]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--width", type=int, default=64, help="of each layer")
    parser.add_argument("--samples", type=int, default=8, help="of a rank's batch")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS)[:3])
    parser.add_argument("--rounds", type=int, default=301, help="rounds that count")
    parser.add_argument("--steps", type=int, default=32, help="in a round")
    options = parser.parse_args()
    options.kinds = ["bare", *(kind for kind in options.kinds if kind != "bare")]
    os.environ["PHALANX_BENCHMARK"] = json.dumps(vars(options))
    watch_folder.LINGER = LINGER
    results = phalanx.spawn(benchmark_rank, options.ranks, options.backend)
    shares = [share for _, share in results]
    table = Table(box=box.MARKDOWN)
    for heading in ("", "", "median us", "added us", "quartiles", "of the step", "s.e."):
        table.add_column(heading, justify="right")
    for kind in options.kinds:
        for row, (what, join) in enumerate(JOINED.items()):
            values, alone = (
                [join([took[row] for took in round_]) * 1e6 for round_ in rounds]
                for rounds in (
                    zip(*(one[k] for one, _ in results), strict=True) for k in (kind, "bare")
                )
            )
            table.add_row(kind, what, *cells(values, alone))
    console = Console(width=max(100, Console().width))
    console.print(f"a step of DDP, {options.ranks} ranks, {options.backend}", table, sep="\n")
    if shares[0]:
        each = ", ".join(f"{statistics.median(share):.3%}" for share in shares)
        Console().print(f"the thread that publishes takes of a processor, on each rank: {each}")


if __name__ == "__main__":
    main()
