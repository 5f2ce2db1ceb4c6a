"""The engine over a library: what it makes of one that only moves bytes when it is asked."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from clusters import Maker, Threads
from hypothesis import given
from hypothesis import strategies as st
from loop_library import Loop, LoopLibrary, Part

import phalanx
from phalanx import Backend, CollectiveTimeoutError, PeerLostError, UnsupportedOperationError
from phalanx.native.base import Abilities
from phalanx.native.engine import LibraryBackend
from phalanx.native.messages import INLINE, WORD, Verb, Word, pack, unpack
from phalanx.wire.frame import Channel, FrameError, Kind

LARGE = bytes(range(256)) * 8192  # more than is sent before there is room for it


class Looped(Threads):
    """Backends over a library in memory."""

    name = "loop"

    def __init__(
        self, can: Abilities | None = None, *, messages: bool = True, slowness: int = 0
    ) -> None:
        self.slowness = slowness
        self.can, self.messages = can or Abilities(), messages
        self.collectives: list[LoopLibrary] = []

    def makers(self, size: int, timeout: float) -> list[Maker]:
        self.collectives = Loop(size, self.can).libraries()
        messages = Loop(size, Abilities(), slowness=self.slowness).libraries()

        def maker(rank: int) -> Maker:
            return lambda: LibraryBackend(
                self.collectives[rank],
                messages[rank] if self.messages else None,
                (0,) * size,
                timeout=timeout,
            )

        return [maker(rank) for rank in range(size)]


def test_all_goes_on_while_somebody_waits_or_something_is_outstanding() -> None:
    def run(backend: Backend) -> None:
        rank, size = backend.rank, backend.world_size
        right, left = (rank + 1) % size, (rank - 1) % size
        pending = [phalanx.async_all_reduce(torch.full((3,), float(n)), backend) for n in range(5)]
        into = bytearray(len(LARGE))
        receive = phalanx.irecv(into, None, backend, tag=3)
        backend.send(LARGE, right, tag=3)
        assert receive.wait() == left
        assert into == LARGE
        mean = phalanx.all_reduce(torch.full((5000,), float(rank)), backend, phalanx.ReduceOp.MEAN)
        assert mean.unique().tolist() == [1.0]
        for n, each in enumerate(pending):
            assert each.wait().tolist() == [3.0 * n] * 3
        pair = backend.subgroup({rank, 0, 1} - {2}) if rank != 2 else None
        if pair is not None:
            assert phalanx.all_reduce(torch.ones(1), pair).item() == 2
        backend.barrier()

    Looped().run(run, 3)


@pytest.mark.parametrize("slowness", [0, 3])
def test_messages_of_all_sizes_stay_in_order_however_they_are_sent(slowness: int) -> None:
    sizes = [10, 5000, len(LARGE), 0, 300_000, 1, len(LARGE), 2500, 1 << 20, (1 << 20) + 1] * 3

    def run(backend: Backend) -> None:
        other = 1 - backend.rank
        sends = [phalanx.isend(bytes([n]) * size, other, backend) for n, size in enumerate(sizes)]
        for n, size in enumerate(sizes):
            backend.recv(into := bytearray(size), other)
            assert into == bytes([n]) * size
        for send in sends:
            send.wait()

    Looped(slowness=slowness).run(run, 2)


def test_what_is_given_up_before_it_is_granted_is_never_sent() -> None:
    def run(backend: Backend) -> None:
        if backend.rank == 0:
            given_up = bytearray(b"x" * len(LARGE))
            with pytest.raises(CollectiveTimeoutError):
                backend.send(given_up, 1, timeout=0.05)  # its receiver is in no call
            backend.send(b"go", 1, tag=1)
            backend.send(b"y" * len(LARGE), 1)
            return
        go.wait(20)
        backend.recv(into := bytearray(len(LARGE)), 0)
        assert into == b"y" * len(LARGE)

    go = threading.Event()
    threading.Timer(0.2, go.set).start()
    Looped().run(run, 2)


def test_a_receive_that_is_given_up_while_its_message_comes_leaves_it_for_the_next() -> None:
    def run(backend: Backend) -> None:
        if backend.rank == 0:
            pending = phalanx.isend(LARGE, 1, backend)
            backend.recv(bytearray(1), 1, tag=1)
            pending.wait()
            return
        given_up, into = bytearray(len(LARGE)), bytearray(len(LARGE))
        for _ in range(3):
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(given_up, 0, tag=2, timeout=0.02)
        backend.send(b"!", 0, tag=1)
        backend.recv(into, 0)
        assert into == LARGE
        assert not any(given_up)

    Looped().run(run, 2)


def test_an_error_of_the_librarys_breaks_the_group_in_its_words() -> None:
    cluster = Looped()

    def run(backend: Backend) -> None:
        phalanx.all_reduce(torch.ones(1), backend)
        backend.barrier()
        cluster.collectives[0].loop.broken = "the cable was pulled.\nand more"
        with pytest.raises(
            PeerLostError, match=r"rank \d: all_reduce #2 \(.*Loop says: the cable was pulled"
        ) as info:
            phalanx.all_reduce(torch.ones(1), backend)
        assert info.value.peer is None, "nobody knows who"
        with pytest.raises(PeerLostError, match="the group is broken"):
            backend.barrier()

    cluster.run(run, 2)


def test_the_one_that_left_is_named_rather_than_what_the_library_says() -> None:
    cluster = Looped()

    def run(backend: Backend) -> None:
        if backend.rank == 1:
            backend.recv(bytearray(1), 0)
            backend.close()
            return
        pending = phalanx.async_all_reduce(torch.ones(1), backend)
        backend.send(b"!", 1)
        with pytest.raises(PeerLostError, match="rank 1 left") as info:
            pending.wait()
        assert info.value.peer == 1

    cluster.run(run, 2)


@pytest.mark.parametrize("waits_before", [0, 1])
def test_an_interrupt_while_the_library_is_waited_for_breaks_the_group(
    monkeypatch: pytest.MonkeyPatch, waits_before: int
) -> None:
    """In the call itself, or (1) in the operation that goes on with what is not over soon."""
    waits = iter(range(waits_before))

    def interrupted(part: Part, seconds: float) -> bool:
        if next(waits, None) is None:
            raise KeyboardInterrupt
        return False

    def run(backend: Backend) -> None:
        if backend.rank == 1:
            with pytest.raises(phalanx.MisuseError, match="interrupted by KeyboardInterrupt"):
                backend.recv(bytearray(1), 0)
            return
        with monkeypatch.context() as patched:
            patched.setattr(Part, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                phalanx.all_reduce(torch.ones(1), backend)
        with pytest.raises(phalanx.MisuseError, match=r"the group is broken: .*was given up"):
            backend.barrier()

    Looped().run(run, 2)


def test_a_large_message_is_not_lost_though_its_sender_leaves_before_it_is_here() -> None:
    """That it leaves is a word, which may overtake the message."""

    def run(backend: Backend) -> None:
        if backend.rank == 1:
            backend.send(LARGE, 0)
            backend.close()
            return
        backend.recv(into := bytearray(len(LARGE)), 1)
        assert into == LARGE
        with pytest.raises(PeerLostError, match="rank 1 left"):
            backend.recv(into, 1)

    Looped(slowness=20).run(run, 2)


def test_closing_ends_the_librarys_groups() -> None:
    cluster = Looped()

    def run(backend: Backend) -> None:
        phalanx.all_reduce(torch.ones(1), backend)
        backend.close()
        backend.close()

    cluster.run(run, 2)
    assert all(library.closed for library in cluster.collectives)


# ------------------------------------------------------------------------------ streams of a device

ON_STREAM = Abilities(devices=frozenset({"meta"}), ordered=True)


def on_device(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def test_tensors_of_the_librarys_device_go_to_it_as_they_are() -> None:
    cluster = Looped(ON_STREAM)

    def run(backend: Backend) -> None:
        assert backend.devices == {"cpu", "meta"}
        assert backend.subgroup([backend.rank]).devices == {"cpu", "meta"}
        result = phalanx.all_reduce(on_device(3), backend)
        assert (result.device.type, result.shape) == ("meta", (3,))
        assert phalanx.all_reduce_(values := on_device(2, 3), backend) is values
        assert phalanx.all_reduce(torch.ones(2), backend, algorithm="ring").tolist() == [2.0, 2.0]

    cluster.run(run, 2)


def test_collectives_on_a_stream_begin_before_those_in_front_of_them_are_over() -> None:
    """And it is the caller's thread that waits, since that is whose stream waits."""
    cluster = Looped(ON_STREAM)

    def run(backend: Backend) -> None:
        pending = [phalanx.async_all_reduce(on_device(3), backend) for _ in range(4)]
        library = cluster.collectives[backend.rank]
        assert len(library.started) == 4
        assert not any(each.done() for each in pending)
        pending[2].wait()
        assert [part.waited_by for part in library.started[2:]] == [
            [threading.current_thread().name],
            [],
        ]
        backend.barrier()
        library.loop.released = 4
        assert all(each.done() for each in pending)
        pending[3].wait()
        assert not library.started[3].waited_by, "it is over: nothing is left to wait for"

    cluster.run(run, 2)


def test_what_the_library_cannot_do_on_its_device_is_refused_before_it_begins() -> None:
    def run(backend: Backend) -> None:
        for call in (
            lambda: phalanx.all_reduce(on_device(3), backend, phalanx.ReduceOp.MAX),
            lambda: phalanx.all_reduce(on_device(3), backend, algorithm="ring"),
            lambda: phalanx.broadcast(on_device(3), backend),
        ):
            with pytest.raises(UnsupportedOperationError, match=r"on meta: .*\.cpu\(\)"):
                call()
        with pytest.raises(UnsupportedOperationError, match="CPU"):
            backend.send(on_device(3), 1 - backend.rank)
        assert phalanx.all_reduce(torch.ones(1), backend).item() == 2

    Looped(ON_STREAM).run(run, 2)


def test_a_library_without_messages_does_what_it_can_and_refuses_the_rest() -> None:
    calls: list[Callable[[Backend], object]] = [
        lambda b: b.send(b"x", 1 - b.rank),
        lambda b: b.recv(bytearray(1), 1 - b.rank),
        lambda b: phalanx.all_reduce(torch.ones(1), b, algorithm="ring"),
        lambda b: phalanx.all_gather_object(1, b),
    ]

    def run(backend: Backend) -> None:
        for call in calls:
            with pytest.raises(UnsupportedOperationError, match="needs messages"):
                call(backend)
        assert phalanx.all_reduce(torch.ones(1), backend).item() == 2
        backend.barrier()

    Looped(messages=False).run(run, 2)


# ------------------------------------------------------------------------------------------- words


@given(
    verb=st.sampled_from(Verb),
    kind=st.sampled_from(Kind),
    group=st.integers(0, 2**64 - 1),
    number=st.integers(-(2**63), 2**63 - 1),
    ident=st.integers(0, 2**32 - 1),
    fingerprint=st.integers(0, 2**64 - 1),
    payload=st.binary(max_size=INLINE),
)
def test_words_come_out_as_they_went_in(
    verb: Verb,
    kind: Kind,
    group: int,
    number: int,
    ident: int,
    fingerprint: int,
    payload: bytes,
) -> None:
    word = Word(verb, Channel(group, kind, number), ident, fingerprint, len(payload), payload)
    block = pack(word)
    assert len(block) == WORD
    again = unpack(block)
    assert again._replace(payload=bytes(again.payload)) == word


def test_what_is_in_a_word_lies_as_torch_needs_it_to_compute_with_it() -> None:
    for dtype in (torch.complex128, torch.float64, torch.bfloat16):
        size = dtype.itemsize * 16
        word = Word(Verb.MESSAGE, Channel(0, Kind.COLLECTIVE, 0), 0, 0, size, bytes(size))
        block = memoryview(bytearray(pack(word)))
        whole = torch.frombuffer(block, dtype=torch.uint8)
        payload = torch.frombuffer(unpack(block).payload, dtype=torch.uint8)
        assert (payload.data_ptr() - whole.data_ptr()) % 16 == 0


@given(st.binary(min_size=WORD, max_size=WORD))
def test_no_block_is_read_as_more_than_a_word(block: bytes) -> None:
    try:
        word = unpack(memoryview(block))
    except FrameError:
        return
    assert len(word.payload) <= min(INLINE, word.total)
