"""Ranks that do different things are told so: no hang, no wrong number, whatever connects them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from clusters import Cluster
from forms import sizes

import phalanx
from phalanx import Backend, CollectiveTimeoutError, DesyncError, DistributedError, ReduceOp

Call = Callable[[Backend], object]
ONES = torch.ones(8)
PROMPT = 15.0  # seconds after which a rank that was not told gives up, with an error that shows it
ASKED = 0.3  # seconds after which a rank that waits has asked the others

pytestmark = pytest.mark.usefixtures("asking_soon", "answered")


def ring(values: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Call:
    return lambda backend: phalanx.all_reduce(values, backend, op, algorithm="ring")


# What the odd one does, and what all the others do.
DISAGREEMENTS: dict[str, tuple[Call, Call]] = {
    "another op": (lambda b: phalanx.all_gather(ONES, b, algorithm="ring"), ring(ONES)),
    "a barrier": (lambda b: b.barrier(), ring(ONES)),
    "another shape": (ring(torch.ones(6)), ring(ONES)),
    "the same bytes in another shape": (ring(torch.ones(2, 4)), ring(ONES)),
    "another dtype of the same size": (ring(ONES.to(torch.int32)), ring(ONES)),
    "another reduction": (ring(ONES, ReduceOp.MAX), ring(ONES)),
    "one call too many": (lambda b: (ring(ONES)(b), ring(ONES)(b)), ring(ONES)),
}

# Here some ranks have all that they need without a word from the odd one, or it from them.
ONE_SIDED: dict[str, tuple[Call, Call]] = {
    "another algorithm": (
        lambda b: phalanx.all_reduce(ONES, b, algorithm="tree"),
        lambda b: phalanx.all_reduce(ONES, b, algorithm="star"),
    ),
    "nothing at all": (ring(torch.ones(0)), ring(ONES)),
    "fewer elements than ranks": (ring(torch.ones(1)), ring(torch.ones(3))),
}


def errors_when_one_disagrees(
    cluster: Cluster, odd_call: Call, usual_call: Call, size: int
) -> Iterator[tuple[int, list[DistributedError]]]:
    """With each rank in turn as the odd one: its number, and the errors of all ranks."""

    def disagree(backend: Backend) -> list[DistributedError]:
        errors: list[DistributedError] = []
        for odd in range(size):
            group = backend.subgroup(range(size))
            try:
                (odd_call if group.rank == odd else usual_call)(group)
                group.barrier()  # who does not wait learns at its next call
            except DistributedError as error:
                errors.append(error)
            else:
                pytest.fail(f"rank {group.rank} noticed nothing when rank {odd} was the odd one")
            backend.barrier()
        return errors

    for odd, errors in enumerate(zip(*cluster.run(disagree, size, timeout=PROMPT), strict=True)):
        for error in errors:
            assert not isinstance(error, CollectiveTimeoutError), error
            if isinstance(error, DesyncError):
                assert isinstance(error, RuntimeError)
                assert error.peer not in (None, error.rank), error
        yield odd, list(errors)


@pytest.mark.together
@pytest.mark.parametrize("disagreement", DISAGREEMENTS.values(), ids=DISAGREEMENTS.keys())
@pytest.mark.parametrize("size", sizes([2, 4], [2, 3, 4]))  # 3: see test_conformance_agreement.py
def test_whoever_is_the_odd_one_out_is_named_and_every_rank_learns_it(
    cluster: Cluster, disagreement: tuple[Call, Call], size: int
) -> None:
    for odd, errors in errors_when_one_disagrees(cluster, *disagreement, size):
        desyncs = [error for error in errors if isinstance(error, DesyncError)]
        assert any(odd in (error.rank, error.peer) for error in desyncs), errors


@pytest.mark.together
@pytest.mark.parametrize("disagreement", ONE_SIDED.values(), ids=ONE_SIDED.keys())
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_need_nothing_of_the_odd_one_learn_it_too(
    cluster: Cluster, disagreement: tuple[Call, Call], size: int
) -> None:
    for _, errors in errors_when_one_disagrees(cluster, *disagreement, size):
        assert any(isinstance(error, DesyncError) for error in errors), errors


def test_the_error_says_what_each_of_the_two_was_doing(cluster: Cluster) -> None:
    def disagree(backend: Backend) -> tuple[str, int | None]:
        with pytest.raises(DesyncError) as info:
            ring(torch.ones(6 + 2 * backend.rank))(backend)
        return str(info.value), info.value.peer

    for rank, (text, peer) in enumerate(cluster.run(disagree, 2, timeout=PROMPT)):
        assert re.search(r"rank 0 (\(.*\) )?called .*float32 \[6\]", text)
        assert re.search(r"rank 1 (\(.*\) )?called .*float32 \[8\]", text)
        assert peer == 1 - rank


@pytest.mark.checkered
@pytest.mark.parametrize("name", ["all_gather", "gather"])
def test_the_error_of_a_gather_shows_what_each_rank_gave(cluster: Cluster, name: str) -> None:
    def gather_and_meet(backend: Backend) -> None:
        getattr(phalanx, name)(torch.ones(3 + 2 * backend.rank, 2), backend, algorithm="tree")
        backend.barrier()  # a rank that only sends learns it at its next call

    def disagree(backend: Backend) -> str:
        with pytest.raises(DesyncError) as info:
            gather_and_meet(backend)
        return str(info.value)

    for text in cluster.run(disagree, 2, timeout=PROMPT):
        assert "float32 [3, 2]" in text
        assert "float32 [5, 2]" in text


@pytest.mark.requires("agreement")
def test_a_desync_breaks_the_group_for_good(cluster: Cluster) -> None:
    def disagree(backend: Backend) -> None:
        call = phalanx.all_reduce if backend.rank else phalanx.all_gather
        with pytest.raises(DesyncError):
            call(ONES, backend)
        for _ in range(2):
            with pytest.raises(DesyncError, match="the group is broken"):
                backend.barrier()

    cluster.run(disagree, 2, timeout=PROMPT)


@pytest.mark.requires("agreement")
def test_a_desync_in_a_subgroup_leaves_the_parent_usable(cluster: Cluster) -> None:
    def disagree(backend: Backend) -> float:
        if backend.rank < 2:
            group = backend.subgroup([0, 1])
            with pytest.raises(DesyncError, match=r"group of ranks \["):
                phalanx.all_reduce(torch.ones(3 + backend.rank), group)
        return phalanx.all_reduce(torch.ones(1), backend).item()

    assert cluster.run(disagree, 3, timeout=PROMPT) == [3.0] * 3


def test_a_rank_that_did_not_wait_learns_at_its_next_call(cluster: Cluster) -> None:
    """A root has sent, and gone on, before anybody finds that it was the only broadcast."""

    def disagree(backend: Backend) -> str:
        if backend.rank == 0:
            phalanx.broadcast(ONES, backend, algorithm="star")
            backend.send(b"go", 1)
            with pytest.raises(DesyncError) as info:
                backend.barrier()
            return str(info.value)
        backend.recv(bytearray(2), 0)
        with pytest.raises(DesyncError) as info:
            phalanx.all_reduce(ONES, backend, algorithm="star")
        return str(info.value)

    texts = cluster.run(disagree, 2, timeout=PROMPT)
    assert "broadcast #0" in texts[0]
    assert "all_reduce #0" in texts[1]


def test_blocking_and_async_calls_of_one_collective_agree(cluster: Cluster) -> None:
    def agree(backend: Backend) -> list[float]:
        if backend.rank == 0:
            return phalanx.all_reduce(ONES, backend).tolist()
        if backend.rank == 1:
            return phalanx.async_all_reduce(ONES, backend).wait().tolist()
        return phalanx.all_reduce_(ONES.clone(), backend).tolist()

    assert cluster.run(agree, 3) == [[3.0] * 8] * 3


@pytest.mark.requires("agreement")
def test_a_tensor_without_dimensions_is_not_one_of_one_element(cluster: Cluster) -> None:
    def disagree(backend: Backend) -> None:
        with pytest.raises(DesyncError):
            phalanx.all_reduce(torch.ones([1] * backend.rank), backend)

    cluster.run(disagree, 2, timeout=PROMPT)


@pytest.mark.together
@pytest.mark.requires("agreement")
def test_ranks_that_wait_for_each_others_broadcast_are_told(cluster: Cluster) -> None:
    """Each takes the other for the root, so that nobody ever sends anything."""

    def disagree(backend: Backend) -> None:
        with pytest.raises(
            DesyncError, match=r"rank 0 .*called .*root 1.*\n.*rank 1 .*called .*root 0"
        ):
            phalanx.broadcast(ONES, backend, root=1 - backend.rank)

    cluster.run(disagree, 2, timeout=PROMPT)


@pytest.mark.requires("agreement")
def test_collectives_swapped_within_a_group_are_told_by_their_shapes(cluster: Cluster) -> None:
    """Two sums of one shape could be exchanged unnoticed, but not two of different shapes."""

    def swap(backend: Backend) -> None:
        first, second = (3, 5) if backend.rank else (5, 3)
        with pytest.raises(DesyncError, match=r"called all_reduce #0 .*\n.* called all_reduce #0"):
            phalanx.all_reduce(torch.ones(first), backend)
        with pytest.raises(DesyncError, match=r"all_reduce #1 .* the group is broken"):
            phalanx.all_reduce(torch.ones(second), backend)

    cluster.run(swap, 3, timeout=PROMPT)


def test_a_rank_that_is_too_far_ahead_to_remember_is_told_all_the_same(cluster: Cluster) -> None:
    def disagree(backend: Backend) -> str:
        if backend.rank == 0:
            for _ in range(100):
                phalanx.broadcast(ONES, backend, algorithm="star")
            backend.send(b"go", 1)
            with pytest.raises(DesyncError) as info:
                backend.barrier()
            return str(info.value)
        backend.recv(bytearray(2), 0)
        with pytest.raises(DesyncError) as info:
            phalanx.all_reduce(ONES, backend, algorithm="star")
        return str(info.value)

    for text in cluster.run(disagree, 2, timeout=PROMPT):
        assert "all_reduce #0" in text


@pytest.mark.together
def test_what_was_asked_about_a_group_before_it_was_made_is_answered_then(
    cluster: Cluster,
) -> None:
    def disagree(backend: Backend) -> str:
        if backend.rank == 0:
            group = backend.subgroup([0, 1])
            pending = phalanx.async_barrier(group)
            with pytest.raises(DesyncError) as info:
                pending.wait()
        else:
            if cluster.keeps_time:  # rank 0 has asked then
                with pytest.raises(CollectiveTimeoutError):
                    backend.recv(bytearray(1), 0, timeout=ASKED)
            group = backend.subgroup([0, 1])
            with pytest.raises(DesyncError) as info:
                phalanx.all_gather(ONES, group, algorithm="ring")
        return str(info.value)

    for text in cluster.run(disagree, 2, timeout=PROMPT):
        assert "barrier #0" in text
        assert "all_gather #0" in text


@pytest.mark.requires("agreement")
@pytest.mark.timeouts
@pytest.mark.together
def test_a_call_that_others_have_asked_about_is_compared_as_soon_as_it_is_made(
    cluster: Cluster,
) -> None:
    """Both take the other for the root: no message would ever show it."""

    def disagree(backend: Backend) -> None:
        if backend.rank:
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(bytearray(1), 0, timeout=ASKED)  # rank 0 asks meanwhile
        pending = phalanx.async_broadcast(ONES, backend, root=1 - backend.rank)
        if backend.rank:
            assert pending.done()
        with pytest.raises(DesyncError):
            pending.wait()

    cluster.run(disagree, 2, timeout=PROMPT)


def test_what_came_unasked_is_found_before_the_call_returns(cluster: Cluster) -> None:
    """Both are roots, and need nothing from the other."""

    def disagree(backend: Backend) -> None:
        if backend.rank == 1:
            phalanx.broadcast(ONES, backend, root=1, algorithm="star")
            backend.send(b"go", 0)
            with pytest.raises(DesyncError):
                backend.barrier()
            return
        backend.recv(bytearray(2), 1)
        with pytest.raises(DesyncError):
            phalanx.broadcast(ONES, backend, root=0, algorithm="star")

    cluster.run(disagree, 2, timeout=PROMPT)
