"""Every function of torch.distributed that moves tensors or objects, as a check on each rank.

`CHECKS[name](rank, size)` calls `torch.distributed.name` in its forms and compares what comes with
what is right. The table of docs/torch-backend.md is made of these names (tests/scripts).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.torch_backend.process_group import CONTAINS_BACKENDS, VERSION

Check = Callable[[int, int], None]
CHECKS: dict[str, Check] = {}
OPS = dist.ReduceOp


def check(function: Check) -> Check:
    CHECKS[function.__name__.removeprefix("check_")] = function
    return function


def strided(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros with room between the elements of a row."""
    return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


def equal(found: Any, expected: Any) -> None:
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), (found, expected)


def finish(work: dist.Work | None, *, asynchronous: bool) -> None:
    if asynchronous:
        assert work is not None
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
    else:
        assert work is None


BOTH = (False, True)
SHAPES: Iterable[tuple[int, ...]] = ((), (3,), (2, 3), (0,), (0, 4))


@check
def check_all_reduce(rank: int, size: int) -> None:
    for shape in SHAPES:
        for later in BOTH:
            tensor = torch.full(shape, float(rank + 1))
            finish(dist.all_reduce(tensor, async_op=later), asynchronous=later)
            equal(tensor, torch.full(shape, float(sum(range(size + 1)))))
    apart = strided(2, 3).fill_(rank)
    dist.all_reduce(apart, OPS.MAX)
    equal(apart, torch.full((2, 3), float(size - 1)))
    values = torch.tensor([1, 2, 3]) << rank
    expected = {
        OPS.SUM: sum(torch.tensor([1, 2, 3]) << r for r in range(size)),
        OPS.PRODUCT: torch.tensor([1, 2**size, 3**size]) << sum(range(size)),
        OPS.MIN: torch.tensor([1, 2, 3]),
        OPS.MAX: torch.tensor([1, 2, 3]) << (size - 1),
        OPS.BOR: torch.tensor([2**size - 1, 2 ** (size + 1) - 2, 2 ** (size + 1) - 1]),
        OPS.BAND: torch.tensor([0, 0, 2 if size == 2 else 0]),
    }
    for op, result in expected.items():
        tensor = values.clone()
        dist.all_reduce(tensor, op)
        equal(tensor, result)
    tensor = torch.tensor([1.0, 2.0]) * rank
    dist.all_reduce(tensor, OPS.AVG)
    equal(tensor, torch.tensor([1.0, 2.0]) * (size - 1) / 2)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.complex64):
        tensor = torch.ones(5, dtype=dtype)
        dist.all_reduce(tensor)
        equal(tensor, torch.full((5,), size, dtype=dtype))
    truth = torch.tensor([rank == 0, False])
    dist.all_reduce(truth)
    equal(truth, torch.tensor([True, False]))
    for later in BOTH:
        places = torch.tensor([[0, rank + 1, rank + 1]])
        sparse = torch.sparse_coo_tensor(
            places, torch.ones(3, 2), (size + 1, 2), check_invariants=True
        )
        finish(dist.all_reduce(sparse, async_op=later), asynchronous=later)
        dense = torch.full((size + 1, 2), 2.0)
        dense[0] = size
        equal(sparse.to_dense(), dense)


@check
def check_all_reduce_coalesced(rank: int, size: int) -> None:
    for later in BOTH:
        tensors = [torch.full((2, 2), float(rank)), strided(3).add_(1), torch.tensor(2.0)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work = dist.all_reduce_coalesced(tensors, async_op=later)
        if later:
            work.wait()  # a future
        total = float(sum(range(size)))
        equal(tensors[0], torch.full((2, 2), total))
        equal(tensors[1], torch.full((3,), float(size)))
        equal(tensors[2], 2.0 * size)


@check
def check_broadcast(rank: int, size: int) -> None:
    for shape in SHAPES:
        for later in BOTH:
            for root in range(size):
                tensor = torch.full(shape, float(rank))
                finish(dist.broadcast(tensor, root, async_op=later), asynchronous=later)
                equal(tensor, torch.full(shape, float(root)))
    apart = strided(4, 3).fill_(rank)
    dist.broadcast(apart, 1)
    equal(apart, torch.ones(4, 3))


@check
def check_reduce(rank: int, size: int) -> None:
    for later in BOTH:
        for root in range(size):
            tensor = torch.full((2, 3), float(rank + 1))
            finish(dist.reduce(tensor, root, async_op=later), asynchronous=later)
            if rank == root:
                equal(tensor, torch.full((2, 3), float(sum(range(size + 1)))))


@check
def check_all_gather(rank: int, size: int) -> None:
    for shape in SHAPES:
        for later in BOTH:
            found = [torch.empty(shape) for _ in range(size)]
            tensor = torch.full(shape, float(rank))
            finish(dist.all_gather(found, tensor, async_op=later), asynchronous=later)
            for other in range(size):
                equal(found[other], torch.full(shape, float(other)))
    found = [strided(2, 2) for _ in range(size)]
    dist.all_gather(found, torch.full((2, 2), float(rank)).t())
    equal(torch.stack(found)[:, 0, 0], torch.arange(size, dtype=torch.float32))
    whole = torch.empty(size, 3)
    dist.all_gather(list(whole), torch.full((3,), float(rank)))
    equal(whole[:, 2], torch.arange(size, dtype=torch.float32))


@check
def check_all_gather_coalesced(rank: int, size: int) -> None:
    for later in BOTH:
        found = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
        given = [torch.full((2,), float(rank)), torch.full((3,), float(rank + 1))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work = dist.all_gather_coalesced(found, given, async_op=later)
        if later:
            work.wait()
        for other in range(size):
            equal(found[other][0], torch.full((2,), float(other)))
            equal(found[other][1], torch.full((3,), float(other + 1)))


@check
def check_all_gather_into_tensor(rank: int, size: int) -> None:
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    for later in BOTH:
        for shape in ((size * 2, 3), (size, 2, 3)):  # joined, or stacked
            found = torch.empty(shape)
            tensor = torch.full((2, 3), float(rank))
            finish(gather(found, tensor, async_op=later), asynchronous=later)
            equal(found.view(size, 6)[:, 0], torch.arange(size, dtype=torch.float32))
    apart = strided(size, 3)
    gather(apart, torch.full((3,), rank + 1.0))
    equal(apart[:, 0], torch.arange(size) + 1.0)


@check
def check_reduce_scatter(rank: int, size: int) -> None:
    for later in BOTH:
        found = torch.empty(3)
        given = [torch.full((3,), float(rank + other)) for other in range(size)]
        finish(dist.reduce_scatter(found, given, async_op=later), asynchronous=later)
        equal(found, torch.full((3,), float(sum(range(size)) + size * rank)))
    scalar = torch.empty(())
    dist.reduce_scatter(scalar, [torch.tensor(1.0 + other) for other in range(size)])
    equal(scalar, float(size * (rank + 1)))


@check
def check_reduce_scatter_tensor(rank: int, size: int) -> None:
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    for later in BOTH:
        for op, factor in ((OPS.SUM, size), (OPS.AVG, 1)):
            found = torch.empty(2, 3)
            given = torch.arange(size * 6.0).view(size * 2, 3)
            finish(scatter(found, given.clone(), op, async_op=later), asynchronous=later)
            equal(found, given[2 * rank : 2 * rank + 2] * factor)


@check
def check_gather(rank: int, size: int) -> None:
    for later in BOTH:
        for root in range(size):
            found = [torch.empty(2) for _ in range(size)] if rank == root else None
            tensor = torch.full((2,), float(rank))
            finish(dist.gather(tensor, found, root, async_op=later), asynchronous=later)
            for other, each in enumerate(found or []):
                equal(each, torch.full((2,), float(other)))


@check
def check_scatter(rank: int, size: int) -> None:
    for later in BOTH:
        for root in range(size):
            given = [torch.full((2, 1), 1.0 + r) for r in range(size)] if rank == root else None
            found = torch.empty(2, 1)
            finish(dist.scatter(found, given, root, async_op=later), asynchronous=later)
            equal(found, torch.full((2, 1), 1.0 + rank))


@check
def check_all_to_all(rank: int, size: int) -> None:
    for later in BOTH:
        given = [torch.full((rank + other,), float(rank)) for other in range(size)]
        found = [torch.empty(rank + other) for other in range(size)]
        finish(dist.all_to_all(found, given, async_op=later), asynchronous=later)
        for other in range(size):
            equal(found[other], torch.full((rank + other,), float(other)))


@check
def check_all_to_all_single(rank: int, size: int) -> None:
    for later in BOTH:
        found = torch.empty(size, 2)
        given = torch.full((size, 2), float(rank))
        finish(dist.all_to_all_single(found, given, async_op=later), asynchronous=later)
        equal(found[:, 1], torch.arange(size, dtype=torch.float32))
        sends, receives = [rank + other for other in range(size)], list(range(rank, rank + size))
        found = torch.empty(sum(receives), 2)
        given = torch.full((sum(sends), 2), float(rank))
        work = dist.all_to_all_single(found, given, receives, sends, async_op=later)
        finish(work, asynchronous=later)
        equal(found[:, 0], torch.arange(float(size)).repeat_interleave(torch.tensor(receives)))


@check
def check_send(rank: int, size: int) -> None:
    if rank == 0:
        for peer in range(1, size):
            dist.send(torch.arange(4.0) + peer, peer)
            dist.send(strided(2, 2).fill_(peer), peer, tag=7)
    else:
        found = torch.empty(2, 2)
        assert dist.recv(found, 0, tag=7) == 0
        equal(found, torch.full((2, 2), float(rank)))
        apart = strided(4)
        dist.recv(apart, 0)
        equal(apart, torch.arange(4.0) + rank)


@check
def check_recv(rank: int, size: int) -> None:
    """From anyone; the sender's rank is told."""
    if rank == 0:
        found = torch.empty(1)
        senders = []
        for _ in range(1, size):
            sender = dist.recv(found, tag=3)
            equal(found, torch.tensor([float(sender)]))
            senders.append(sender)
        assert sorted(senders) == list(range(1, size))
    else:
        dist.send(torch.tensor([float(rank)]), 0, tag=3)


@check
def check_isend(rank: int, size: int) -> None:
    """Large ones to both sides at a time, and received afterwards."""
    right, left = (rank + 1) % size, (rank - 1) % size
    given, found = torch.full((300_000,), float(rank)), torch.empty(300_000)
    sent = dist.isend(given, right)
    received = dist.irecv(found, left)
    assert received.wait()
    assert sent.wait()
    equal(found[::1000], torch.full((300,), float(left)))


@check
def check_irecv(rank: int, size: int) -> None:
    if rank == 0:
        found = torch.empty(2)
        work = dist.irecv(found, 1, tag=5)
        assert work.wait()
        assert work._source_rank() == 1
        equal(work.result()[0], torch.ones(2))
    elif rank == 1:
        work = dist.isend(torch.ones(2), 0, tag=5)
        assert work.wait()


@check
def check_batch_isend_irecv(rank: int, size: int) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    found = torch.empty(3)
    given = torch.full((3,), float(rank))
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, found, left), dist.P2POp(dist.isend, given, right)]
    )
    for work in works:
        work.wait()
    equal(found, torch.full((3,), float(left)))


@check
def check_barrier(rank: int, size: int) -> None:
    for later in BOTH:
        finish(dist.barrier(async_op=later), asynchronous=later)


OBJECT = {"a": [1, "two"], "b": None}


@check
def check_all_gather_object(rank: int, size: int) -> None:
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, **OBJECT})
    assert found == [{"rank": other, **OBJECT} for other in range(size)]


@check
def check_gather_object(rank: int, size: int) -> None:
    found: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object((rank, OBJECT), found, 0)
    assert found in (None, [(other, OBJECT) for other in range(size)])


@check
def check_broadcast_object_list(rank: int, size: int) -> None:
    objects = [rank, OBJECT] if rank == 1 else [None, None]
    dist.broadcast_object_list(objects, 1)
    assert objects == [1, OBJECT]


@check
def check_scatter_object_list(rank: int, size: int) -> None:
    found: list[Any] = [None]
    given = [(other, OBJECT) for other in range(size)] if rank == 0 else None
    dist.scatter_object_list(found, given, 0)
    assert found == [(rank, OBJECT)]


@check
def check_send_object_list(rank: int, size: int) -> None:
    if rank == 0:
        dist.send_object_list([OBJECT, 5], 1)
    elif rank == 1:
        found: list[Any] = [None, None]
        dist.recv_object_list(found, 0)
        assert found == [OBJECT, 5]


check_recv_object_list = check_send_object_list
CHECKS["recv_object_list"] = check_recv_object_list


@check
def check_coalescing_manager(rank: int, size: int) -> None:
    tensors = [torch.full((2,), float(rank)), torch.ones(3)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    equal(tensors[0], torch.full((2,), float(sum(range(size)))))
    equal(tensors[1], torch.full((3,), float(size)))
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.all_reduce(tensors[0], async_op=True)
    manager.wait()


@check
def check_premul_sum(rank: int, size: int) -> None:
    op = dist._make_nccl_premul_sum(float(rank + 1))
    tensor = torch.full((3,), 2.0)
    dist.all_reduce(tensor, op)
    equal(tensor, torch.full((3,), float(size * (size + 1))))
    part = torch.empty(2)
    dist.reduce_scatter(part, [torch.full((2,), 2.0 + other) for other in range(size)], op)
    equal(part, torch.full((2,), (2.0 + rank) * size * (size + 1) / 2))


REFUSALS: dict[str, Check] = {}


def refusal(function: Check) -> Check:
    REFUSALS[function.__name__.removeprefix("refuse_")] = function
    return function


@refusal
def refuse_monitored_barrier(rank: int, size: int) -> None:
    """By torch up to 2.13, for any backend but Gloo; the group has it."""
    if VERSION < CONTAINS_BACKENDS:
        with pytest.raises(ValueError, match="only implemented for GLOO"):
            dist.monitored_barrier()
    else:
        dist.monitored_barrier()
    dist.group.WORLD.monitored_barrier()


@refusal
def refuse_split_group(rank: int, size: int) -> None:
    """By torch up to 2.14, on CPUs, for any backend; from then on by this one."""
    with pytest.raises(Exception, match=r"(?i)split|device"):
        dist.split_group(split_ranks=[list(range(size))])
