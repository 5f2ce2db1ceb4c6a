"""What a rank has done last: in the notes of its errors, and nowhere else in memory."""

from __future__ import annotations

import gc
import re
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
import torch
from clusters import PATIENCE, Cluster, Gloo, SharedMemory, whole

import phalanx
from phalanx import (
    Backend,
    CollectiveTimeoutError,
    DesyncError,
    DistributedError,
    MisuseError,
    PeerLostError,
    SimulatedBackend,
    irecv,
)
from phalanx.core.recorder import SHOWN

needs_notes = pytest.mark.skipif(
    not hasattr(BaseException, "add_note"), reason="errors have notes since Python 3.11"
)
TOOK = r" (took|failed after) [\d.e+-]+ m?s$"


def notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


def operations(error: BaseException, rank: int) -> list[str]:
    """The operations in an error's only note, without what they took; the error follows them."""
    (note,) = notes(error)
    said = f"\nand then: {type(error).__name__}: {error}"
    assert note.endswith(said)
    first, *lines = note.removesuffix(said).split("\n")
    assert first == f"the last operations of rank {rank}, which ended in this order:"
    for line in lines:
        assert re.search(TOOK, line), line
    return [re.sub(TOOK, r" \1", line.removeprefix("  ")) for line in lines]


def job_rank(backend: Backend) -> int:
    rank: int = whole(backend).rank
    return rank


@needs_notes
def test_an_error_lists_what_its_rank_has_done_before_in_the_order_of_its_ends(
    cluster: Cluster,
) -> None:
    def fail(backend: Backend) -> None:
        if backend.rank:
            backend.recv(bytearray(3), 0, tag=5)
            phalanx.broadcast(torch.ones(4), backend, algorithm="star")
            whole(backend).abort()
            return
        group = backend.group.suffix
        line = sys._getframe().f_lineno
        backend.send(b"abc", 1, tag=5)
        phalanx.broadcast(torch.ones(4), backend, algorithm="star")
        with pytest.raises(PeerLostError) as info:
            backend.recv(bytearray(1), 1, tag=6)
        file = Path(__file__).name
        assert operations(info.value, job_rank(backend)) == [
            f"send #0 (tag 5){group} at {file}:{line + 1} took",
            f"broadcast #0 (float32 [4], root 0, star){group} at {file}:{line + 2} took",
        ]

    cluster.run(fail, 2)


@needs_notes
def test_only_the_last_few_are_listed(cluster: Cluster) -> None:
    def fail(backend: Backend) -> None:
        for _ in range(SHOWN + 5):
            backend.barrier()
        if backend.rank:
            whole(backend).abort()
            return
        with pytest.raises(PeerLostError) as info:
            backend.barrier()
        listed = operations(info.value, job_rank(backend))
        numbers = [int(line.split()[1][1:]) for line in listed]
        assert all(line.endswith("took") for line in listed[:-1]), "however soon they were done"
        assert numbers in ([*range(5, SHOWN + 5)], [*range(6, SHOWN + 6)])

    cluster.run(fail, 2)


@needs_notes
def test_what_has_failed_is_said_to_have_and_an_error_has_one_note_however_often_it_is_raised(
    cluster: Cluster,
) -> None:
    def fail(backend: Backend) -> None:
        call = phalanx.async_all_reduce if backend.rank else phalanx.async_all_gather
        backend.barrier()
        pending = call(torch.ones(3), backend, algorithm="ring")
        seen = []
        for _ in range(3):
            with pytest.raises(DesyncError) as info:
                pending.wait()
            seen.append(notes(info.value))
        assert seen[0] == seen[1] == seen[2]
        assert len(operations(info.value, job_rank(backend))) == 1
        with pytest.raises(DesyncError) as later:
            backend.barrier()
        listed = operations(later.value, job_rank(backend))
        assert [re.split(" [(a]| in ", line)[0] for line in listed[:2]] == [
            "barrier #0",
            f"{pending.op_name} #0".replace("#0", "#1"),
        ]
        assert listed[1].endswith("failed after")

    cluster.run(fail, 2)


@needs_notes
@pytest.mark.timeouts
def test_operations_of_all_groups_and_messages_are_one_history(cluster: Cluster) -> None:
    def fail(backend: Backend) -> None:
        group = backend.subgroup([0, 1])
        phalanx.all_reduce(torch.ones(2), group)
        backend.barrier()
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(bytearray(1), 1, timeout=0.05)
            with pytest.raises(CollectiveTimeoutError) as info:
                group.recv(bytearray(1), 1, tag=3, timeout=0.05)
            listed = operations(info.value, job_rank(backend))
            assert [line.split(" ")[0] for line in listed] == ["all_reduce", "barrier", "recv"]
            assert "in the group of ranks [" in listed[0]
            assert listed[2].endswith("failed after")
        backend.barrier()

    cluster.run(fail, 2)


@needs_notes
def test_the_first_operation_of_all_has_no_note_and_nor_has_wrong_use() -> None:
    backends = SimulatedBackend.create_group(2)
    with pytest.raises(CollectiveTimeoutError) as info:
        backends[0].recv(bytearray(1), 1, timeout=0.01)
    assert not notes(info.value)
    with pytest.raises(DistributedError) as wrong:
        backends[0].send(b"", 5)
    assert not notes(wrong.value)


@needs_notes
def test_the_users_own_notes_stay_and_travel_with_the_error() -> None:
    backends = SimulatedBackend.create_group(2)
    backends[0].send(b"!", 1)
    with pytest.raises(CollectiveTimeoutError) as info:
        backends[0].recv(bytearray(1), 1, timeout=0.01)
    info.value.add_note("in epoch 3")  # type: ignore[attr-defined]
    assert len(notes(info.value)) == 2
    assert notes(info.value)[1] == "in epoch 3"


@pytest.fixture
def little_to_collect() -> Iterator[None]:
    """The collector looks at what comes from here on, and not at all of torch each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("little_to_collect")
def test_nothing_that_has_ended_is_kept_in_memory(cluster: Cluster) -> None:
    """Neither what was sent, received and summed, nor what has failed."""
    one_at_a_time = threading.Lock()  # gc.collect() does nothing while another thread is in it

    def forget(backend: Backend) -> None:
        arrays = [np.ones(4, np.float32) for _ in range(4)]
        tensors = [torch.from_numpy(array) for array in arrays]
        alive = [weakref.ref(array) for array in arrays]
        other = 1 - backend.rank
        backend.sendrecv(tensors[0], other, tensors[1], other)
        phalanx.all_reduce_(tensors[2], backend)
        with pytest.raises(DesyncError):
            phalanx.all_reduce(
                tensors[3][: 2 + backend.rank], backend.subgroup([0, 1]), algorithm="ring"
            )
        backend.barrier()
        arrays.clear()
        tensors.clear()
        # A thread of Gloo's lets go of a tensor after it has said that it is done.
        patience = monotonic() + (PATIENCE if isinstance(cluster, Gloo) else 0.0)
        with one_at_a_time:
            gc.collect()
            while any(ref() is not None for ref in alive) and monotonic() < patience:
                gc.collect()
        assert [ref() is None for ref in alive] == [True] * 4

    cluster.run(forget, 2)


def test_memory_is_free_when_the_call_returns_not_when_the_collector_comes(
    cluster: Cluster,
) -> None:
    """While a view of a bytearray is kept, Python refuses to resize it."""

    def resize(backend: Backend) -> None:
        out, into, other = bytearray(8), bytearray(8), 1 - backend.rank
        backend.sendrecv(out, other, into, other)
        out.append(1)
        into.append(1)

    gc.disable()
    try:
        cluster.run(resize, 2)
    finally:
        gc.enable()


@pytest.mark.timeouts
def test_so_it_is_when_the_call_fails(cluster: Cluster) -> None:
    def resize(backend: Backend) -> None:
        out, into, late, other = bytearray(8), bytearray(8), bytearray(8), 1 - backend.rank
        with suppress(CollectiveTimeoutError):
            backend.recv(late, other, timeout=0.01)
        group = backend.subgroup([0, 1])
        group.fail(MisuseError("enough", rank=group.rank))
        with suppress(MisuseError):
            group.sendrecv(out, other, into, other)
        for memory in (out, into, late):
            memory.append(1)
        backend.barrier()

    gc.disable()
    try:
        cluster.run(resize, 2)
    finally:
        gc.enable()


@needs_notes
def test_a_users_note_on_one_error_is_not_on_the_next_that_is_raised() -> None:
    backends = SimulatedBackend.create_group(2)
    backends[0].send(b"!", 1)
    pending = irecv(bytearray(1), backends[0], 1, timeout=0.01)
    for _ in range(2):
        with pytest.raises(CollectiveTimeoutError) as info:
            pending.wait()
        info.value.add_note("in epoch 3")  # type: ignore[attr-defined]
        assert len(notes(info.value)) == 2


def test_a_call_that_its_caller_carried_out_keeps_no_step_and_so_no_memory() -> None:
    """Of one that is complete at once, one that is left to a work, and one that fails."""
    begun = threading.Event()

    def run(backend: Backend) -> bool:
        phalanx.all_reduce_(torch.ones(2), backend)
        if backend.rank:
            work = phalanx.async_all_reduce_(torch.ones(3), backend)
            begun.set()
            work.wait()
            with pytest.raises(DistributedError):
                phalanx.all_reduce_(torch.ones(3), backend)
        else:
            assert begun.wait(PATIENCE)
            phalanx.all_reduce_(torch.ones(3), backend)
            backend.abort()
        return all(call.step is None for call in backend.group.checker.calls)

    assert SharedMemory().run(run, 2) == [True, True]
