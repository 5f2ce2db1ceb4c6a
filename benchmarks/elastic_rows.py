"""How soon an elastic job goes on: `make elastic`, or some rows: ARGS="--only kill --count 20".

Real processes of one host train with `phalanx.Elastic`, in steps of 10 ms, on 4 ranks. They are
killed at random moments (each rank in turn), stopped, told to leave, and replaced. Times are by the
machine's clock, from the signal until all who go on have a step that counts in a new generation.
Each row's results are checked (elastic_job.py), and the run fails where they are wrong.

    kill        `kill -9` of a rank, by wrapper and backend; "memory": each rank has 2 GiB
    etcd        the job's entries are in three members of etcd; also with the leader killed
    stop        SIGSTOP: until the others go on; then SIGCONT, and the rank is back
    cut         the rank's host is cut off, one way or both; then the network heals, and it is back.
                Hosts are network namespaces, which takes root
    pause       a notice to leave, a newcomer: the longest time without a step on any other rank
    met         from the decision until the first collective of the new group
    equal       the parameters at the end: a rank killed in a step, one that leaves before it, and a
                checkpoint before it that fewer ranks load

Numbers are to be read on an idle machine; `nice -n -10` lets the load of others matter less. What a
step costs in which nothing fails is in elastic_costs.py.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from elastic_job import Job, Process, Training, networks, pauses_of, running, warm_up
from rich.console import Console
from rich.table import Table

TESTS = Path(__file__).parents[1] / "tests"
MOMENT = 0.1  # seconds, from all ranks' training to a signal: at most
HEARTBEAT = 1.0  # seconds, where ranks are stopped
EQUAL_STEPS = 6


class Asked(NamedTuple):
    """The most seconds that were asked for, of the median, of 95 in 100, and of all."""

    median: float | None = None
    p95: float | None = None
    worst: float | None = None


class Row(NamedTuple):
    """A row of the report.

    times     that it measures, in the whole form
    measure   does so many of them, with a source of random numbers; returns seconds by name
    asked     by name
    """

    times: int
    measure: Callable[[int, random.Random], Mapping[str, list[float]]]
    asked: Mapping[str, Asked]


# ------------------------------------------------------------------------------
# What happens to a job


def first_in(ranks: Sequence[Process], generation: int) -> float:
    """Return when all of these had a step that counts after this generation."""
    return max(
        next(step.at for step in process.steps if step.generation > generation) for process in ranks
    )


def lose_one(
    job: Job, number: int, draw: random.Random, by: signal.Signals | Callable[[Process], object]
) -> Lost:
    """Send a rank a signal, or do something else to it, at a random moment.

    Wait until all others who can train do.
    """
    ranks = job.until_all_train()
    job.pause(draw.uniform(0.0, MOMENT))
    generation = max(process.generation for process in ranks)
    victim = ranks[number % len(ranks)]
    began = time.monotonic()
    if isinstance(by, signal.Signals):
        os.kill(victim.pid, by)
    else:
        by(victim)
    size = job.training.size(len(job.living) - 1)

    def others() -> list[Process]:
        there = job.training_since(generation)
        return there if len(there) == size and victim not in there else []

    rest = job.until(others, f"{size} go on without process {victim.pid}")
    return Lost(victim, rest, generation, began, first_in(rest, generation) - began)


class Lost(NamedTuple):
    """What was done to a process, and to those who go on in the generation after this one."""

    victim: Process
    rest: list[Process]
    generation: int
    began: float
    seconds: float


def kill(
    count: int,
    draw: random.Random,
    *,
    where: str = "",
    also: Callable[[], object] = lambda: None,
    again: Callable[[], object] = lambda: None,
    **training: Any,
) -> Mapping[str, list[float]]:
    """Kill a rank so many times, and replace it.

    also, again   are called just before the kill, and before the process is replaced
    """
    found = []
    with running(Training(**training), where=where) as job:
        for number in range(count):
            job.until_all_train()
            also()
            lost = lose_one(job, number, draw, signal.SIGKILL)
            found.append(lost.seconds)
            again()
            job.start()
            job.until_all_train(lost.generation + 1)
        job.check()
    return {"": found}


def stop(count: int, draw: random.Random) -> Mapping[str, list[float]]:
    """Stop a rank so many times; it has to come back in the same process."""
    found = []
    with running(Training(heartbeat=HEARTBEAT)) as job:
        for number in range(count):
            lost = lose_one(job, number, draw, signal.SIGSTOP)
            found.append(lost.seconds - HEARTBEAT)
            os.kill(lost.victim.pid, signal.SIGCONT)
            assert lost.victim in job.until_all_train(lost.generation + 1)
        job.check()
    return {"beyond the heartbeat": found}


def cut(count: int, draw: random.Random, **directions: bool) -> Mapping[str, list[float]]:
    """Cut a rank's host off so many times; when the network heals, it has to come back."""
    found = []
    training = Training(backend="tcp", heartbeat=HEARTBEAT)
    with (
        networks().Network(training.ranks + 1) as network,
        running(training, network=network) as job,
    ):
        for number in range(count):
            lost = lose_one(
                job, number, draw, lambda victim: network.cut(victim.host, **directions)
            )
            found.append(lost.seconds - HEARTBEAT)
            network.heal(lost.victim.host)
            assert lost.victim in job.until_all_train(lost.generation + 1)
        job.check()
    return {"beyond the heartbeat": found}


def pause(count: int, draw: random.Random) -> Mapping[str, list[float]]:
    """Give notice to a rank, and let another one join, so many times."""
    notices, joins = [], []
    with running(Training()) as job:
        for number in range(count):
            lost = lose_one(job, number, draw, signal.SIGTERM)
            notices.append(pauses_of(lost.rest, lost.began, lost.generation + 1))
            lost.victim.handle.join()
            assert lost.victim.handle.exitcode == 75, lost.victim.handle.exitcode
            began = time.monotonic()
            job.start()
            job.until_all_train(lost.generation + 1)
            joins.append(pauses_of(lost.rest, began, lost.generation + 2))
        job.check()
    return {"notice": notices, "join": joins}


def met(count: int, draw: random.Random, *, ranks: int) -> Mapping[str, list[float]]:
    """Kill a rank so many times; how long it took the others to connect."""
    found = []
    with running(Training(ranks=ranks)) as job:
        for number in range(count):
            lost = lose_one(job, number, draw, signal.SIGKILL)
            newest = max(lost.rest[0].ranks)
            found.append(max(each.ranks[newest][1].seconds["met"] for each in lost.rest))
            job.start()
            job.until_all_train(lost.generation + 1)
        job.check()
    return {f"{ranks} ranks": found}


# ------------------------------------------------------------------------------
# Members of etcd


@contextmanager
def etcd() -> Iterator[Any]:
    """Three members, as the tests start them."""
    sys.path[:0] = [str(TESTS), str(TESTS / "elastic")]
    stores: Any = importlib.import_module("elastic_stores")
    with (
        tempfile.TemporaryDirectory(prefix="etcd-") as folder,
        stores.running_etcd(Path(folder), 3) as members,
    ):
        yield members


def kill_over_etcd(count: int, draw: random.Random) -> Mapping[str, list[float]]:
    """Kill a rank so many times; the entries are in etcd."""
    with etcd() as members:
        return kill(count, draw, where=members.where)


def kill_with_leader(count: int, draw: random.Random) -> Mapping[str, list[float]]:
    """Kill a rank together with the leader of etcd, so many times; start both again."""
    with etcd() as members:
        killed: list[Any] = []

        def also() -> None:
            killed.append(members.leader())
            killed[-1].kill()
            killed[-1].wait()

        def again() -> None:
            process = subprocess.Popen(
                killed[-1].args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            members.processes[members.processes.index(killed[-1])] = process

        try:
            return kill(count, draw, where=members.where, also=also, again=again)
        finally:
            for process in members.processes:
                process.kill()
                process.wait()


# ------------------------------------------------------------------------------
# Equal bits


def ends_of(training: Training, ranks: int) -> tuple[list[list[int]], int]:
    """Train to the end; return hashes of what each rank has, and generation 2's first step."""
    with running(training, processes=ranks) as job:
        job.until(lambda: not job.living, "all come to the end")
        ends = sorted(process.end for process in job.processes if process.end is not None)
        second = [process.ranks[2][1] for process in job.processes if 2 in process.ranks]
    return [end.digests for end in ends], second[0].first_step if second else 0


def equal(count: int, draw: random.Random) -> Mapping[str, list[float]]:
    """Compare so many trainings, each of one in several ways, ranks and steps."""
    ways = "ddp", "full_shard", "shard_grad_op", "no_shard", "top_k", "local_sgd"
    for number in range(count):
        training = Training(ways[number % len(ways)], seconds=0.0, steps=EQUAL_STEPS)
        rank, at = draw.randrange(4), draw.randrange(2, EQUAL_STEPS - 1)
        killed, first = ends_of(training._replace(kills=(rank, at)), 4)
        assert first == at, (training.way, first, at)
        left, first = ends_of(training._replace(leaves=(rank, at - 2)), 4)
        assert first == at, (training.way, first, at)
        with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
            saving = training._replace(checkpoints=folder)
            ends_of(saving._replace(steps=at), 4)
            loaded, _ = ends_of(saving._replace(ranks=3), 3)
        assert len(killed) == 3
        assert killed == left, f"{training.way}, step {at}: a kill of rank {rank}, and a notice"
        assert killed == loaded, f"{training.way}, step {at}: a kill of rank {rank}, and a load"
    return {f"{count} of {count}": []}


# ------------------------------------------------------------------------------
# The report

SOON = {"": Asked(0.1, 0.3, 1.0)}
SOON_ENOUGH = {"": Asked(0.15, 0.4, 1.0)}
SHARDED = "full_shard", "shard_grad_op", "hybrid(2)", "no_shard", "top_k", "local_sgd"
ROWS: Mapping[str, Row] = {
    "kill ddp shm": Row(200, partial(kill, backend="shm"), SOON),
    "kill ddp tcp": Row(200, partial(kill, backend="tcp"), SOON),
    "kill memory": Row(40, partial(kill, ballast=2048), SOON),
    **{f"kill {way}": Row(100, partial(kill, way=way), SOON_ENOUGH) for way in SHARDED},
    "etcd": Row(40, kill_over_etcd, {"": Asked(p95=0.4)}),
    "etcd leader": Row(10, kill_with_leader, {"": Asked(worst=5.0)}),
    "stop": Row(60, stop, {"beyond the heartbeat": Asked(p95=0.5)}),
    "cut both ways": Row(20, cut, {"beyond the heartbeat": Asked(p95=0.5)}),
    "cut inward": Row(20, partial(cut, go_out=False), {"beyond the heartbeat": Asked(p95=0.5)}),
    "cut outward": Row(20, partial(cut, come_in=False), {"beyond the heartbeat": Asked(p95=0.5)}),
    "pause": Row(60, pause, {"notice": Asked(p95=0.4), "join": Asked(p95=0.4)}),
    "met 4": Row(40, partial(met, ranks=4), {"4 ranks": Asked(0.03)}),
    "met 16": Row(20, partial(met, ranks=16), {"16 ranks": Asked(0.25)}),
    "equal": Row(48, equal, {}),
}


def add_row(table: Table, name: str, values: list[float], asked: Asked) -> None:
    """Add a row: of the median, 95 in 100, and the worst, what was found and what is asked for."""
    values = sorted(values)
    cells = [name, str(len(values) or "")]
    if values:
        p95 = values[min(len(values) - 1, round(0.95 * len(values)))]
        found = statistics.median(values), p95, values[-1]
        for value, most in zip(found, asked, strict=True):
            beyond = " !" if most is not None and value > most else ""
            cells.append(f"{value:.3f}{'' if most is None else f' (≤ {most:g})'}{beyond}")
    table.add_row(*cells)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose names begin so, with commas")
    parser.add_argument("--count", type=float, default=1.0, help="times so many: 0.1 is a tenth")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left behind
    warm_up()
    console = Console(highlight=False)
    loads = os.getloadavg()
    table = Table(title=f"seconds; load at the start {loads[0]:.1f}")
    for title in ("", "times", "median", "p95", "worst"):
        table.add_column(title, justify="left" if not title else "right")
    try:
        for name, row in ROWS.items():
            if not name.startswith(tuple(options.only.split(","))):
                continue
            count = max(1, round(row.times * options.count))
            console.print(f"{name}: {count} times")
            found = row.measure(count, random.Random(f"{options.seed} {name}"))
            for part, values in found.items():
                add_row(table, f"{name} {part}".rstrip(), values, row.asked.get(part, Asked()))
    finally:  # all rows take an hour: what there is when it is ended is shown
        console.print(table)
    console.print("All results were checked: no step lost or done again, equal replicas.")


if __name__ == "__main__":
    main()
