"""What elastic training costs a step in which nothing fails: `python benchmarks/elastic_costs.py`.

Two ranks of this host train models with equal values side by side, in interleaved rounds of the
same processes. A round is ten steps of each:

    plain    on a group that stays as it is, without `phalanx.Elastic`
    vote     with it: steps are voted on, but no version is kept
    each     and a version is kept in each step
    tenth    and a version is kept in every tenth step

A time is that of the slower rank; a ratio is the median of the rounds' ratios, with its bounds as
in gate.py. Where a model lies in memory makes it a percent faster or slower for as long as it
lives, so processes start several times, and make their models in another order each time. In the
end of each all ways have to have come to the same parameters, to the last bit.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from elastic_job import digest_of, warm_up
from gate import bounds
from gate_processes import variables_by_hand
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import phalanx
from phalanx import Backend, SharedMemoryBackend
from phalanx.launch.store import StoreServer, listen_for_store

RANKS, STEPS = 2, 10  # of a round
COPIES = {"vote": 1 << 30, "each": 1, "tenth": 10}  # steps between two versions
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


class Case(NamedTuple):
    """A model that is trained in some of the ways.

    wrap    makes it one for ranks
    make    returns the model, and its loss
    asked   two ways, and the most that the first may take, in steps of the second
    """

    wrap: Callable[[nn.Module, Backend], nn.Module]
    make: Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]
    asked: Mapping[tuple[str, str], float]


def language_model() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return that of examples/train_language_model.py, with its options' defaults."""
    from language_model.model import GPT  # noqa: PLC0415 -- the path is set by then
    from language_model.options import Options  # noqa: PLC0415

    o = Options()
    tokens = torch.randint(0, 256, (o.batch_size, o.context))
    model = GPT(context=o.context, layers=o.layers, width=o.width, heads=o.heads)
    return model, lambda wrapped: wrapped(tokens, tokens)


def layers() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return README's 64 MiB of layers, as `phalanx bench fsdp` has them."""
    inputs = torch.randn(16, 2048)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    return model, lambda wrapped: wrapped(inputs).square().mean()


def by_block(model: nn.Module, backend: Backend) -> nn.Module:
    """Wrap the language model as the example does."""
    from language_model.model import Block  # noqa: PLC0415 -- the path is set by then

    return phalanx.FSDP(model, backend, unit=Block)


CASES: Mapping[str, Case] = {
    "language model, DDP": Case(phalanx.DDP, language_model, {("vote", "plain"): 1.01}),
    "language model, FULL_SHARD": Case(
        by_block, language_model, {("vote", "plain"): 1.01, ("each", "vote"): 1.05}
    ),
    "64 MiB, FULL_SHARD": Case(
        phalanx.FSDP, layers, {("each", "plain"): 1.30, ("tenth", "plain"): 1.04}
    ),
}

Times = dict[str, list[float]]  # seconds of a step in each round, by kind


def train(
    name: str, kinds: Sequence[str], rounds: int, environ: Mapping[str, str], to: Connection
) -> None:
    """Be a rank: time these kinds, and say the times and hashes of the parameters."""
    os.environ.update(environ)
    torch.set_num_threads(1)
    case, rank = CASES[name], int(environ["RANK"])
    address = f"127.0.0.1:{environ['MASTER_PORT']}"
    with SharedMemoryBackend(rank, RANKS, address, token=environ["PHALANX_TOKEN"]) as plain:
        running = {kind: _steps(case, kind, plain) for kind in kinds}
        digests = {kind: next(steps) for kind, steps in running.items()}
        times: Times = {kind: [] for kind in kinds}
        for number in range(rounds):
            for kind in turned(kinds, number):
                plain.barrier()
                began = time.perf_counter()
                digests[kind] = next(running[kind])
                times[kind].append((time.perf_counter() - began) / STEPS)
        to.send((times, {kind: digest() for kind, digest in digests.items()}))
        plain.barrier()
        for steps in running.values():
            steps.close()  # type: ignore[attr-defined]


def turned(kinds: Sequence[str], number: int) -> list[str]:
    """Return them with another one first for each number."""
    first = number % len(kinds)
    return [*kinds[first:], *kinds[:first]]


def _steps(case: Case, kind: str, plain: Backend) -> Iterator[Callable[[], int]]:
    """Yield after each round what returns a hash of the parameters."""
    torch.manual_seed(0)
    module, loss = case.make()
    job = None
    if kind != "plain":
        os.environ["PHALANX_JOB"] = kind
        job = phalanx.Elastic("shm", max_ranks=RANKS, copy_every=COPIES[kind])
    model = case.wrap(module, plain if job is None else job.backend)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def digest() -> int:
        return digest_of(model.parameters())

    if job is None:
        while True:
            for _ in range(STEPS):
                step()
            yield digest
    job.keep(model=model, optimizer=optimizer)
    for each in job.steps(1 << 30):
        with each:
            step()
        assert each.done
        if job.done % STEPS == 0:
            yield digest


def measure(name: str, kinds: Sequence[str], rounds: int) -> Times:
    """Return the times of the slower rank in new processes, which make the models in this order;
    `AssertionError` if kinds come to different ends.
    """
    token = secrets.token_hex(16)
    server = StoreServer(listen_for_store("127.0.0.1", 0), token.encode(), job="costs")
    added = {
        "PHALANX_STORE": str(server.endpoint),
        "PHALANX_LAUNCH": "costs",
        "PHALANX_TOKEN": token,
    }
    context, ends = get_context("forkserver"), []
    processes = []
    for variables in variables_by_hand(RANKS):
        end, to = context.Pipe(duplex=False)
        words = name, kinds, rounds, {**variables, **added}, to
        processes.append(context.Process(target=train, args=words, daemon=True))
        processes[-1].start()
        to.close()
        ends.append(end)
    try:
        said = [end.recv() for end in ends]
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
            process.join()
        server.close()
    # An elastic job numbers its ranks by arrival, so a process may have the other shard.
    by_kind = {kind: sorted(digests[kind] for _, digests in said) for kind in said[0][1]}
    assert len(set(map(tuple, by_kind.values()))) == 1, f"{name}: the kinds differ: {by_kind}"
    return {
        kind: [max(pair) for pair in zip(*(times[kind] for times, _ in said), strict=True)]
        for kind in kinds
    }


def measure_often(name: str, starts: int, rounds: int) -> Times:
    """Return the times of the rounds of all starts."""
    kinds = [*dict.fromkeys(kind for pair in CASES[name].asked for kind in (*pair, "plain"))]
    times: Times = {kind: [] for kind in kinds}
    for number in range(starts):
        for kind, seconds in measure(name, turned(kinds, number), rounds).items():
            times[kind] += seconds
        print(f"{name}: {number + 1} of {starts}", flush=True)
    return times


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose names begin so")
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=20, help="in each start")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left behind
    warm_up()
    table = Table(title=f"a step, {RANKS} ranks; load at the start {os.getloadavg()[0]:.1f}")
    for title in ("", "ms", "beside", "ms", "ratio", "bounds of 95 %", "asked", ""):
        table.add_column(title, justify="left" if title in ("", "beside") else "right")
    for name, case in CASES.items():
        if not name.startswith(options.only):
            continue
        times = measure_often(name, options.starts, options.rounds)
        for (kind, beside), most in case.asked.items():
            ratios = [a / b for a, b in zip(times[kind], times[beside], strict=True)]
            mine, other = (f"{statistics.median(times[each]) * 1e3:.2f}" for each in (kind, beside))
            low, high = bounds(ratios)
            verdict = "met" if high <= most else "MISSED" if low > most else "unclear"
            found = f"{statistics.median(ratios):.3f}", f"{low:.3f} to {high:.3f}"
            table.add_row(f"{name}: {kind}", mine, beside, other, *found, f"≤ {most:g}", verdict)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
