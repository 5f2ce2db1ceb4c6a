"""TCP: what a connection may do to messages, with a peer that the test plays byte by byte."""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
import tracemalloc
from contextlib import suppress
from types import FrameType

import pytest
import torch
from listening import needs_proc
from raw_peer import WORLD, message, rank_0_and_a_raw_peer
from typing_extensions import override

import phalanx
from phalanx import CollectiveTimeoutError, MisuseError, PeerLostError, SizeMismatchError
from phalanx.transport.crowding import Crowding
from phalanx.transport.tcp import send_buffer
from phalanx.transport.tcp.loop import Reactor
from phalanx.transport.tcp.transport import SPIN
from phalanx.wire.control import FailureNotice
from phalanx.wire.frame import HEADER_SIZE, MAX_PAYLOAD, Channel, Kind, pack_header

LONG = bytes(range(256)) * 1000


@pytest.mark.parametrize("cut", [1, HEADER_SIZE - 1, HEADER_SIZE, HEADER_SIZE + 1, 70_000, -1])
def test_half_a_message_is_not_lost_and_not_taken_for_the_next_one(cut: int) -> None:
    """The receive times out in the middle; the next one gets the whole message."""
    stream = message(LONG)
    with rank_0_and_a_raw_peer() as (backend, peer):
        into = bytearray(len(LONG))
        peer.sock.sendall(stream[:cut])
        for _ in range(2):
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(into, 1, timeout=0.1)
        peer.sock.sendall(stream[cut:] + message(b"next"))
        other = bytearray(len(LONG))
        backend.recv(other, 1)
        assert other == LONG
        small = bytearray(4)
        backend.recv(small, 1)
        assert small == b"next"


def test_a_message_of_which_half_came_early_goes_where_the_receive_says() -> None:
    stream = message(LONG, tag=1)
    with rank_0_and_a_raw_peer() as (backend, peer):
        peer.sock.sendall(message(b"x") + stream[:100_000])
        backend.recv(bytearray(1), 1)
        into = torch.zeros(len(LONG), dtype=torch.uint8)
        with pytest.raises(CollectiveTimeoutError):
            backend.recv(into, 1, tag=1, timeout=0.05)
        peer.sock.sendall(stream[100_000:])
        backend.recv(into, 1, tag=1)
        assert bytes(into.tolist()) == LONG


def test_half_a_message_of_another_size_is_refused_when_it_is_whole_and_dropped() -> None:
    """Not before, as its sender may still give it up."""
    stream = message(LONG)
    with rank_0_and_a_raw_peer() as (backend, peer):
        peer.sock.sendall(stream[:1000])
        with pytest.raises(CollectiveTimeoutError):
            backend.recv(bytearray(4), 1, timeout=0.1)
        pending = phalanx.irecv(torch.empty(1), backend, 1)
        peer.sock.sendall(stream[1000:] + message(b"next"))
        with pytest.raises(SizeMismatchError, match=f"expected 4 bytes.*sent {len(LONG)} bytes"):
            pending.wait()
        into = bytearray(4)
        backend.recv(into, 1)
        assert into == b"next"


def test_a_message_that_a_receive_of_another_size_has_met_is_refused_by_the_next_one_too() -> None:
    stream = message(LONG)
    with rank_0_and_a_raw_peer() as (backend, peer):
        peer.sock.sendall(stream[:1000])
        for size in (4, len(LONG), 4):
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(bytearray(size), 1, timeout=0.1)
        peer.sock.sendall(stream[1000:] + message(b"next"))
        with pytest.raises(SizeMismatchError, match="dropped since an earlier receive had another"):
            backend.recv(bytearray(len(LONG)), 1)
        into = bytearray(4)
        backend.recv(into, 1)
        assert into == b"next"


@pytest.mark.parametrize("attempts", [0, 1, 2])
@pytest.mark.parametrize("posted_first", [False, True])
def test_a_message_of_another_size_that_its_sender_gave_up_is_no_error(
    attempts: int, posted_first: bool
) -> None:
    channel = Channel(WORLD, Kind.POINT_TO_POINT, 0)
    begun = pack_header(channel, length=1000, total=1 << 40) + bytes(1000)
    cancel = pack_header(Channel(WORLD, Kind.CANCEL, 0))
    with rank_0_and_a_raw_peer() as (backend, peer):
        into = torch.zeros(4, dtype=torch.uint8)
        pending = phalanx.irecv(into, backend, 1) if posted_first else None
        peer.sock.sendall(begun)
        for _ in range(attempts):
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(bytearray(4), 1, timeout=0.1)
        peer.sock.sendall(cancel + message(b"next"))
        (pending or phalanx.irecv(into, backend, 1)).wait()
        assert bytes(into.tolist()) == b"next"


def test_a_receive_that_is_given_up_again_copies_nothing() -> None:
    """What has arrived was moved out of the first receive's memory, and stays where it is."""
    content = bytes(range(256)) * (16 << 10)
    stream, cut = message(content), 3 << 20
    with rank_0_and_a_raw_peer() as (backend, peer):
        peer.sock.sendall(stream[:cut])
        into = bytearray(len(content))
        kept = backend.engine.matching.unexpected
        while not any(each.filled > 2 << 20 for queue in kept.values() for each in queue):
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(into, 1, timeout=0.1)
        tracemalloc.start()
        try:
            for _ in range(3):
                with pytest.raises(CollectiveTimeoutError):
                    backend.recv(into, 1, timeout=0.01)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < 1 << 20
        peer.sock.sendall(stream[cut:])
        backend.recv(into, 1)
        assert into == content


def test_a_message_that_its_sender_gave_up_is_not_read_as_a_part_of_the_next_one() -> None:
    size = MAX_PAYLOAD + 10
    channel = Channel(WORLD, Kind.POINT_TO_POINT, 0)
    begun = pack_header(channel, length=MAX_PAYLOAD, total=size) + bytes(MAX_PAYLOAD)
    cancel = pack_header(Channel(WORLD, Kind.CANCEL, 0))
    with rank_0_and_a_raw_peer() as (backend, peer):
        whole = b"\7" * size
        sender = threading.Thread(target=peer.sock.sendall, args=(begun + cancel + message(whole),))
        sender.start()
        into = bytearray(size)
        backend.recv(into, 1)
        sender.join()
        assert into == whole


def test_a_receive_that_gives_up_leaves_its_message_to_the_one_that_waits_behind_it() -> None:
    """Of two threads that receive, the first gives up when half of the message is here."""
    stream = message(b"a" * 1000)
    with rank_0_and_a_raw_peer() as (backend, peer):
        peer.sock.sendall(stream[:500])
        got = bytearray(1000)

        def give_up() -> None:
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(bytearray(1000), 1, timeout=0.5)
            peer.sock.sendall(stream[500:])

        def go_on() -> None:
            backend.recv(got, 1, timeout=15)

        first, second = threading.Thread(target=give_up), threading.Thread(target=go_on)
        first.start()
        second.start()
        first.join()
        second.join()
        assert got == b"a" * 1000


def test_a_large_message_is_cut_so_that_a_failure_notice_can_pass() -> None:
    content = torch.randint(256, (8 * MAX_PAYLOAD + 5,), dtype=torch.uint8)
    notice = FailureNotice("MisuseError", 0, 0, "it fails")
    with rank_0_and_a_raw_peer() as (backend, peer):
        pending = phalanx.isend(content, backend, 1)
        with backend.engine.lock:
            backend.engine.transport.control(1, 9, notice)
        came = [peer.read_frame() for _ in range(10)]
        pending.wait()
    kinds = [header.channel.kind for header, _ in came]
    assert kinds.index(Kind.FAILURE) < 8, "it waited behind the message"
    del came[kinds.index(Kind.FAILURE)]
    total = len(content)
    assert [(header.offset, header.length, header.total) for header, _ in came] == [
        *((frame * MAX_PAYLOAD, MAX_PAYLOAD, total) for frame in range(8)),
        (8 * MAX_PAYLOAD, 5, total),
    ]
    assert b"".join(payload for _, payload in came) == content.numpy().tobytes()


# Peers that end -----------------------------------------------------------------------------


def test_a_connection_that_ends_within_a_message_says_so() -> None:
    with rank_0_and_a_raw_peer() as (backend, peer):
        peer.sock.sendall(message(LONG)[:100])
        peer.sock.close()
        with pytest.raises(PeerLostError, match="rank 1 was lost") as info:
            backend.recv(bytearray(len(LONG)), 1)
        assert info.value.peer == 1
        assert "ended within a message" in str(info.value)


def test_a_connection_that_is_reset_is_a_lost_peer() -> None:
    with rank_0_and_a_raw_peer() as (backend, peer):
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.sock.close()
        with pytest.raises(PeerLostError, match="rank 1 was lost"):
            phalanx.all_reduce(torch.ones(1000), backend)


def test_what_came_before_the_end_is_still_received() -> None:
    with rank_0_and_a_raw_peer() as (backend, peer):
        peer.sock.sendall(message(b"one") + message(b"two"))
        peer.send_control(Kind.LEAVE)
        peer.sock.close()
        into = bytearray(3)
        for expected in (b"one", b"two"):
            backend.recv(into, 1)
            assert into == expected
        with pytest.raises(PeerLostError, match="rank 1 left"):
            backend.recv(into, 1)


def test_what_came_before_the_end_is_received_though_a_send_has_failed_meanwhile() -> None:
    with rank_0_and_a_raw_peer() as (backend, peer):
        peer.sock.sendall(message(b"one"))
        peer.send_control(Kind.LEAVE)
        peer.sock.close()
        for _ in range(3):
            with suppress(PeerLostError):
                backend.send(bytes(1 << 20), 1)
        into = bytearray(3)
        backend.recv(into, 1)
        assert into == b"one"


def test_a_failure_notice_overtakes_a_large_unexpected_message() -> None:
    """Of 300 MiB, more than is kept without being asked for, one frame has come."""
    with rank_0_and_a_raw_peer() as (backend, peer):
        channel = Channel(WORLD, Kind.POINT_TO_POINT, 0)
        peer.sock.sendall(pack_header(channel, length=1000, total=300 << 20) + bytes(1000))
        peer.fail(FailureNotice("MisuseError", 1, 1, "it will not come"))
        with pytest.raises(MisuseError, match="it will not come") as info:
            backend.barrier(timeout=15)
        assert info.value.peer == 1


def test_the_end_of_a_peer_is_seen_behind_a_large_message_that_nobody_asked_for() -> None:
    with rank_0_and_a_raw_peer() as (backend, peer):
        channel = Channel(WORLD, Kind.POINT_TO_POINT, 0)
        peer.sock.sendall(pack_header(channel, length=200_000, total=300 << 20) + bytes(200_000))
        peer.sock.close()
        with pytest.raises(PeerLostError, match="rank 1 was lost"):
            backend.barrier(timeout=15)


# Peers that are not what they should be -----------------------------------------------------

P2P = Channel(WORLD, Kind.POINT_TO_POINT, 0)
NONSENSE = {
    "garbage": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(60),
    "a frame that continues nothing": pack_header(P2P, length=1, total=10, offset=5) + b"x",
    "a message inside another": 2 * (pack_header(P2P, length=1, total=10) + b"x"),
    "a frame of another message": pack_header(P2P, length=1, total=10)
    + b"x"
    + pack_header(P2P, length=1, total=11, offset=1)
    + b"x",
    "an address after the epoch": pack_header(Channel(0, Kind.ADDRESS, 0), length=2, total=2)
    + b"{}",
    "a table": pack_header(Channel(0, Kind.TABLE, 0), length=1, total=1) + b"\x90",
    "a failure that cannot be read": pack_header(Channel(0, Kind.FAILURE, 0), length=3, total=3)
    + b"abc",
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE.keys())
def test_a_peer_that_talks_nonsense_is_lost_and_nothing_else_happens(nonsense: bytes) -> None:
    with rank_0_and_a_raw_peer() as (backend, peer):
        peer.sock.sendall(nonsense)
        with pytest.raises(PeerLostError, match="rank 1 was lost") as info:
            backend.recv(bytearray(1), 1, tag=7)
        assert (info.value.rank, info.value.peer, info.value.op) == (0, 1, "recv")
        with pytest.raises(PeerLostError, match="the group is broken"):
            backend.barrier()


def test_a_message_that_announces_a_terabyte_takes_no_memory() -> None:
    with rank_0_and_a_raw_peer() as (backend, peer):
        channel = Channel(WORLD, Kind.POINT_TO_POINT, 3)
        peer.sock.sendall(message(b"y") + pack_header(channel, length=1, total=1 << 40) + b"x")
        backend.recv(bytearray(1), 1)
        for _ in range(2):
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(bytearray(1), 1, tag=3, timeout=0.05)
            assert backend.engine.matching.unexpected_bytes[1] < 1 << 10
        part = pack_header(channel, length=MAX_PAYLOAD, total=1 << 40, offset=1)
        peer.sock.sendall(part + bytes(MAX_PAYLOAD))
        with pytest.raises(CollectiveTimeoutError):
            backend.recv(bytearray(1), 1, tag=3, timeout=0.5)
        assert backend.engine.matching.unexpected_bytes[1] < 1 << 10


@pytest.mark.parametrize("culprit", [0, 1, 77, 2**31])
def test_a_failure_with_a_strange_culprit_is_an_error_like_any_other(culprit: int) -> None:
    with rank_0_and_a_raw_peer() as (backend, peer):
        peer.fail(FailureNotice("DesyncError", culprit, 1, "because", "all_reduce #7", 7))
        with pytest.raises(phalanx.DistributedError):
            backend.barrier()


def test_a_rank_that_closes_sleeps_until_its_last_bytes_have_left() -> None:
    """The peer does not read for a while, so the kernel still has some of them."""
    with rank_0_and_a_raw_peer() as (backend, peer):
        backend.send(bytes(1 << 18), 1)

        def read_all() -> None:
            while peer.sock.recv(1 << 16):
                pass

        reader = threading.Timer(0.4, read_all)
        reader.start()
        began, used = time.monotonic(), time.thread_time()
        backend.close()
        took, used = time.monotonic() - began, time.thread_time() - used
        reader.join()
    assert took > 0.1, "nothing was waited for"
    assert used < took / 2


def test_a_send_that_is_complete_as_others_are_told_of_a_failure_is_over() -> None:
    """Of another group, so that another thread may wait for it: it waits no longer."""
    with rank_0_and_a_raw_peer() as (backend, peer):
        broken = backend.subgroup([0, 1])
        send = backend.isend(bytes(1 << 12), 1, background=False)
        while send.over:  # the kernel takes it
            send = backend.isend(bytes(1 << 12), 1, background=False)
        peer.sock.setblocking(False)
        with suppress(BlockingIOError):
            while peer.sock.recv(1 << 16):
                pass
        broken.fail(PeerLostError("the disk is full", rank=0))
        assert send.over


def test_a_connection_inside_a_host_does_not_pace_itself() -> None:
    with rank_0_and_a_raw_peer() as (backend, _):
        sock = backend._transport.mesh.connections[1].sock
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert name.strip(b"\0") == b"reno"


class Host(Crowding):
    """Its cores are short, or not, as a test says."""

    crowded = False

    @override
    def at(self, now: float) -> bool:
        return self.crowded


def test_the_kernel_sizes_the_send_buffer_while_cores_are_short() -> None:
    """What a peer reads in one turn on a core is then more than the buffer of other times."""
    with rank_0_and_a_raw_peer() as (backend, peer):
        host = backend._transport.mesh.crowding = Host()
        sock = backend._transport.mesh.connections[1].sock
        try:
            sock.setsockopt(socket.SOL_SOCKET, send_buffer.SO_BUF_LOCK, 1)
        except OSError:
            pytest.skip("the kernel has no SO_BUF_LOCK")
        sizes = []
        for host.crowded in (False, True, False):
            sent = phalanx.isend(torch.zeros(64 << 20, dtype=torch.uint8), backend, 1)
            while not sent.done():  # which moves what the socket takes
                peer.sock.recv(1 << 20)
            sizes.append(sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
        assert sizes[0] == sizes[2] < sizes[1]


@pytest.mark.parametrize("crowded", [False, True])
def test_a_rank_that_waits_polls_only_while_there_are_cores(crowded: bool) -> None:
    spins: list[float] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code is Reactor.turn.__code__:
            spins.append(frame.f_locals["spin"])

    with rank_0_and_a_raw_peer() as (backend, _):
        host = backend._transport.mesh.crowding = Host()  # as where each rank has a core
        host.crowded, before = crowded, sys.getprofile()
        sys.setprofile(note)
        try:
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(bytearray(1), 1, timeout=0.1)
        finally:
            sys.setprofile(before)
    assert spins
    assert (SPIN in spins) is not crowded


@needs_proc
def test_a_look_or_two_do_not_change_what_is_taken_for_the_state_of_a_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = os.cpu_count() or 1
    running = iter({"x": cores + 1, ".": cores}[look] for look in "..x..x.xx.xxxxx.x...x...")
    monkeypatch.setattr(os, "read", lambda *_: b"0.1 0.1 0.1 %d/200 1234" % next(running))
    host = Crowding()
    found = "".join("x" if host.at(float(now)) else "." for now in range(24))
    monkeypatch.undo()
    assert found == "............xxxxxxxxxx..", found
