"""An elastic job of real processes, which a benchmark kills, stops, tells to leave, and replaces.

    this process    has the job's store, starts processes, and reads what they say
        |    ^
    signals  | generations, steps that count with the time of the machine's clock, the end
        v    |
    processes       forks of a server that has imported torch: `train`, with `phalanx.Elastic`

All that is said is checked: no step counts twice, or is left out; each rank's samples are its part
of the joined batch; replicas are equal in every step.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from xxhash import xxh3_64

import phalanx
from phalanx import DDP, FSDP, Backend, ErrorFeedback, LocalSGD, ShardingStrategy, TopK
from phalanx.collectives import chunk_ranges
from phalanx.elastic import Generation
from phalanx.launch.store import StoreServer, listen_for_store

SAMPLES, BATCH = 1000, 32
PATIENCE = 60.0  # seconds until something has to have come
T = TypeVar("T")


def sharded(strategy: ShardingStrategy) -> Callable[[nn.Module, Backend], nn.Module]:
    """Return what wraps a model with this strategy."""
    return lambda model, backend: FSDP(model, backend, strategy=strategy)


WAYS: Mapping[str, Callable[[nn.Module, Backend], nn.Module]] = {
    "ddp": DDP,
    "full_shard": FSDP,
    "shard_grad_op": sharded(ShardingStrategy.SHARD_GRAD_OP),
    "hybrid(2)": sharded(ShardingStrategy.hybrid(2)),
    "no_shard": sharded(ShardingStrategy.NO_SHARD),
    "top_k": lambda model, backend: DDP(model, backend, compression=ErrorFeedback(TopK(0.1))),
    "local_sgd": lambda model, backend: LocalSGD(model, backend, every=2),
}
WHOLE = "ddp", "no_shard", "top_k", "local_sgd"  # each rank has all parameters, with equal values


class Training(NamedTuple):
    """What each process of a job does.

    ranks      the most that train
    seconds    that a step takes, beside its computation
    ballast    MiB of memory that each process has besides
    ends_at    the last step's number; the job's length, with checkpoints
    kills      a rank and a step: in generation 1 it kills itself in that step's block
    leaves     a rank and a step: in generation 1 it leaves as after a notice in that step's block
    """

    way: str = "ddp"
    backend: str = "shm"
    ranks: int = 4
    seconds: float = 0.01
    ballast: int = 0
    heartbeat: float = 3.0
    steps: int = 1 << 30
    checkpoints: str | None = None
    kills: tuple[int, int] | None = None
    leaves: tuple[int, int] | None = None

    def size(self, processes: int) -> int:
        """Return how many of so many processes train."""
        size = min(self.ranks, processes)
        return size // 2 * 2 if self.way == "hybrid(2)" else size


class Step(NamedTuple):
    """A step that counts, as one rank says it: when, with which samples, and to which values."""

    number: int
    generation: int
    at: float
    samples: tuple[int, int]  # the first, and how many follow each other
    digest: int


class End(NamedTuple):
    """The end of the training on a rank: hashes of all that it has."""

    rank: int
    digests: list[int]


# ------------------------------------------------------------------------------
# In the processes


def train(
    training: Training, environ: Mapping[str, str], log: str, host: str, to: Connection
) -> None:
    """Be a process of the job, on a host of a network if one is named; say all that happens."""
    if host:
        networks().enter(host)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 2)
    os.environ.update(environ)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ballast = torch.ones(training.ballast << 20, dtype=torch.uint8)
    job = phalanx.Elastic(
        training.backend, max_ranks=training.ranks, checkpoints=training.checkpoints, timeout=20.0
    )
    plain = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    model = WAYS[training.way](plain, job.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = job.sampler(SAMPLES, batch_size=BATCH, shuffle=False)
    job.keep(model=model, optimizer=optimizer)
    data = torch.randn(SAMPLES, 64)
    known = 0
    for step in job.steps(training.steps):
        if job.generation > known:
            known = job.generation
            to.send((job.backend.rank, job.history[-1]))
        with step:
            samples = batches.take()
            _strike(training, job, step.number)
            for _ in range(1 + (training.way == "local_sgd")):
                optimizer.zero_grad()
                loss = (model(data[samples]) - data[samples]).square().mean()
                (loss * step.weight).backward()
                optimizer.step()
            time.sleep(training.seconds)
        if step.done:
            whole = training.way in WHOLE
            digest = digest_of(model.parameters()) if whole else 0
            part = samples[0], len(samples)
            assert samples == list(range(part[0], sum(part)))
            to.send(Step(step.number, step.generation, time.monotonic(), part, digest))
    assert ballast.numel() == training.ballast << 20  # it was there until now
    states = [each for state in optimizer.state.values() for each in state.values()]
    to.send(End(job.backend.rank, [digest_of([each]) for each in [*model.parameters(), *states]]))


def _strike(training: Training, job: phalanx.Elastic, number: int) -> None:
    """Kill this process in its step, or let it leave, if it is told to."""
    mine = job.backend.rank, number
    if job.generation == 1 and mine == training.kills:
        os.kill(os.getpid(), signal.SIGKILL)
    if job.generation == 1 and mine == training.leaves:
        job.leave()


def networks() -> Any:
    """Return the module of networks to break (tests/multiprocess/networks.py)."""
    folder = str(Path(__file__).parents[1] / "tests" / "multiprocess")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("networks")


def digest_of(tensors: Any) -> int:
    """Return a hash of the bytes of tensors, or of other values."""
    found: Any = xxh3_64()
    for each in tensors:
        value = each.detach().contiguous() if isinstance(each, Tensor) else torch.tensor(each)
        found.update(value.view(-1).view(torch.uint8).numpy())
    return int(found.intdigest())


# ------------------------------------------------------------------------------
# In the benchmark


class Process:
    """One of a job's processes, and what it has said."""

    def __init__(self, process: Any, said: Connection, host: int) -> None:
        self.pid: int = process.pid
        self.host = host  # its number in the network, if there is one
        self.handle, self.said = process, said
        self.open = True
        self.ranks: dict[int, tuple[int, Generation]] = {}  # by generation
        self.steps: list[Step] = []
        self.end: End | None = None

    @property
    def last(self) -> Step | None:
        """The last step that has counted here, if any has."""
        return self.steps[-1] if self.steps else None

    @property
    def generation(self) -> int:
        """The last generation in which a step has counted here; 0 for none."""
        return self.steps[-1].generation if self.steps else 0

    def given_up_after(self) -> list[Step]:
        """Return its last steps of those generations after which it was no rank of the next."""
        last = {step.generation: step for step in self.steps}
        return [step for number, step in last.items() if number + 1 not in self.ranks]

    def read(self) -> None:
        """Take note of the next that it says; it may have ended."""
        try:
            said = self.said.recv()
        except (EOFError, ConnectionError):
            self.open = False
            return
        if isinstance(said, Step):
            self.steps.append(said)
        elif isinstance(said, End):
            self.end = said
        else:
            rank, generation = said
            self.ranks[generation.number] = rank, generation


class Job:
    """A job on this host, or on those of a network.

    where     its store, for `PHALANX_STORE`; "": one in this process
    context   starts its processes; None: the fork server that `warm_up` has prepared
    network   has a host for each rank, and one more for the store
    """

    def __init__(
        self, training: Training, *, where: str = "", context: Any = None, network: Any = None
    ) -> None:
        self.training, self._network = training, network
        self._context = context or get_context("forkserver")
        self.processes: list[Process] = []
        self.token, self.name = secrets.token_hex(16), f"job-{secrets.token_hex(4)}"
        self._server = None
        if not where:
            listener = listen_for_store("127.0.0.1", 0) if network is None else self._listen()
            self._server = StoreServer(listener, self.token.encode(), job=self.name)
            where = str(self._server.endpoint)
        self.where = where
        self._environ = {
            "PHALANX_STORE": where,
            "PHALANX_JOB": self.name,
            "PHALANX_TOKEN": self.token,
            "PHALANX_HEARTBEAT": str(training.heartbeat),
        }
        self._folder = tempfile.TemporaryDirectory(prefix="elastic-")
        self._started = 0

    def _listen(self) -> socket.socket:
        """Listen on the store's host: only the thread that opens a socket has to be there."""
        network, store, opened = self._network, self.training.ranks, list[socket.socket]()

        def run() -> None:
            networks().enter(network.host(store))
            opened.append(listen_for_store(network.address(store), 0))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return opened[0]

    def start(self, count: int = 1) -> list[Process]:
        """Start processes; return them."""
        context, started = self._context, []
        for _ in range(count):
            said, to = context.Pipe(duplex=False)
            host = self._started % self.training.ranks
            name = "" if self._network is None else self._network.host(host)
            words = self.training, self._environ, str(self._log(self._started)), name, to
            process = context.Process(target=train, args=words, daemon=True)
            process.start()
            to.close()
            started.append(Process(process, said, host))
            self._started += 1
        self.processes += started
        return started

    def _log(self, number: int) -> Path:
        return Path(self._folder.name, f"{number}.log")

    @property
    def living(self) -> list[Process]:
        """The processes that have not ended, as far as is known."""
        return [process for process in self.processes if process.open]

    def until(self, condition: Callable[[], T], what: str, seconds: float = PATIENCE) -> T:
        """Read until the condition holds, and return its result; `AssertionError` if it is late."""
        deadline = time.monotonic() + seconds
        while not (result := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"{seconds:g} s until {what}\n{self.story()}")
            self.read(0.5)
        return result

    def read(self, seconds: float) -> None:
        """Read what has been said; wait so long for the first of it."""
        by_end = {process.said: process for process in self.living}
        for ready in connection.wait(list(by_end), seconds):
            by_end[ready].read()  # type: ignore[index]

    def pause(self, seconds: float) -> None:
        """Read for so long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.read(left)

    def training_since(self, generation: int) -> list[Process]:
        """Return the ranks of the newest generation if all have a step in it that counts, and it is
        newer than this one.
        """
        newest = max((process.generation for process in self.living), default=0)
        there = [process for process in self.living if process.generation == newest]
        size = there[0].ranks[newest][1].world_size if newest else 0
        return (
            sorted(there, key=lambda each: each.ranks[newest][0])
            if (newest > generation and len(there) == size)
            else []
        )

    def until_all_train(self, generation: int = 0) -> list[Process]:
        """Wait for a generation after this one that has all who can train; return its ranks."""
        size = self.training.size(len(self.living))

        def all_train() -> list[Process]:
            there = self.training_since(generation)
            return there if len(there) == size else []

        return self.until(all_train, f"{size} ranks train after generation {generation}")

    def story(self) -> str:
        """Return what the processes have logged, and what is known of them."""
        lines = []
        for number, process in enumerate(self.processes):
            log = self._log(number)
            said = log.read_text(errors="replace") if log.exists() else ""
            lines.append(f"process {process.pid}, open {process.open}, last {process.last}\n{said}")
        return "\n".join(lines[-2 * self.training.ranks :])

    def close(self) -> None:
        """Kill all processes."""
        for process in self.processes:
            process.handle.kill()
        for process in self.processes:
            process.handle.join()
            process.said.close()
        if self._server is not None:
            self._server.close()
        self._folder.cleanup()

    # What has to be true ----------------------------------------------------------------------

    def check(self) -> int:
        """Return how many steps counted; `AssertionError` if something about them is wrong.

        A rank that was given up may have seen one more step count, which the others do again.
        """
        whole = self.training.way in WHOLE
        digests: dict[int, int] = {}
        for process in self.processes:
            for before, after in pairwise(process.steps):
                away = after.generation - 1 not in process.ranks and after.generation > 1
                follows = after.number == before.number + 1
                gap = away and after.number > before.number
                assert follows or gap, (before, after)
            assert all(each.redone == 0 for _, each in process.ranks.values()), process.ranks
            given_up = process.given_up_after()
            for step in process.steps:
                rank, generation = process.ranks[step.generation]
                assert step.samples == samples_of(step.number, rank, generation.world_size)
                if whole and step not in given_up:
                    assert digests.setdefault(step.number, step.digest) == step.digest, step
        counted = {step.number for process in self.processes for step in process.steps}
        assert counted == set(range(len(counted))), "steps are left out"
        return len(counted)


def samples_of(number: int, rank: int, size: int) -> tuple[int, int]:
    """Return a rank's part of a step's joined batch: its first sample, and their number."""
    in_epoch = -(-SAMPLES // BATCH)
    first = number % in_epoch * BATCH
    begin, end = chunk_ranges(min(BATCH, SAMPLES - first), size)[rank]
    return (first + begin, end - begin) if begin < end else (first, 1)


@contextlib.contextmanager
def running(training: Training, *, processes: int = 0, **options: Any) -> Iterator[Job]:
    """A job with so many processes, or as many as train, until the end of this context.

    `options` are those of `Job`.
    """
    job = Job(training, **options)
    try:
        job.start(processes or training.ranks)
        yield job
    finally:
        job.close()


def warm_up() -> None:
    """Let processes be forks of a server that has imported torch, and what optimizers import."""
    here = str(Path(__file__).parent)
    if here not in sys.path:
        sys.path.insert(0, here)
    context = get_context("forkserver")
    context.set_forkserver_preload(["elastic_job", "phalanx.fsdp", "torch._dynamo"])


def pauses_of(processes: Sequence[Process], since: float, generation: int) -> float:
    """Return the longest time without a step that counts on any of these, from the last step before
    `since` until the first in this generation.
    """
    longest = 0.0
    for process in processes:
        times = [step.at for step in process.steps if step.generation < generation]
        first = next(step.at for step in process.steps if step.generation == generation)
        stamps = [
            max(at for at in times if at <= since),
            *(at for at in times if at > since),
            first,
        ]
        longest = max(longest, *(b - a for a, b in pairwise(stamps)))
    return longest
