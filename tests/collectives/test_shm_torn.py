"""Memory that others may still read is not read as a result once its owner has given up."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from clusters import SharedMemory
from torch import Tensor

import phalanx
from phalanx import Backend, CollectiveTimeoutError, DistributedError, PeerLostError
from phalanx.collectives.shm import executor
from phalanx.transport.shm.control import ControlBlock
from phalanx.transport.shm.cross_memory import ProcessMemory

COUNT = 100_000
RIGHT, WRONG = 1.0, 7.0

CALLS: dict[str, Callable[[Tensor, Backend, float], Tensor | None]] = {
    "all_reduce": lambda x, b, t: phalanx.all_reduce(x, b, phalanx.ReduceOp.MAX, timeout=t),
    "all_gather": lambda x, b, t: phalanx.all_gather(x, b, timeout=t),
    "broadcast": lambda x, b, t: phalanx.broadcast(x, b, 0, timeout=t),
    "all_to_all": lambda x, b, t: phalanx.all_to_all(x, b, timeout=t),
}


def time_out(backend: Backend, call: Callable[[float], object]) -> None:
    with pytest.raises(CollectiveTimeoutError):
        call(0.3)


def close_meanwhile(backend: Backend, call: Callable[[float], object]) -> None:
    """Another thread closes the backend."""
    threading.Timer(0.1, backend.close).start()
    with pytest.raises(DistributedError):
        call(20.0)


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("give_up", [time_out, close_meanwhile])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_one_that_reads_too_late_raises_and_returns_nothing_torn(
    call: Callable[[Tensor, Backend, float], Tensor | None],
    give_up: Callable[[Backend, Callable[[float], object]], None],
    registered: bool,
    thresholds: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 is held up while it copies from rank 0's tensors, until rank 0 has given up waiting
    for it, and uses their memory for something else.
    """
    given_up, plain_copy = threading.Event(), executor.copy

    def slow_copy(into: int, source: int, count: int) -> object:
        if threading.current_thread().name == "rank 1":
            given_up.wait(10)
        return plain_copy(into, source, count)

    plain_read = ProcessMemory.read

    def slow_read(memory: ProcessMemory, into: int, address: int, length: int) -> None:
        if threading.current_thread().name == "rank 1" and length > 8:
            given_up.wait(10)
        plain_read(memory, into, address, length)

    monkeypatch.setattr(executor, "copy", slow_copy)
    monkeypatch.setattr(ProcessMemory, "read", slow_read)
    thresholds(reduced_from=0, broadcast_from=0)
    monkeypatch.setattr(ControlBlock, "is_crowded", lambda control: True)

    def run(backend: Backend) -> str:
        mine = backend.empty(COUNT) if registered else torch.empty(COUNT)
        mine.fill_(RIGHT)
        if backend.rank == 0:
            results: list[Tensor | None] = []
            give_up(backend, lambda timeout: results.append(call(mine, backend, timeout)))
            assert not results
            mine.fill_(WRONG)
            others = [backend.empty(2 * COUNT).fill_(WRONG) for _ in range(4)]
            others += [backend.empty(COUNT).fill_(WRONG) for _ in range(4)]
            given_up.set()
            return "gave up"
        try:
            result = call(mine, backend, 20.0)
        except (CollectiveTimeoutError, PeerLostError) as error:
            return type(error).__name__
        assert result is not None
        return "right" if bool((result == RIGHT).all()) else "torn"

    assert SharedMemory().run(run, 2)[1] in ("right", "CollectiveTimeoutError", "PeerLostError")


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("moment", [1, 2, 3, 8, 13])
def test_one_that_is_interrupted_while_it_copies_breaks_its_group_and_no_other(
    moment: int, registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_copy, copies = executor.copy, iter(range(1, 1000))

    def copy(into: int, source: int, count: int) -> object:
        if threading.current_thread().name == "rank 1" and next(copies) == moment:
            raise KeyboardInterrupt
        return plain_copy(into, source, count)

    monkeypatch.setattr(executor, "copy", copy)

    def total(backend: Backend) -> Tensor:
        mine = backend.empty(COUNT) if registered else torch.empty(COUNT)
        return phalanx.all_reduce(mine.fill_(RIGHT), backend)

    def run(backend: Backend) -> str:
        how = "was not interrupted"
        inside = backend.subgroup(range(3))
        try:
            for _ in range(10):
                assert bool((total(inside) == 3).all())
        except KeyboardInterrupt:
            how = "interrupted"
        except PeerLostError as error:
            how = f"told of {error.peer}"
        assert bool((total(backend) == 3).all())
        assert bool((total(backend.subgroup(range(3))) == 3).all())
        return how

    assert SharedMemory().run(run, 3) == ["told of 1", "interrupted", "told of 1"]
