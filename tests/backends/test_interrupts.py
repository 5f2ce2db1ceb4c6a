"""Ctrl-C while a rank waits: the wait ends, the others are told why, and nothing is torn."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType

import pytest
import torch
from clusters import CLUSTERS, PATIENCE, TIMEOUT, Threads
from forms import LONG

import phalanx
from phalanx import Backend, DistributedError, PeerLostError, SimulatedBackend, simulate
from phalanx.core.steps import Round

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


RELEASING = ("turn", "_turn")  # functions that release the lock while they wait


class InterruptAt:
    """A profiler that raises KeyboardInterrupt at the `number`-th moment at which a signal can.

    Python looks for signals when a function begins, and when one of C has returned. Only functions
    of Phalanx count, in this thread; not those that wait with the lock released, where a signal
    between the two is as little safe as in `threading.Condition`. With `where`, a module and a
    function, only moments there count.
    """

    def __init__(self, number: int, where: str = "") -> None:
        self.left, self.where = number, where

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        module = frame.f_globals.get("__name__") or ""
        name = frame.f_code.co_name
        inside = module.startswith("phalanx.") and name not in RELEASING
        if inside and f".{module}.{name}".endswith(self.where) and event in ("call", "c_return"):
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


@contextmanager
def interrupted_at(number: int, where: str) -> Iterator[None]:
    """The call within is interrupted at that moment; that is expected."""
    before = sys.getprofile()
    sys.setprofile(InterruptAt(number, f".{where}"))
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sys.setprofile(before)


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


def test_an_interrupt_just_before_a_collective_begins_leaves_no_trace() -> None:
    def run(backend: Backend) -> float:
        if backend.rank == 1:
            with interrupted_at(1, "transport.glance"):
                phalanx.all_reduce(torch.ones(3), backend)
        return phalanx.all_reduce(torch.ones(1), backend).item()

    assert simulate(run, 2) == [2.0, 2.0]


@pytest.mark.parametrize("moment", [1, 2], ids=["before it is queued", "when it is queued"])
@pytest.mark.parametrize(
    "call", [phalanx.all_reduce, phalanx.async_all_reduce], ids=["blocking", "async"]
)
def test_an_interrupt_while_a_collective_begins_breaks_the_group(
    call: Callable[..., object], moment: int
) -> None:
    """It has its number, so the others wait for this rank's part."""
    first, second = SimulatedBackend.create_group(2)
    with interrupted_at(moment, "group.issue"):
        call(torch.ones(3), first)
    for backend in (first, second):
        with pytest.raises(
            PeerLostError, match=r"all_reduce #0 .*interrupted by KeyboardInterrupt"
        ):
            backend.barrier()


def test_an_interrupt_at_the_end_of_a_collective_leaves_nothing_queued() -> None:
    """What is queued behind it would never begin."""
    with SimulatedBackend.create_group(1)[0] as backend:
        with interrupted_at(1, "group.work_ended"):
            backend.issue("one with a round", [Round((), ())])
        assert backend.issue("another one", [Round((), ())]).done()


@threads
def test_an_interrupted_collective_breaks_the_group_and_the_others_are_told_why(
    threads: Threads,
) -> None:
    with two_ranks(threads) as (mine, other):
        with interrupted_while_waiting(mine):
            phalanx.all_reduce(torch.ones(3), mine)
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(other.barrier).exception(PATIENCE)
        assert isinstance(told, PeerLostError)
        assert told.peer == 0
        assert "interrupted by KeyboardInterrupt" in str(told)
        with pytest.raises(PeerLostError, match=r"broken.*interrupted by KeyboardInterrupt"):
            mine.barrier()


# One that comes while Python frees a generator is swallowed by Python, which warns.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("simulated", phalanx.all_reduce_),
        ("simulated", phalanx.async_all_reduce_),
        ("shm", phalanx.all_reduce_),
    ],
    ids=["simulated", "simulated, async", "shm"],
)
def test_whenever_an_interrupt_comes_the_group_goes_on_or_all_ranks_are_told(
    name: str, call: Callable[..., object]
) -> None:
    """Ranks whose numbers of collectives differ would wait for each other until the timeout."""
    (cluster,) = [each for each in CLUSTERS if isinstance(each, Threads) and each.name == name]

    def sums(backend: Backend, times: int) -> list[float | DistributedError]:
        results: list[float | DistributedError] = []
        for _ in range(times):
            tensor = torch.full((1,), backend.rank + 1.0)
            try:
                phalanx.all_reduce_(tensor, backend, timeout=10.0)
            except DistributedError as error:
                results.append(error)
                break
            results.append(tensor.item())
        return results

    for number in itertools.count(1, 1 if LONG or name == "simulated" else 6):
        moment = InterruptAt(number)
        with ThreadPoolExecutor(1) as pool, two_ranks(cluster) as (mine, other):
            theirs = pool.submit(sums, other, 2)
            before = sys.getprofile()
            sys.setprofile(moment)
            try:
                pending = call(torch.ones(1), mine, timeout=10.0)
                if isinstance(pending, phalanx.PendingCollective):
                    pending.wait()
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(before)
            results = sums(mine, 1)
            mine.close()
            results += theirs.result(PATIENCE)
        for result in results:
            if isinstance(result, DistributedError):
                assert "interrupted by KeyboardInterrupt" in str(result) or " left" in str(result)
            else:
                assert result == 3.0
        if moment.left > 0:  # it was over before
            assert number > 20
            return
