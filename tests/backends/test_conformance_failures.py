"""Ranks that leave or die while others wait, on every kind of backend.

A rank ends as a whole: where the ranks under test are a subgroup, it is the backend under it that
is closed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from clusters import Cluster, whole
from forms import sizes

import phalanx
from phalanx import Backend, PeerLostError
from phalanx.collectives.schedules import COLLECTIVES

pytestmark = pytest.mark.wide

PROMPT = 15.0  # seconds after which a rank that should have been told gives up with another error

LEAVE: dict[str, Callable[[Backend], None]] = {
    "close": lambda backend: whole(backend).close(),
    "abort": lambda backend: whole(backend).abort(),
}
ways_to_leave = pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE.keys())


def lost(backend: Backend, call: Callable[[], object], culprit: int) -> PeerLostError:
    """The error of a call that cannot succeed because `culprit` is gone."""
    with pytest.raises(PeerLostError) as info:
        call()
    error = info.value
    assert isinstance(error, ConnectionError)
    assert (error.rank, error.peer) == (backend.rank, culprit), error
    assert re.search(rf"rank {backend.rank}( \(rank \d+ of the job\))?: ", str(error))
    return error


def hear_from_all(backend: Backend, culprit: int) -> None:
    """Return, on the rank that will go, when every other one is here and needs it no more."""
    if backend.rank != culprit:
        backend.send(b"here", culprit)
        return
    for other in range(backend.world_size):
        if other != culprit:
            backend.recv(bytearray(4), other)


@pytest.mark.checkered
@ways_to_leave
def test_whoever_waits_for_a_message_of_a_rank_that_goes_is_told(
    cluster: Cluster, leave: Callable[[Backend], None]
) -> None:
    def wait(backend: Backend) -> None:
        hear_from_all(backend, 1)
        if backend.rank == 1:
            leave(backend)
            return
        error = lost(backend, lambda: backend.recv(bytearray(1), 1), 1)
        assert (error.op, error.sequence) == ("recv", 0)

    cluster.run(wait, 2, timeout=PROMPT)


@pytest.mark.checkered
@pytest.mark.parametrize(
    ("how", "culprit"), [("close", 0), ("abort", 2), *sizes([], [("close", 2), ("abort", 0)])]
)
@pytest.mark.parametrize("algorithm", COLLECTIVES["all_reduce"])
def test_a_collective_without_a_rank_that_is_gone_names_it_on_every_other_rank(
    cluster: Cluster, algorithm: str, how: str, culprit: int
) -> None:
    def reduce(backend: Backend) -> None:
        values = torch.ones(64)
        phalanx.all_reduce(values, backend, algorithm=algorithm)
        hear_from_all(backend, culprit)
        if backend.rank == culprit:
            LEAVE[how](backend)
            return

        def again() -> None:
            phalanx.all_reduce(values, backend, algorithm=algorithm)
            backend.barrier()  # a rank that needed nothing of it learns here

        error = lost(backend, again, culprit)
        assert (error.op, error.sequence) in (("all_reduce", 1), ("barrier", 2))
        later = lost(backend, backend.barrier, culprit)
        assert "the group is broken" in str(later)

    cluster.run(reduce, 4, timeout=PROMPT)


@pytest.mark.checkered
@ways_to_leave
@pytest.mark.parametrize("culprit", sizes([0, 3], range(4)))
def test_a_barrier_without_a_rank_that_is_gone_names_it_on_every_other_rank(
    cluster: Cluster, leave: Callable[[Backend], None], culprit: int
) -> None:
    def epoch(backend: Backend) -> None:
        hear_from_all(backend, culprit)
        if backend.rank == culprit:
            leave(backend)
        else:
            error = lost(backend, backend.barrier, culprit)
            assert (error.op, error.sequence) == ("barrier", 0)

    cluster.run(epoch, 4, timeout=PROMPT)


def test_a_message_sent_before_leaving_still_arrives(cluster: Cluster) -> None:
    def last_words(backend: Backend) -> None:
        if backend.rank == 1:
            backend.send(torch.arange(1000.0), 0)
            backend.send(b"ready", 0, tag=1)
            whole(backend).close()
            return
        backend.recv(bytearray(5), 1, tag=1)
        into = torch.empty(1000)
        backend.recv(into, 1)
        assert torch.equal(into, torch.arange(1000.0))
        lost(backend, lambda: backend.recv(into, 1), 1)

    cluster.run(last_words, 2, timeout=PROMPT)


def test_a_rank_that_left_in_good_order_breaks_nothing_for_those_who_do_not_need_it(
    cluster: Cluster,
) -> None:
    def go_on(backend: Backend) -> None:
        backend.barrier()
        hear_from_all(backend, 2)
        if backend.rank == 2:
            whole(backend).close()
            return
        lost(backend, lambda: backend.recv(bytearray(1), 2), 2)
        other, into = 1 - backend.rank, bytearray(1)
        for _ in range(3):
            backend.sendrecv(b"y", other, into, other)
        pair = backend.subgroup([0, 1])
        assert phalanx.all_reduce(torch.ones(1), pair).item() == 2

    cluster.run(go_on, 3, timeout=PROMPT)


def test_a_rank_that_died_does_not_break_groups_that_it_is_not_in(cluster: Cluster) -> None:
    def go_on(backend: Backend) -> None:
        pair = backend.subgroup([0, 1]) if backend.rank < 2 else None
        hear_from_all(backend, 2)
        if pair is None:
            whole(backend).abort()
            return
        lost(backend, backend.barrier, 2)
        assert phalanx.all_reduce(torch.ones(1), pair).item() == 2
        assert phalanx.all_reduce(torch.ones(1), pair).item() == 2

    cluster.run(go_on, 3, timeout=PROMPT)


def test_a_group_made_after_one_of_its_ranks_died_says_so(cluster: Cluster) -> None:
    def too_late(backend: Backend) -> None:
        hear_from_all(backend, 2)
        if backend.rank == 2:
            whole(backend).abort()
            return
        lost(backend, backend.barrier, 2)
        everybody = backend.subgroup([0, 1, 2])
        lost(everybody, everybody.barrier, 2)

    cluster.run(too_late, 3, timeout=PROMPT)


def test_async_collectives_that_are_outstanding_all_name_the_rank_that_died(
    cluster: Cluster,
) -> None:
    def many(backend: Backend) -> None:
        hear_from_all(backend, 2)
        if backend.rank == 2:
            whole(backend).abort()
            return
        pending = []
        for call in (phalanx.async_all_reduce, phalanx.async_all_gather) * 3:
            with suppress(PeerLostError):  # found broken already
                pending.append(call(torch.ones(8), backend))
        for each in reversed(pending):
            first = lost(backend, each.wait, 2)
            again = lost(backend, each.wait, 2)
            assert each.done()
            assert str(first) == str(again)

    cluster.run(many, 3, timeout=PROMPT)


def test_every_later_call_raises_the_first_cause(cluster: Cluster) -> None:
    def call_again(backend: Backend) -> None:
        hear_from_all(backend, 1)
        if backend.rank == 1:
            whole(backend).abort()
            return
        first = lost(backend, backend.barrier, 1)
        for number, call in enumerate(
            (
                lambda: phalanx.all_reduce(torch.ones(1), backend),
                lambda: phalanx.async_all_gather(torch.ones(1), backend),
                lambda: phalanx.broadcast(torch.ones(1), backend),
                lambda: backend.send(b"x", (backend.rank + 2) % 4),
                lambda: backend.recv(bytearray(1), (backend.rank + 2) % 4),
                backend.barrier,
            )
        ):
            later = lost(backend, call, 1)
            assert type(later) is type(first)
            assert later.sequence != first.sequence or number in (3, 4)

    cluster.run(call_again, 4, timeout=PROMPT)


def test_an_error_found_between_two_collectives_can_be_told_to_all(cluster: Cluster) -> None:
    """`Backend.fail` is for code above, such as DDP: who waits learns why nobody comes."""

    def give_up(backend: Backend) -> str:
        if backend.rank == 1:
            backend.fail(phalanx.UnsupportedOperationError("my gradients are not here"))
            return ""
        with pytest.raises(phalanx.UnsupportedOperationError, match="my gradients") as info:
            backend.barrier()
        assert info.value.peer == 1
        return str(info.value)

    cluster.run(give_up, 3, timeout=PROMPT)
