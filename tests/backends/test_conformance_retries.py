"""A receive that is given up and repeated: its message arrives, on every kind of backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from clusters import CLUSTERS, PATIENCE, Cluster

import phalanx
from phalanx import Backend, CollectiveTimeoutError, SizeMismatchError
from phalanx.core import matching
from phalanx.wire.frame import MAX_PAYLOAD

OVER_SOCKETS = [each for each in CLUSTERS if each.name in ("tcp", "shm")]
SIZE = 12 << 20  # bytes, several frames
LARGE = 64 << 20  # much more than sockets take, and than is read in one attempt
SHORTEST = 1e-9  # seconds: over before the call looks at a socket


def numbers(size: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + size // 4, dtype=torch.int32)


def arrived(backend: Backend) -> int:
    """Bytes that are here of messages that nobody has received."""
    return sum(each.filled for kept in backend.engine.matching.unexpected.values() for each in kept)


def kept(backend: Backend) -> int:
    """The memory that they take."""
    return sum(backend.engine.matching.unexpected_bytes.values())


def patience() -> Callable[[], None]:
    """Fails when the test has taken too long."""
    deadline = time.monotonic() + PATIENCE

    def check() -> None:
        assert time.monotonic() < deadline, "it does not arrive"

    return check


def try_recv(backend: Backend, into: torch.Tensor, tag: int) -> bool:
    with suppress(CollectiveTimeoutError):
        backend.recv(into, 0, tag=tag, timeout=SHORTEST)
        return True
    return False


def try_cancel(backend: Backend, into: torch.Tensor, tag: int) -> bool:
    pending = phalanx.irecv(into, backend, 0, tag=tag)
    if not pending.done():
        pending.cancel("not yet")
    with suppress(phalanx.MisuseError):
        pending.wait()
        return True
    return False


def try_wait_any(backend: Backend, into: torch.Tensor, tag: int) -> bool:
    pending = phalanx.irecv(into, backend, 0, tag=tag)
    with suppress(CollectiveTimeoutError):
        phalanx.wait_any([pending], timeout=SHORTEST)
    pending.cancel("not yet")
    with suppress(phalanx.MisuseError):
        pending.wait()
        return True
    return False


@pytest.mark.timeouts
def read_what_came(backend: Backend) -> None:
    """Let the transport read its sockets and rings; simulated ranks have none."""
    look = getattr(backend.engine.transport, "look", None)
    if look is not None:
        with backend.engine.lock:
            look()
            backend.engine.run_ready()


@pytest.mark.parametrize("attempt", [try_recv, try_cancel, try_wait_any])
def test_a_receive_that_is_repeated_gets_its_message_however_short_each_attempt(
    cluster: Cluster, attempt: Callable[[Backend, torch.Tensor, int], bool]
) -> None:
    """Each has other memory, and that of the others is not touched after they were given up."""

    def run(backend: Backend) -> None:
        if backend.rank == 0:
            backend.send(numbers(SIZE), 1)
            backend.send(numbers(4), 1)
            return
        check, here, given_up = patience(), 0, []
        while True:
            check()
            into = torch.empty(SIZE // 4, dtype=torch.int32)
            if attempt(backend, into, 0):
                break
            assert arrived(backend) >= here, "what has arrived stays"
            here = arrived(backend)
            if len(given_up) < 5:
                given_up.append((into, into.clone()))
        assert torch.equal(into, numbers(SIZE))
        assert all(torch.equal(each, then) for each, then in given_up)
        backend.recv(into[:1], 0)
        assert kept(backend) == 0

    cluster.run(run, 2)


@pytest.mark.timeouts
def test_receives_of_several_tags_are_repeated_in_turn(cluster: Cluster) -> None:
    def run(backend: Backend) -> None:
        tags = {tag: numbers(SIZE // 4, tag) for tag in range(3)}
        if backend.rank == 0:
            sends = [phalanx.isend(each, backend, 1, tag=tag) for tag, each in tags.items()]
            for each in sends:
                each.wait()
            return
        check, into = patience(), {tag: torch.empty_like(each) for tag, each in tags.items()}
        left = [2, 1, 0]
        while left:
            check()
            left = [tag for tag in left if not try_recv(backend, into[tag], tag)]
        assert all(torch.equal(into[tag], each) for tag, each in tags.items())
        assert kept(backend) == 0

    cluster.run(run, 2)


@pytest.mark.timeouts
@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("size", [4, LARGE])
def test_a_send_that_timed_out_half_way_is_not_taken_for_the_next_message(
    cluster: Cluster, size: int
) -> None:
    """Its beginning has arrived before the next one is received, which may have another size."""
    gave_up = threading.Event()

    def run(backend: Backend) -> bool:
        if backend.rank == 0:
            try:
                backend.send(numbers(LARGE, 7), 1, timeout=0.1)
                came_whole = True  # where ranks are threads of one process
            except CollectiveTimeoutError:
                came_whole = False
            gave_up.set()
            backend.send(numbers(size), 1)
            return came_whole
        check, into = patience(), torch.zeros(size // 4, dtype=torch.int32)
        while not (gave_up.is_set() and arrived(backend)):
            check()
            read_what_came(backend)
        if arrived(backend) >= LARGE:
            with suppress(SizeMismatchError):
                backend.recv(into, 0)
        backend.recv(into, 0)
        assert torch.equal(into, numbers(size))
        assert kept(backend) == 0
        return False

    came_whole = cluster.run(run, 2)[0]
    assert came_whole == (cluster.name in ("simulated", "sub", "sub of sub"))


@pytest.mark.parametrize("ranks", OVER_SOCKETS, ids=str)
def test_of_a_message_whose_receive_is_given_up_for_good_no_more_is_taken(
    ranks: Cluster, little_room: int
) -> None:
    """What had arrived is kept, although it is more than is taken of what nobody asks for."""
    total = 2 * LARGE
    given_up, timed_out = threading.Event(), threading.Event()

    def run(backend: Backend) -> None:
        if backend.rank == 0:
            pending = phalanx.isend(numbers(total, 7), backend, 1, timeout=PATIENCE)
            assert given_up.wait(PATIENCE)
            try:
                with pytest.raises(CollectiveTimeoutError):
                    pending.wait(timeout=0.5)
            finally:
                timed_out.set()
            backend.send(numbers(total), 1)
            return
        into = torch.empty(total // 4, dtype=torch.int32)
        check = patience()
        while arrived(backend) < little_room + MAX_PAYLOAD:
            check()
            assert not try_recv(backend, into, 0)
        here, memory = arrived(backend), kept(backend)
        assert here <= memory < here + 2 * matching.BLOCK
        given_up.set()
        while not timed_out.is_set():
            read_what_came(backend)
        # What had begun to come, a frame or the pieces in shared memory, is read.
        assert kept(backend) <= memory + MAX_PAYLOAD + matching.BLOCK
        backend.recv(into, 0)
        assert torch.equal(into, numbers(total))
        assert kept(backend) == 0

    ranks.run(run, 2)


@pytest.mark.parametrize("ranks", OVER_SOCKETS, ids=str)
def test_128_mebibytes_arrive_by_receives_of_20_milliseconds(ranks: Cluster) -> None:
    total, most = 128 << 20, [0]

    def run(backend: Backend) -> None:
        if backend.rank == 0:
            backend.send(numbers(total), 1, timeout=PATIENCE)
            return
        into, here, check = torch.empty(total // 4, dtype=torch.int32), 0, patience()
        while True:
            try:
                backend.recv(into, 0, timeout=0.02)
                break
            except CollectiveTimeoutError:
                check()
                assert arrived(backend) >= here
                here = arrived(backend)
                most.append(kept(backend))
        assert torch.equal(into, numbers(total))

    ranks.run(run, 2)
    assert max(most) < total + 2 * matching.BLOCK
