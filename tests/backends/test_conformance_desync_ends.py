"""Ranks that disagree and do not wait: they poll, leave, or come when it is over."""

from __future__ import annotations

import threading

import pytest
import torch
from clusters import PATIENCE, Cluster, Tcp, whole
from waiting import wait_until

import phalanx
from phalanx import Backend, DesyncError, PeerLostError

ONES = torch.ones(8)
PROMPT = 15.0  # seconds after which a rank that was not told gives up, with an error that shows it

pytestmark = pytest.mark.usefixtures("asking_soon")


@pytest.mark.together
def test_ranks_that_only_ask_whether_they_are_done_learn_that_they_disagree(
    cluster: Cluster,
) -> None:
    def disagree(backend: Backend) -> None:
        root = 1 - backend.rank
        pending = phalanx.async_broadcast(ONES, backend, root, algorithm="star")
        if cluster.keeps_time:
            wait_until(pending.done)
        with pytest.raises(DesyncError):
            pending.wait()

    cluster.run(disagree, 2, timeout=PROMPT)


@pytest.mark.timeouts
def test_a_disagreement_is_told_although_the_other_side_leaves_in_the_middle_of_it(
    cluster: Cluster,
) -> None:
    met = threading.Event()

    def disagree(backend: Backend) -> None:
        if backend.rank == 0:
            phalanx.broadcast(ONES, backend, algorithm="star")
            backend.send(b"go", 1)
            assert met.wait(PATIENCE)
            whole(backend).close()
            return
        backend.recv(bytearray(2), 0)
        pending = phalanx.async_all_reduce(ONES, backend, algorithm="star")
        met.set()
        with pytest.raises(DesyncError):
            pending.wait()

    cluster.run(disagree, 2, timeout=PROMPT)


def test_a_disagreement_is_told_although_the_other_side_makes_no_call_and_cannot_answer() -> None:
    sent, told = threading.Event(), threading.Event()

    def disagree(backend: Backend) -> None:
        if backend.rank == 0:
            phalanx.broadcast(ONES, backend, algorithm="star")
            sent.set()
            assert told.wait(PATIENCE)
            return
        assert sent.wait(PATIENCE)
        unheard = r"rank 0 called something else, or the same .*\n  rank 1 called all_reduce #0 "
        with pytest.raises(DesyncError, match=unheard) as info:
            phalanx.all_reduce(ONES, backend, algorithm="star")
        told.set()
        assert info.value.peer == 0

    Tcp().run(disagree, 2, timeout=PROMPT)


def test_what_came_for_a_group_that_was_broken_before_it_was_made_is_dropped(
    cluster: Cluster,
) -> None:
    def break_early(backend: Backend) -> None:
        if backend.rank == 1:
            group = backend.subgroup([0, 1])
            group.send(bytes(1000), 0)
            group.abort()
            backend.barrier()
            return
        backend.barrier()
        group = backend.subgroup([0, 1])
        with pytest.raises(PeerLostError):
            group.barrier()
        assert not sum(backend.engine.matching.unexpected_bytes.values())

    cluster.run(break_early, 2)


@pytest.mark.requires("one process")
def test_a_rank_that_makes_no_call_any_more_finds_a_disagreement_in_the_log(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    def disagree(backend: Backend) -> None:
        group = backend.subgroup(range(2))
        if backend.rank == 0:
            phalanx.broadcast(ONES, group, algorithm="star")
            backend.send(b"go", 1)
            backend.recv(bytearray(4), 1)  # the other has raised
            backend.barrier()
            group.close()
            return
        backend.recv(bytearray(2), 0)
        with pytest.raises(DesyncError):
            phalanx.all_reduce(ONES, group, algorithm="star")
        backend.send(b"done", 0)
        backend.barrier()

    cluster.run(disagree, 2)
    told = [record for record in caplog.records if "without having noticed" in record.message]
    assert len(told) == 1
    assert "rank 0 closes" in told[0].message
    assert "broadcast #0" in told[0].message
    assert "all_reduce #0" in told[0].message
