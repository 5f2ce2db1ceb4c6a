"""all_gather_object, broadcast_object: every rank's object, and what if one cannot be sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from clusters import Cluster
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx
from phalanx import (
    Backend,
    CollectiveTimeoutError,
    DistributedError,
    UnsupportedObjectError,
    UnsupportedOperationError,
    simulate,
)
from phalanx.collectives.objects import _exchange as exchange
from phalanx.errors import MalformedObjectError

PROMPT = 15.0  # seconds after which a rank that was not told gives up, with an error that shows it
Call = Callable[[object, Backend], object]


def thing(rank: int) -> dict[object, object]:
    """Another object on every rank, of another length."""
    return {"rank": rank, (1, rank): [None, True, b"x" * 3**rank, 2.5], "t": (2**100, "é" * rank)}


def test_every_rank_gets_every_ranks_object(cluster: Cluster) -> None:
    def run(backend: Backend) -> list[object]:
        mine = thing(backend.rank)
        pending = phalanx.async_all_gather_object(mine, backend)
        results = phalanx.all_gather_object(mine, backend)
        assert results[backend.rank] is not mine
        assert pending.wait() == results
        assert pending.op_name == "all_gather_object"
        return results

    for size in (1, 3):
        assert cluster.run(run, size) == [[thing(rank) for rank in range(size)]] * size


def test_every_rank_gets_the_roots_object(cluster: Cluster) -> None:
    def run(backend: Backend) -> list[object]:
        results = []
        for root in range(backend.world_size):
            mine = thing(root) if backend.rank == root else None
            pending = phalanx.async_broadcast_object(mine, backend, root)
            results.append(phalanx.broadcast_object(mine, backend, root))
            assert pending.wait() == results[-1]
        return results

    for size in (1, 3):
        assert cluster.run(run, size) == [[thing(rank) for rank in range(size)]] * size


@settings(max_examples=examples(25))
@given(st.integers(1, 9), st.lists(st.integers(0, 5000), min_size=9, max_size=9))
def test_objects_of_any_lengths_on_any_number_of_ranks(size: int, lengths: list[int]) -> None:
    expected = [bytes([rank]) * lengths[rank] for rank in range(size)]

    def run(backend: Backend) -> None:
        mine = expected[backend.rank]
        assert phalanx.all_gather_object(mine, backend) == expected
        root = lengths[0] % size
        assert phalanx.broadcast_object(mine, backend, root) == expected[root]

    simulate(run, size)


def test_tensors_arrive_inside_of_objects() -> None:
    def run(backend: Backend) -> None:
        state = {"weight": torch.full((3, 2), float(backend.rank)).t(), "step": backend.rank}
        for rank, result in enumerate(phalanx.all_gather_object(state, backend)):
            assert isinstance(result, dict)
            assert result["step"] == rank
            assert torch.equal(result["weight"], torch.full((2, 3), float(rank)))

    simulate(run, 3)


def test_objects_may_be_under_way_beside_other_collectives(cluster: Cluster) -> None:
    """Two phases of one operation: nothing that is issued later comes between them."""

    def run(backend: Backend) -> None:
        first = phalanx.async_all_gather_object(thing(backend.rank), backend)
        total = phalanx.async_all_reduce(torch.ones(1000), backend)
        second = phalanx.async_broadcast_object(thing(backend.rank), backend, 1)
        assert phalanx.all_reduce(torch.ones(2), backend).tolist() == [3.0, 3.0]
        assert second.wait() == thing(1)
        assert total.wait().tolist() == [3.0] * 1000
        assert first.wait() == [thing(0), thing(1), thing(2)]

    cluster.run(run, 3)


def test_an_object_may_be_changed_as_soon_as_the_call_returns() -> None:
    def run(backend: Backend) -> object:
        mine = [backend.rank]
        pending = phalanx.async_all_gather_object(mine, backend)
        mine.append(99)
        return pending.wait()

    assert simulate(run, 3) == [[[0], [1], [2]]] * 3


@pytest.mark.checkered
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (phalanx.all_gather_object, "all_gather_object"),
        (phalanx.async_all_gather_object, "all_gather_object"),
        (lambda obj, backend: phalanx.broadcast_object(obj, backend, 1), "broadcast_object"),
    ],
)
def test_an_object_that_cannot_be_sent_is_told_to_the_ranks_that_wait_for_it(
    cluster: Cluster, call: Call, name: str
) -> None:
    def run(backend: Backend) -> None:
        if backend.rank == 1:
            with pytest.raises(UnsupportedObjectError, match=r"obj\['a'\]\[1\] is a set") as info:
                call({"a": [1, {2}]}, backend)
            assert (info.value.rank, info.value.op) == (1, name)
            assert str(info.value).startswith(f"rank 1: {name}: ")
            return
        with pytest.raises(UnsupportedOperationError) as other:
            wait(call({"a": [1, 2]}, backend))
        assert not isinstance(other.value, CollectiveTimeoutError)
        assert rf"rank 1: {name}: obj['a'][1] is a set" in str(other.value)
        assert other.value.peer == 1

    cluster.run(run, 3, timeout=PROMPT)


def wait(result: object) -> object:
    return result.wait() if isinstance(result, phalanx.PendingCollective) else result


def test_what_the_others_show_to_a_broadcast_does_not_matter() -> None:
    def run(backend: Backend) -> object:
        return phalanx.broadcast_object({1, 2} if backend.rank else "fine", backend)

    assert simulate(run, 3) == ["fine"] * 3


def test_ranks_that_do_not_mean_the_same_are_told(cluster: Cluster) -> None:
    def run(backend: Backend) -> None:
        call: Call = phalanx.broadcast_object if backend.rank else phalanx.all_gather_object
        with pytest.raises(DistributedError) as info:
            call("x", backend)
        assert not isinstance(info.value, CollectiveTimeoutError)

    cluster.run(run, 2, timeout=PROMPT)


def test_bytes_that_are_no_object_are_an_error_where_they_arrive(cluster: Cluster) -> None:
    def run(backend: Backend) -> float:
        mine = bytearray(b"?!" if backend.rank == 1 else b"N")
        pending = exchange("all_gather", mine, backend, list, "", None).issue()
        for _ in range(2):
            with pytest.raises(MalformedObjectError, match=r"of rank 1 .*same version") as info:
                pending.wait()
            assert (info.value.rank, info.value.peer) == (backend.rank, 1)
        return phalanx.all_reduce(torch.ones(1), backend).item()

    assert cluster.run(run, 3) == [3.0] * 3


@pytest.mark.checkered
@pytest.mark.parametrize("length", [0, 1 << 50])
def test_a_length_that_no_object_has_is_refused_before_memory_is_taken(
    cluster: Cluster, length: int
) -> None:
    class Liar(bytearray):
        """Bytes that claim to be more, or fewer."""

        def __len__(self) -> int:
            return length

    def run(backend: Backend) -> None:
        mine = Liar(b"N") if backend.rank == 1 else bytearray(b"N")
        with pytest.raises(DistributedError, match=f"#0: rank 1 announced .* {length:,}"):
            exchange("all_gather", mine, backend, list, "", None).run()

    cluster.run(run, 3, timeout=PROMPT)
