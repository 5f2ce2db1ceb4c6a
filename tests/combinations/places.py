"""Where ranks are: threads of this process, one at a time; or processes, over TCP or shared memory.

Processes are started once, and run one cell after the other, each in a group of its own.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from cells import WRONG, Outcome, Verdict, judge, on_rank
from feature import Feature
from features import FEATURES
from processes import fork_server
from wrappers import BY_NAME, Way

import phalanx

MOST = 4  # ranks
PATIENCE = 60.0  # seconds that a cell may take; the machine may be busy
TIMEOUT = 20.0  # of backends
KINDS = {"tcp": phalanx.TcpBackend, "shm": phalanx.SharedMemoryBackend}
FEATURE = {one.name: one for one in FEATURES}


def patience_for(features: Sequence[Feature]) -> float:
    """Seconds that a cell may take."""
    return PATIENCE * (5 if any(one.slow for one in features) else 1)


class Place:
    """Runs cells."""

    name = "simulated"

    def outcomes(self, way: Way, features: Sequence[Feature], folder: Path) -> list[Outcome]:
        """What comes of a cell on each rank; TimeoutError if that never comes."""
        found: list[Any] = []

        free = any(one.free for one in features)

        def run() -> None:
            try:
                together = in_threads if free else phalanx.simulate
                found.append(together(lambda b: on_rank(way, features, folder, b), way.ranks))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=run, name="simulate", daemon=True)
        thread.start()
        thread.join(patience_for(features))
        if not found:
            faulthandler.dump_traceback()  # where its threads are, which this process keeps
            raise TimeoutError(f"no end after {patience_for(features):g} s")
        if isinstance(found[0], BaseException):
            raise found[0]
        return list(found[0])

    def run(self, way: Way, features: Sequence[Feature]) -> Verdict:
        """What comes of a cell."""
        if any(one.slow for one in features):
            torch._dynamo.reset()
        with tempfile.TemporaryDirectory() as folder, quiet():
            traces = str(Path(folder, "traces")) if any(one.traced for one in features) else ""
            try:
                with environment(PHALANX_TRACE=traces):
                    outcomes = self.outcomes(way, features, Path(folder))
            except Exception as error:
                return Verdict(WRONG, f"{type(error).__name__}: {error}")
            return judge(way, features, outcomes)

    def close(self) -> None:
        """End what was started for it."""


def in_threads(fn: Callable[[Any], Outcome], ranks: int) -> list[Outcome]:
    """Ranks that are threads, and run as the system lets them."""
    backends = phalanx.SimulatedBackend.create_group(ranks, timeout=TIMEOUT)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(fn, backends))


class Processes(Place):
    """Worker processes, one a rank."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._workers: list[tuple[Any, Any]] = []

    def _start(self) -> None:
        context = fork_server()  # which imports torch once for all
        for rank in range(MOST):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, there), daemon=False)
            process.start()
            there.close()
            self._workers.append((process, here))
        for _, pipe in self._workers:
            self._receive(pipe, PATIENCE)  # it is there

    def outcomes(self, way: Way, features: Sequence[Feature], folder: Path) -> list[Outcome]:
        if not self._workers:
            self._start()
        trace = os.environ.get("PHALANX_TRACE", "")
        cell = way.name, [one.name for one in features], folder, self.name, trace
        pipes = [pipe for _, pipe in self._workers[: way.ranks]]
        try:
            pipes[0].send_bytes(pickle.dumps((cell, "")))
            address = self._receive(pipes[0], PATIENCE)
            for pipe in pipes[1:]:
                pipe.send_bytes(pickle.dumps((cell, address)))
            found = [self._receive(pipe, patience_for(features)) for pipe in pipes]
            for pipe in pipes:
                pipe.send_bytes(b"close")
            for pipe in pipes:
                self._receive(pipe, PATIENCE)
        except (TimeoutError, EOFError, OSError):
            self.close(kill=True)
            raise
        for one in found:
            if isinstance(one, BaseException):
                self.close(kill=True)
                raise one
        return found

    def _receive(self, pipe: Any, patience: float) -> Any:
        if not pipe.poll(patience):
            raise TimeoutError(f"no end after {patience:g} s")
        return pickle.loads(pipe.recv_bytes())

    def close(self, *, kill: bool = False) -> None:
        for process, pipe in self._workers:
            if kill and process.is_alive():  # or its number may be another's
                process.kill()
            pipe.close()
        for process, _ in self._workers:
            process.join()
        self._workers = []


def serve(rank: int, pipe: Any) -> None:
    """Run cells until the pipe is closed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pipe.send_bytes(pickle.dumps("ready"))
    while True:
        try:
            (way, names, folder, kind, trace), address = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        features = [FEATURE[name] for name in names]
        if any(one.slow for one in features):
            torch._dynamo.reset()
        listener = None
        if rank == 0:
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setblocking(False)
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            pipe.send_bytes(pickle.dumps(address))
        backend: Any = None
        outcome: Any
        with quiet():
            try:
                with environment(PHALANX_TRACE=trace):
                    backend = KINDS[kind](
                        *(rank, BY_NAME[way].ranks, address),
                        token="the token of the combinations",
                        timeout=TIMEOUT,
                        listener=listener,
                    )
                outcome = on_rank(BY_NAME[way], features, folder, backend)
            except Exception as error:
                outcome = RuntimeError(f"{type(error).__name__}: {error}")
            pipe.send_bytes(pickle.dumps(outcome))
            pipe.recv_bytes()
            if backend is not None:
                backend.close()
        pipe.send_bytes(pickle.dumps("closed"))


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Variables of the environment; "" is none."""
    before = {name: os.environ.pop(name, None) for name in values}
    os.environ.update({name: value for name, value in values.items() if value})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


LOG = logging.getLogger("phalanx")
LEVEL = LOG.level  # ranks that are threads may be in `quiet` at the same time


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings and the log."""
    LOG.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        LOG.setLevel(LEVEL)


def place_of(name: str) -> Place:
    """Simulated ranks, or processes over `tcp` or `shm`."""
    assert "torch" in sys.modules
    return Place() if name == "simulated" else Processes(name)
