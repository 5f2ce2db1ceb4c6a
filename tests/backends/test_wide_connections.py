"""A wide mesh: who is connected with whom, and what comes of a rank without a connection.

With so few ranks as here it is a ring: each rank is connected with the two beside it.
"""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch
from clusters import (
    PATIENCE,
    TIMEOUT,
    TOKEN,
    SubOf,
    Tcp,
    Wide,
    WideBackend,
    WideSharedMemoryBackend,
)
from test_tcp_rendezvous import place

import phalanx
from phalanx import Backend, BackendUnavailableError, MisuseError, PeerLostError
from phalanx.transport.backends import MeshBackend
from phalanx.transport.tcp.mesh import Mesh
from phalanx.wire.control import parse_address
from phalanx.wire.handshake import DialerHandshake, Identity, Refused

wide = Wide()


def connected(backend: Backend) -> set[int]:
    """The ranks with which this one has a connection."""
    with backend.engine.lock:
        return set(mesh_of(backend).connections)


def mesh_of(backend: Backend) -> Mesh:
    assert isinstance(backend, MeshBackend)
    return backend._transport.mesh


def beside(rank: int, size: int) -> set[int]:
    return {(rank - 1) % size, (rank + 1) % size}


def test_a_rank_is_connected_with_those_beside_it_until_it_sends_something_to_another() -> None:
    size = 6
    all_formed, all_looked = threading.Barrier(size), threading.Barrier(size)

    def send_across(backend: Backend) -> None:
        across = (backend.rank + 3) % size
        all_formed.wait(PATIENCE)
        assert connected(backend) == beside(backend.rank, size)
        all_looked.wait(PATIENCE)
        if backend.rank < 3:
            backend.send(b"first", across)
            backend.send(b"then!", across)
        else:
            into = bytearray(5)
            backend.recv(into, across)
            assert into == b"first"
            backend.recv(into, across)
            assert into == b"then!"
        assert connected(backend) == beside(backend.rank, size) | {across}

    wide.run(send_across, size)


def test_two_that_call_each_other_at_the_same_time_have_one_connection() -> None:
    size = 8

    def cross(backend: Backend) -> None:
        into = bytearray(1)
        for distance in range(size // 2, 1, -1):
            for way in (distance, -distance):
                there, back = (backend.rank + way) % size, (backend.rank - way) % size
                backend.sendrecv(bytes([backend.rank]), there, into, back)
                assert into[0] == back
        backend.barrier()
        assert connected(backend) == set(range(size)) - {backend.rank}

    wide.run(cross, size)


def test_the_port_of_rank_0_is_free_for_another_job_when_the_first_has_formed() -> None:
    listener, address = place()
    with ThreadPoolExecutor(3) as pool:
        made = [
            pool.submit(
                WideBackend,
                rank,
                3,
                address,
                token=TOKEN,
                timeout=TIMEOUT,
                listener=listener if rank == 0 else None,
            )
            for rank in range(3)
        ]
        backends = [each.result() for each in made]
        socket.create_server(parse_address(address)).close()
        for closing in [pool.submit(backend.close) for backend in backends]:
            closing.result()


@pytest.mark.parametrize("how", ["abort", "close"])
def test_the_end_of_a_rank_without_a_connection_is_known_though_those_between_compute(
    how: str,
) -> None:
    told = threading.Event()

    def end(backend: Backend) -> None:
        if backend.rank == 3:
            getattr(backend, how)()
        elif backend.rank == 0:
            words = "rank 3 left" if how == "close" else "rank 3 was lost"
            with pytest.raises(PeerLostError, match=words) as info:
                backend.recv(bytearray(1), 3)
            assert info.value.peer == 3
            assert 3 not in connected(backend)
            told.set()
        assert told.wait(PATIENCE)

    wide.run(end, 6)


def test_who_stays_when_those_beside_it_have_left_still_hears_of_the_others() -> None:
    gone = threading.Semaphore(0)

    def leave(backend: Backend) -> None:
        if backend.rank in (0, 3):
            for _ in range(4):
                assert gone.acquire(timeout=PATIENCE)
        if backend.rank == 0:
            with pytest.raises(PeerLostError, match="rank 3 left") as info:
                backend.recv(bytearray(1), 3)
            assert info.value.peer == 3
            return
        backend.close()
        gone.release(2)

    wide.run(leave, 6)


def test_what_a_rank_sent_before_it_left_comes_before_word_that_it_left() -> None:
    """Word goes round by other ranks, and is faster than the message."""
    size, count = 6, 4 << 20

    def send(backend: Backend) -> None:
        if backend.rank == 3:
            backend.send(torch.ones(count, dtype=torch.uint8), 0)
            backend.close()
        elif backend.rank == 0:
            into = torch.zeros(count, dtype=torch.uint8)
            backend.recv(into, 3)
            assert into.all()
            with pytest.raises(PeerLostError, match="rank 3 left"):
                backend.recv(into, 3)

    wide.run(send, size)


def test_a_group_fails_on_members_that_have_no_connection_to_who_failed() -> None:
    def fail(backend: Backend) -> None:
        inner = backend.subgroup([0, 2, 4])
        if backend.rank == 4:
            inner.fail(MisuseError("no more data"))
            return
        with pytest.raises(MisuseError, match="no more data") as info:
            inner.recv(bytearray(1), 1 - inner.rank)
        assert info.value.peer == 2

    def run(backend: Backend) -> None:
        if backend.rank % 2 == 0:
            fail(backend)
        backend.barrier()  # of all: it is not broken

    wide.run(run, 6)


def test_collectives_are_right_on_a_group_of_which_few_are_connected() -> None:
    def collect(backend: Backend) -> None:
        rank, size = backend.rank, backend.world_size
        mine = torch.tensor([float(rank)])
        for algorithm in ("ring", "direct", "tree"):
            reduced = phalanx.all_reduce(mine, backend, algorithm=algorithm)
            assert reduced.item() == size * (size - 1) / 2
        assert phalanx.all_gather(mine, backend).flatten().tolist() == list(range(size))

    wide.run(collect, 7)
    SubOf(Wide()).run(collect, 4)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """The process can open no file: the limit is the lowest number that was free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(lowest)


def test_a_rank_that_has_no_descriptor_for_a_connection_says_so_and_which_it_was_for() -> None:
    formed, tried = threading.Barrier(4), threading.Event()

    def send(backend: Backend) -> None:
        formed.wait(PATIENCE)
        if backend.rank == 0:
            with (
                no_descriptor_left(),
                pytest.raises(BackendUnavailableError, match=r"rank 2.*ulimit -n") as info,
            ):
                backend.send(b"!", 2)
            assert (info.value.rank, info.value.peer, info.value.op) == (0, 2, "send")
            tried.set()
            backend.send(b"!", 2)  # there are some again
        elif backend.rank == 2:
            assert tried.wait(PATIENCE)
            backend.recv(bytearray(1), 0)

    wide.run(send, 4)


def test_rank_0_needs_a_descriptor_for_each_rank_and_says_so_before_it_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener, address = place()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    with pytest.raises(BackendUnavailableError, match=r"100 open files.*64 ranks.*ulimit -n"):
        WideBackend(0, 64, address, token=TOKEN, timeout=5, listener=listener)


def test_strangers_are_turned_away_for_as_long_as_a_rank_listens() -> None:
    formed, tried = threading.Barrier(4), threading.Event()

    def run(backend: Backend) -> None:
        formed.wait(PATIENCE)
        if backend.rank == 0:
            stranger(backend, 2, b"another token, which is as long")
            stranger(backend, 1, TOKEN.encode())  # a second copy of a rank that is connected
            tried.set()
        assert tried.wait(PATIENCE)
        backend.barrier()

    def stranger(backend: Backend, target: int, token: bytes) -> None:
        address = mesh_of(backend).addresses[target]
        hello = DialerHandshake(Identity("", 0, 0, 4), token, target)
        with socket.create_connection((address.host, address.port), timeout=PATIENCE) as sock:
            sock.sendall(hello.start())
            with suppress(Refused):
                while words := sock.recv(4096):
                    sock.sendall(hello.receive(words))
            assert not hello.complete

    wide.run(run, 4)


def test_a_rank_closes_though_a_forked_process_holds_its_files_open() -> None:
    """Such as a data loader's worker."""

    def run(backend: Backend) -> None:
        backend.barrier()
        assert isinstance(backend, MeshBackend)
        end = backend._transport.heartbeat._end
        assert end is not None
        held = os.dup(end[1])
        backend.close()
        os.close(held)

    wide.run(run, 4)


def test_large_messages_go_through_memory_to_ranks_that_were_not_connected() -> None:
    class WideSharedMemory(Wide):
        kind = WideSharedMemoryBackend

    def send(backend: Backend) -> None:
        across = (backend.rank + 2) % 4
        mine = torch.full((1 << 20,), backend.rank + 1, dtype=torch.uint8)
        into = torch.zeros(1 << 20, dtype=torch.uint8)
        backend.sendrecv(mine, across, into, across)
        assert (into == across + 1).all()
        assert phalanx.all_reduce(mine, backend).eq(10).all()
        assert mesh_of(backend).connections[across].out is not None

    WideSharedMemory().run(send, 4)


@pytest.mark.parametrize(("size", "connections"), [(16, 15), (17, 4)])
def test_up_to_16_ranks_are_connected_each_with_each(size: int, connections: int) -> None:
    formed = threading.Barrier(size)

    def count(backend: Backend) -> int:
        formed.wait(PATIENCE)
        return len(connected(backend))

    assert set(Tcp().run(count, size)) == {connections}
