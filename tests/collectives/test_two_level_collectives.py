"""Collectives of ranks on several hosts: right, and no more bytes than are due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from clusters import Cluster
from collective_reference import (
    any_dtype,
    dtypes,
    exact_values,
    ops_for,
    reduced,
    rough_values,
    same,
    seeds,
    shapes,
    values_of,
)
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from topologies import on_all_hosts, topologies
from torch import Tensor

import phalanx
from phalanx import Backend, DesyncError, DistributedError, ReduceOp, simulate
from phalanx.collectives.plan import Key, make_plan
from phalanx.core.posted import PostedSend

algorithms = st.sampled_from(["two_level", "two_level", "auto"])


def on_hosts(hosts: tuple[int, ...], fn: Callable[[Backend], object], seed: int = 0) -> list:
    """Run `fn` on ranks that take themselves to be on these hosts."""

    def placed(backend: Backend) -> object:
        backend.topology = hosts
        return fn(backend)

    return list(simulate(placed, len(hosts), seed))


@settings(max_examples=examples(80))
@given(st.data(), topologies, algorithms, dtypes, shapes, seeds)
def test_all_reduce_and_reduce_equal_a_single_process(
    data: st.DataObject,
    hosts: tuple[int, ...],
    algorithm: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    seed: int,
) -> None:
    op, size = data.draw(ops_for(dtype)), len(hosts)
    root = data.draw(st.integers(0, size - 1))
    values = [exact_values(shape, dtype, op, rank, seed) for rank in range(size)]
    expected = reduced(values, op)

    def run(backend: Backend) -> None:
        mine = values[backend.rank].clone()
        option = {"algorithm": algorithm}
        assert same(phalanx.all_reduce(mine, backend, op, **option), expected)
        result = phalanx.reduce(mine, backend, root, op, **option)
        assert (result is not None) == (backend.rank == root)
        assert result is None or same(result, expected)
        assert same(mine, values[backend.rank])
        (also,) = phalanx.all_reduce_coalesced([mine], backend, op, **option)
        assert same(also, expected)
        assert same(phalanx.all_reduce_(mine, backend, op, **option), expected)

    on_hosts(hosts, run, seed)


@settings(max_examples=examples(60))
@given(st.data(), topologies, algorithms, dtypes, st.integers(0, 5), seeds)
def test_reduce_scatter_gives_every_rank_its_slice(
    data: st.DataObject,
    hosts: tuple[int, ...],
    algorithm: str,
    dtype: torch.dtype,
    rows: int,
    seed: int,
) -> None:
    op, size = data.draw(ops_for(dtype)), len(hosts)
    values = [exact_values((size * rows, 3), dtype, op, rank, seed) for rank in range(size)]
    slices = reduced(values, op).view(size, rows, 3)

    def run(backend: Backend) -> None:
        mine = values[backend.rank]
        result = phalanx.reduce_scatter(mine, backend, op, algorithm=algorithm)
        assert same(result, slices[backend.rank])

    on_hosts(hosts, run, seed)


@settings(max_examples=examples(60))
@given(st.data(), topologies, algorithms, any_dtype, shapes, seeds)
def test_all_gather_and_broadcast_move_every_bit(
    data: st.DataObject,
    hosts: tuple[int, ...],
    algorithm: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    seed: int,
) -> None:
    root = data.draw(st.integers(0, len(hosts) - 1))
    values = [values_of(shape, dtype, rank, seed) for rank in range(len(hosts))]
    joined = torch.cat(values) if shape else torch.stack(values)

    def run(backend: Backend) -> None:
        mine = values[backend.rank].clone()
        assert same(phalanx.all_gather(mine, backend, algorithm=algorithm), joined)
        assert same(phalanx.broadcast(mine, backend, root, algorithm=algorithm), values[root])
        phalanx.broadcast_(mine, backend, root, algorithm=algorithm)
        assert same(mine, values[root])

    on_hosts(hosts, run, seed)


@settings(max_examples=examples(60))
@given(topologies, dtypes.filter(lambda d: d.is_floating_point), st.integers(1, 50), seeds)
def test_sums_are_the_same_bits_on_every_rank_and_in_every_run(
    hosts: tuple[int, ...], dtype: torch.dtype, count: int, seed: int
) -> None:
    values = [rough_values((count,), dtype, rank, seed) for rank in range(len(hosts))]
    truth = torch.stack(values).double().sum(0)
    scale = torch.stack(values).double().abs().sum(0)

    def run(backend: Backend) -> Tensor:
        return phalanx.all_reduce(values[backend.rank], backend, algorithm="two_level")

    results = [*on_hosts(hosts, run, seed), *on_hosts(hosts, run, seed + 1)]
    for result in results:
        assert same(result, results[0])
        assert (
            (result.double() - truth).abs() <= len(hosts) * torch.finfo(dtype).eps * scale
        ).all()


@on_all_hosts
def test_a_mean_of_float16_does_not_overflow_on_the_way(hosts: tuple[int, ...]) -> None:
    largest, size = torch.finfo(torch.float16).max, len(hosts)

    def run(backend: Backend) -> list[Tensor | None]:
        mine = torch.tensor([largest, -60000.0, 1.0 * backend.rank, torch.inf]).half()
        option = {"algorithm": "two_level"}
        return [
            phalanx.all_reduce(mine, backend, ReduceOp.MEAN, **option),
            phalanx.reduce(mine, backend, size - 1, ReduceOp.MEAN, **option),
        ]

    expected = torch.tensor([largest, -60000.0, (size - 1) / 2, torch.inf])
    for result in [each for results in on_hosts(hosts, run) for each in results]:
        if result is not None:
            torch.testing.assert_close(result.float(), expected, rtol=2e-3, atol=33.0)


def test_objects_and_subgroups_of_ranks_on_several_hosts() -> None:
    hosts = (0, 1, 0, 2, 1, 1)

    def run(backend: Backend) -> None:
        rank = backend.rank
        objects = [{"rank": peer, "data": b"x" * (peer * 100_000)} for peer in range(6)]
        assert phalanx.all_gather_object(objects[rank], backend) == objects
        assert phalanx.broadcast_object(objects[rank], backend, 4) == objects[4]
        members = (0, 2, 3, 5) if rank in (0, 2, 3, 5) else (1, 4)
        some = backend.subgroup(members)
        assert some.topology == tuple(hosts[member] for member in members)
        total = phalanx.all_reduce(torch.tensor([rank]), some, algorithm="two_level")
        assert total.tolist() == [sum(members)]

    on_hosts(hosts, run)


@pytest.mark.checkered
@pytest.mark.parametrize("background", [False, True])
def test_on_every_kind_of_backend(cluster: Cluster, background: bool) -> None:
    hosts = (0, 1, 0, 1, 1)
    values = [exact_values((1001,), torch.float64, ReduceOp.SUM, r, 3) for r in range(5)]

    def run(backend: Backend) -> None:
        backend.topology = hosts
        mine = values[backend.rank]
        option = {"algorithm": "two_level"}
        if background:
            pending = [
                phalanx.async_all_reduce(mine, backend, **option),
                phalanx.async_broadcast(mine, backend, 3, **option),
                phalanx.async_all_gather(mine, backend, **option),
            ]
            total, third, joined = [each.wait() for each in reversed(pending)][::-1]
        else:
            total = phalanx.all_reduce(mine, backend, **option)
            third = phalanx.broadcast(mine, backend, 3, **option)
            joined = phalanx.all_gather(mine, backend, **option)
        assert same(total, reduced(values, ReduceOp.SUM))
        assert same(third, values[3])
        assert same(joined, torch.cat(values))

    cluster.run(run, 5)


# --------------------------------------------------------------------------------------- costs


def bytes_that_cross(hosts: tuple[int, ...], call: Callable[[Backend], object]) -> Counter[int]:
    """The payload that leaves each host during a call."""

    def run(backend: Backend) -> int:
        crossed, transport = [0], backend.engine.transport
        send_one = transport.send

        def counted(send: PostedSend) -> None:
            if hosts[send.peer] != hosts[backend.rank]:
                crossed[0] += len(send.view)
            send_one(send)

        transport.send = counted  # type: ignore[method-assign]
        call(backend)
        transport.send = send_one  # type: ignore[method-assign]
        return crossed[0]

    total: Counter[int] = Counter()
    for rank, crossed in enumerate(on_hosts(hosts, run)):
        total[hosts[rank]] += crossed
    return total


def test_each_host_sends_its_data_once() -> None:
    hosts = (0, 0, 0, 0, 1, 1, 1, 1)
    tensor = torch.ones(800)
    n = tensor.nbytes

    def all_reduce(algorithm: str) -> Counter[int]:
        return bytes_that_cross(
            hosts, lambda backend: phalanx.all_reduce(tensor, backend, algorithm=algorithm)
        )

    assert all_reduce("two_level") == {0: n, 1: n}
    assert all_reduce("direct") == {0: 4 * n, 1: 4 * n}
    assert bytes_that_cross(
        hosts, lambda backend: phalanx.broadcast(tensor, backend, 5, algorithm="two_level")
    ) == {0: 0, 1: n}
    assert bytes_that_cross(
        hosts, lambda backend: phalanx.reduce(tensor, backend, 5, algorithm="two_level")
    ) == {0: n, 1: 0}


@given(topologies, st.integers(0, 60), st.sampled_from(["all_reduce", "broadcast", "reduce"]))
def test_what_is_sent_is_received_and_no_message_is_empty(
    hosts: tuple[int, ...], count: int, collective: str
) -> None:
    op = None if collective == "broadcast" else ReduceOp.SUM
    key = Key(collective, "two_level", (count,), torch.float32, op, 0, hosts)
    outgoing: Counter[tuple[int, int, int]] = Counter()
    incoming: Counter[tuple[int, int, int]] = Counter()
    for rank in range(len(hosts)):
        for step in make_plan(key, rank, len(hosts)).program:
            for send in getattr(step, "sends", ()):
                outgoing[rank, send.peer, send.stop - send.start] += 1
            for receive in getattr(step, "receives", ()):
                incoming[receive.peer, rank, receive.stop - receive.start] += 1
    assert outgoing == incoming
    assert all(length > 0 for _, _, length in outgoing)


# --------------------------------------------------------------------------------- disagreement


def test_ranks_that_disagree_about_the_hosts_are_told() -> None:
    def run(backend: Backend) -> DistributedError:
        backend.topology = (0, 0, 1, 1) if backend.rank else (0, 1, 1, 1)
        with pytest.raises(DistributedError) as info:
            phalanx.all_reduce(torch.ones(8), backend, algorithm="two_level")
        return info.value

    errors = simulate(run, 4)
    for error in errors:
        assert isinstance(error, DesyncError)
    assert "two_level (0 1 1 1)" in str(errors[0])
    assert "two_level (0 0 1 1)" in str(errors[0])


def test_of_many_ranks_a_signature_holds_a_hash_of_the_hosts() -> None:
    def signature(hosts: tuple[int, ...]) -> str:
        key = Key("all_reduce", "two_level", (8,), torch.float32, ReduceOp.SUM, 0, hosts)
        return make_plan(key, 0, len(hosts)).signature

    hosts = tuple(rank // 8 for rank in range(64))
    assert "two_level (8 hosts, " in signature(hosts)
    assert signature(hosts) != signature(hosts[::-1])
    assert len(signature(hosts)) < 80
