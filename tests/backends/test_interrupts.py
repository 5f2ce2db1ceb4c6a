"""Ctrl-C while a rank waits: the wait ends, the others are told why, and nothing is torn."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from clusters import CLUSTERS, PATIENCE, TIMEOUT, Threads

import phalanx
from phalanx import Backend, MisuseError, SimulatedBackend, simulate
from phalanx.core.posted import WorkBase

threads = pytest.mark.parametrize(
    "threads",
    [each for each in CLUSTERS if isinstance(each, Threads) and each.name in ("simulated", "tcp")],
    ids=lambda cluster: cluster.name,
)


@contextmanager
def two_ranks(threads: Threads) -> Iterator[tuple[Backend, Backend]]:
    """Both ranks of a job of two; the first one is for the main thread, which gets the signals."""
    makers = threads.makers(2, TIMEOUT)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(makers[1])
        first, second = makers[0](), other.result()
    try:
        yield first, second
    finally:
        first.close()
        second.close()


@contextmanager
def interrupted_while_waiting(backend: Backend) -> Iterator[None]:
    """The main thread gets a Ctrl-C as soon as it waits on this backend; that is expected."""
    over = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while not backend.engine.watchdog.waits:
            if over.wait(0.01):
                return
        over.wait(0.05)  # by then it is deep in its wait
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


@threads
def test_an_interrupted_receive_breaks_nothing_and_loses_nothing(threads: Threads) -> None:
    with two_ranks(threads) as (mine, other):
        into = bytearray(b"mine")
        with interrupted_while_waiting(mine):
            mine.recv(into, 1)
        other.send(b"late", 0)
        assert into == b"mine"
        assert mine.recv(into, 1) == 1
        assert into == b"late"


def test_an_interrupt_just_before_a_collective_begins_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(now: float) -> None:
        raise KeyboardInterrupt

    def run(backend: Backend) -> float:
        if backend.rank == 1:
            with monkeypatch.context() as patched:
                patched.setattr(backend.engine.transport, "glance", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    phalanx.all_reduce(torch.ones(3), backend)
        return phalanx.all_reduce(torch.ones(1), backend).item()

    assert simulate(run, 2) == [2.0, 2.0]


@pytest.mark.parametrize(
    "call", [phalanx.all_reduce, phalanx.async_all_reduce], ids=["blocking", "async"]
)
def test_an_interrupt_while_a_collective_begins_breaks_the_group(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., object]
) -> None:
    """It has its number, so the others wait for this rank's part."""

    class Interrupted(deque[object]):
        def append(self, work: object) -> None:
            raise KeyboardInterrupt

    first, second = SimulatedBackend.create_group(2)
    monkeypatch.setattr(first.group, "_queue", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        call(torch.ones(3), first)
    monkeypatch.undo()
    for backend in (first, second):
        with pytest.raises(MisuseError, match=r"all_reduce #0 .*interrupted by KeyboardInterrupt"):
            backend.barrier()


def test_an_interrupt_at_the_end_of_a_collective_leaves_nothing_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is queued behind it would never begin."""
    with SimulatedBackend.create_group(1)[0] as backend:
        work_ended, came = backend.group.work_ended, iter([True])

        def interrupted_once(work: WorkBase) -> None:
            if next(came, False):
                raise KeyboardInterrupt
            work_ended(work)

        monkeypatch.setattr(backend.group, "work_ended", interrupted_once)
        with pytest.raises(KeyboardInterrupt):
            phalanx.async_all_reduce(torch.ones(3), backend)
        assert phalanx.async_all_reduce(torch.ones(3), backend).done()


@threads
def test_an_interrupted_collective_breaks_the_group_and_the_others_are_told_why(
    threads: Threads,
) -> None:
    with two_ranks(threads) as (mine, other):
        with interrupted_while_waiting(mine):
            phalanx.all_reduce(torch.ones(3), mine)
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(other.barrier).exception(PATIENCE)
        assert isinstance(told, MisuseError)
        assert told.peer == 0
        assert "interrupted by KeyboardInterrupt" in str(told)
        with pytest.raises(MisuseError, match=r"broken.*interrupted by KeyboardInterrupt"):
            mine.barrier()
