"""Who is blamed when a deadline passes: the end of the chain of waits, over whatever backend.

rank 0  waits for  rank 1  waits for  rank 2  ... which has made no call: it is named
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import pytest
import torch
from clusters import CLUSTERS, PATIENCE, Cluster
from together import Together

import phalanx
from phalanx import Backend, CollectiveTimeoutError

SOON = 1.6  # seconds; the questions are asked 0.4 before, for a machine that is busy
ONES = torch.ones(4)
HAS_NOT_CALLED = "has made no matching call"

# One of each kind in which chains differ: in memory, over sockets, numbered anew in a group.
WAYS = [each for each in CLUSTERS if each.name in ("simulated", "tcp", "sub")]
ways = pytest.mark.parametrize("ranks", [Together(WAYS)], ids=["together"])


def timed_out(call: Callable[[], object]) -> tuple[int | None, str]:
    """Who is blamed, and the message without what is only there for subgroups of the cluster."""
    with pytest.raises(CollectiveTimeoutError) as info:
        call()
    text = re.sub(
        r" \(rank \d of the job\)| in the group of ranks \[[\d, ]*\]", "", str(info.value)
    )
    return info.value.peer, re.sub(r" at test_\w+\.py:\d+", "", text)


@ways
def test_a_chain_of_receives_names_its_end_and_every_link(ranks: Cluster) -> None:
    gave_up = threading.Event()

    def wait(backend: Backend) -> tuple[int | None, str] | None:
        rank, into = backend.rank, bytearray(1)
        backend.barrier()
        if rank == 0:
            blamed = timed_out(lambda: backend.recv(into, 1, timeout=SOON))
            gave_up.set()
            backend.recv(into, 1)  # nothing is broken
            return blamed
        if rank == 4:
            assert gave_up.wait(PATIENCE)
        else:
            backend.recv(into, rank + 1, tag=0)
        backend.send(into, rank - 1)
        return None

    blamed = ranks.run(wait, 5)[0]
    assert blamed is not None
    peer, text = blamed
    assert peer == 4
    assert text.startswith(
        "rank 0: recv #0 waited 1.6 s for rank 1, which waits in recv #0 for rank 2, which waits "
        "in recv #0 for rank 3, which waits in recv #0 for rank 4, which "
    )
    assert HAS_NOT_CALLED in text


@ways
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_of_a_collective_every_rank_names_the_one_that_has_not_called(
    ranks: Cluster, algorithm: str
) -> None:
    gave_up = threading.Barrier(4)

    def wait(backend: Backend) -> int | None:
        if backend.rank == 2:
            gave_up.wait(PATIENCE)
            return 2
        peer, text = timed_out(
            lambda: phalanx.all_reduce(ONES, backend, algorithm=algorithm, timeout=SOON)
        )
        gave_up.wait(PATIENCE)
        assert HAS_NOT_CALLED in text
        return peer

    assert ranks.run(wait, 4) == [2] * 4


@ways
def test_a_collective_waits_for_a_rank_that_waits_for_a_message(ranks: Cluster) -> None:
    """Rank 3 is no member of the group that breaks: in its numbers, the wait begins with 2."""
    gave_up = threading.Event()

    def wait(backend: Backend) -> tuple[int | None, str] | None:
        group = backend.subgroup([0, 1, 2]) if backend.rank < 3 else None
        blamed = None
        if backend.rank == 3:
            assert gave_up.wait(PATIENCE)
            backend.send(b"!", 2)
        elif backend.rank == 2:
            backend.recv(bytearray(1), 3)
        else:
            assert group is not None
            blamed = timed_out(
                lambda: phalanx.all_reduce(ONES, group, algorithm="star", timeout=SOON)
            )
            gave_up.set()
        backend.barrier()
        return blamed

    results = ranks.run(wait, 4)
    for blamed in results[:2]:
        assert blamed is not None
        peer, text = blamed
        assert peer == 2
        assert re.search(r"for rank 2, which waits in recv #0 for rank \d of the job, which", text)
        assert HAS_NOT_CALLED in text


@ways
def test_who_waits_for_several_names_the_one_that_keeps_all_the_others(ranks: Cluster) -> None:
    """Any message would do for rank 0. Two ranks wait for each other, and one for the last one."""
    gave_up = threading.Event()
    waits_for = {1: 2, 2: 1, 3: 4}

    def wait(backend: Backend) -> tuple[int | None, str] | None:
        backend.barrier()
        if backend.rank == 0:
            blamed = timed_out(lambda: backend.recv(bytearray(1), None, timeout=SOON))
            gave_up.set()
            for rank in range(1, 5):
                backend.send(b"!", rank, tag=1)
            return blamed
        peer = waits_for.get(backend.rank)
        if peer is None:
            assert gave_up.wait(PATIENCE)
        else:
            pending = backend.irecv(bytearray(1), peer)
            assert not pending.over
        backend.recv(bytearray(1), 0, tag=1)
        return None

    blamed = ranks.run(wait, 5)[0]
    assert blamed is not None
    peer, text = blamed
    assert peer == 4
    assert "waited 1.6 s for ranks 1, 2, 3, 4, which " in text
    assert HAS_NOT_CALLED in text


@ways
def test_a_circle_is_said_to_be_one(ranks: Cluster) -> None:
    gave_up = threading.Event()

    def wait(backend: Backend) -> tuple[int | None, str] | None:
        rank = backend.rank
        backend.barrier()
        if rank == 0:
            blamed = timed_out(lambda: backend.recv(bytearray(1), 1, timeout=SOON))
            gave_up.set()
            backend.send(b"!", 2)
            return blamed
        backend.recv(bytearray(1), (rank + 1) % 3)
        if rank == 2:
            backend.send(b"!", 1)
        return None

    blamed = ranks.run(wait, 3)[0]
    assert blamed is not None
    peer, text = blamed
    assert peer == 1
    assert text == (
        "rank 0: recv #0 waited 1.6 s for rank 1, which waits in recv #0 for rank 2: either they "
        "wait for each other, or moving the bytes takes longer than timeout= allows"
    )


@ways
def test_a_rank_that_waits_in_no_call_answers_with_what_it_has_under_way(ranks: Cluster) -> None:
    """Rank 1 computes, or asks `done()` now and then; what it has begun waits for rank 2."""
    gave_up = threading.Event()

    def wait(backend: Backend) -> tuple[int | None, str] | None:
        if backend.rank == 0:
            blamed = timed_out(lambda: backend.recv(bytearray(1), 1, timeout=SOON))
            gave_up.set()
            backend.send(b"!", 2)
        elif backend.rank == 1:
            pending = phalanx.async_broadcast(ONES, backend, root=2)
            while not gave_up.wait(0.02):
                assert not pending.done() or gave_up.is_set()
            pending.wait()
            return None
        else:
            assert gave_up.wait(PATIENCE)
            backend.recv(bytearray(1), 0)
            blamed = None
        phalanx.broadcast(ONES, backend, root=2)
        return blamed

    blamed = ranks.run(wait, 3)[0]
    assert blamed is not None
    peer, text = blamed
    assert peer == 2
    assert "for rank 1, which waits in broadcast #0" in text


@ways
def test_what_is_queued_blames_whom_the_head_of_the_queue_waits_for(ranks: Cluster) -> None:
    gave_up = threading.Barrier(3)

    def wait(backend: Backend) -> None:
        if backend.rank:
            first = phalanx.async_broadcast(ONES, backend, root=2) if backend.rank == 1 else None
            gave_up.wait(PATIENCE)
            if first is not None:
                assert timed_out(first.wait)[0] == 2
            return
        phalanx.async_broadcast(ONES, backend, root=2)
        peer, text = timed_out(lambda: backend.barrier(timeout=SOON))
        assert peer == 2
        assert "barrier #1 waited 1.6 s for rank 2 (it is queued behind broadcast #0" in text
        gave_up.wait(PATIENCE)

    ranks.run(wait, 3)
