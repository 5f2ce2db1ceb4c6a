"""TCP: what comes before it is asked for, and what is left of an operation when it is over."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from clusters import Tcp
from framing import framed
from raw_peer import WORLD, message, rank_0_and_a_raw_peer

import phalanx
from phalanx import Backend, CollectiveTimeoutError, ReduceOp
from phalanx.collectives.plan import Key, make_plan
from phalanx.core.matching import BLOCK, BLOCKS_KEPT, Matching
from phalanx.wire.frame import Channel, Kind

HALF = 3 * BLOCK // 8 + 1000  # elements of float64: three blocks, and a little


@pytest.mark.parametrize("early", [0, 52, 53, 100_000, 52 + BLOCK, BLOCK + 55, 3 * BLOCK + 61])
def test_a_contribution_that_came_half_early_is_combined_like_any_other(early: int) -> None:
    """Up to any byte, in the middle of an element or not."""
    mine, theirs = torch.rand(2 * HALF, dtype=torch.float64), torch.rand(HALF, dtype=torch.float64)
    result = torch.rand(HALF, dtype=torch.float64)
    with rank_0_and_a_raw_peer() as (backend, peer):
        key = Key("all_reduce", "ring", (2 * HALF,), mine.dtype, ReduceOp.SUM)
        fingerprint = make_plan(key, 1, 2).fingerprint
        channel = Channel(WORLD, Kind.COLLECTIVE, 0)

        def stream(values: torch.Tensor) -> bytes:
            view = memoryview(bytearray(values.view(torch.uint8).tolist()))
            return framed(channel, view, fingerprint)

        contribution = stream(theirs)
        peer.sock.sendall(contribution[:early])
        with pytest.raises(CollectiveTimeoutError):
            backend.recv(bytearray(1), 1, timeout=0.1)  # meanwhile it takes what comes

        def read_message() -> None:
            while peer.read_frame()[0].channel.kind is not Kind.COLLECTIVE:
                pass  # it asks whether this rank is in it, too

        def play_the_rest() -> None:
            peer.sock.sendall(contribution[early:])
            read_message()  # rank 0's contribution,
            peer.sock.sendall(stream(result))
            read_message()  # and its chunk of the result

        rest = threading.Thread(target=play_the_rest)
        rest.start()
        got = phalanx.all_reduce(mine, backend, algorithm="ring")
        rest.join()
    assert torch.equal(got[:HALF], mine[:HALF] + theirs)
    assert torch.equal(got[HALF:], result)


@pytest.mark.parametrize("cut", [BLOCK + 52, 2 * BLOCK + 100, 3 * BLOCK])
def test_a_long_message_survives_receives_that_give_up_before_and_in_the_middle_of_it(
    cut: int,
) -> None:
    content = bytes(range(255)) * (4 * BLOCK // 255 + 1)
    stream = message(content)
    with rank_0_and_a_raw_peer() as (backend, peer):
        for start, stop in ((0, cut), (cut, cut + 1000), (cut + 1000, cut + BLOCK // 2)):
            peer.sock.sendall(stream[start:stop])
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(bytearray(1), 1, tag=1, timeout=0.05)  # it comes early
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(bytearray(len(content)), 1, timeout=0.05)  # it is taken over, and back
        peer.sock.sendall(stream[cut + BLOCK // 2 :])
        into = bytearray(len(content))
        backend.recv(into, 1)
        assert into == content
        assert backend.engine.matching.unexpected_bytes[1] == 0


def test_what_comes_of_a_collective_that_has_failed_is_dropped_with_what_was_kept() -> None:
    tensor = torch.ones(2 * HALF, dtype=torch.float64)
    with rank_0_and_a_raw_peer() as (backend, peer):
        key = Key("all_reduce", "ring", (2 * HALF,), tensor.dtype, ReduceOp.SUM)
        view = memoryview(bytearray(8 * HALF))
        channel = Channel(WORLD, Kind.COLLECTIVE, 0)
        contribution = framed(channel, view, make_plan(key, 1, 2).fingerprint)
        peer.sock.sendall(contribution[: BLOCK + 333])
        with pytest.raises(CollectiveTimeoutError):
            backend.recv(bytearray(1), 1, timeout=0.1)
        assert backend.engine.matching.unexpected_bytes[1] > BLOCK
        with pytest.raises(CollectiveTimeoutError):
            phalanx.all_reduce_(tensor, backend, algorithm="ring", timeout=0.1)
        left = tensor.clone()
        assert backend.engine.matching.unexpected_bytes[1] == 0
        peer.sock.sendall(contribution[BLOCK + 333 :])
        with pytest.raises(CollectiveTimeoutError, match="broken"):
            phalanx.all_reduce_(tensor, backend)
        backend.engine.transport.look()  # type: ignore[attr-defined]
        assert torch.equal(tensor, left)


def test_many_small_messages_in_one_piece_and_a_large_one_among_them_all_come() -> None:
    """Wherever in what was read each of them lies."""
    contents = [bytes([n % 251]) * n for n in (0, 1, 3, 8, 1000, 0, 70_000, 5, 16, 64, 3000)]
    with rank_0_and_a_raw_peer() as (backend, peer):
        peer.sock.sendall(b"".join(map(message, contents)))
        for content in contents:
            into = bytearray(len(content))
            backend.recv(into, 1)
            assert into == content


def test_small_messages_to_a_peer_that_does_not_read_arrive_whole_and_in_order() -> None:
    """The socket takes a part of one of them at last."""
    content, sends = bytes(range(250)) * 4, range(4000)

    def run(backend: Backend) -> None:
        if backend.rank == 0:
            pending = [phalanx.isend(n.to_bytes(4, "big") + content, backend, 1) for n in sends]
            backend.recv(bytearray(1), 1)
            for one in pending:
                one.wait()
        else:
            into = bytearray(4 + len(content))
            backend.send(b"x", 0)
            for n in sends:
                backend.recv(into, 0)
                assert into == n.to_bytes(4, "big") + content

    Tcp().run(run, 2)


def test_memory_for_what_comes_early_is_used_again_up_to_a_limit() -> None:
    matching = Matching(lambda channel, peer: False)
    blocks = [matching.borrow_block() for _ in range(2 * BLOCKS_KEPT)]
    assert {len(block) for block in blocks} == {BLOCK}
    for block in [*blocks, matching.borrow_chunk(100)]:
        matching.return_block(block)
    known = {id(block.obj) for block in blocks}
    again = [matching.borrow_chunk(BLOCK + 1) for _ in range(2 * BLOCKS_KEPT)]
    assert sum(id(block.obj) in known for block in again) == BLOCKS_KEPT
    assert len(matching.borrow_chunk(100)) == 100


def test_an_operation_leaves_nothing_to_the_garbage_collector() -> None:
    """Which would cost a third of a small call, and keep memory for longer than it is needed."""

    calls = 50

    def run(backend: Backend) -> int:
        tensor, other = torch.ones(8), 1 - backend.rank
        for _ in range(2):
            gc.collect()
            for _ in range(calls):
                phalanx.all_reduce_(tensor, backend)
                backend.sendrecv(tensor, other, torch.empty(8), other)
        return gc.collect()

    gc.disable()
    try:
        assert sum(Tcp().run(run, 2)) < calls
    finally:
        gc.enable()
