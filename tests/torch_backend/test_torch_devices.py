"""Tensors on other devices go to the backend that the program names for these (`stand_in.py`)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stand_in import DEVICE, DeviceTensor, on_device
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - it registers itself
from worlds import run

from phalanx import BackendUnavailableError, CollectiveTimeoutError, UnsupportedOperationError
from phalanx.torch_backend.process_group import CONTAINS_BACKENDS, VERSION

BOTH = "cpu:phalanx,meta:stand_in"


def stand_in(group: Any = None) -> Any:
    """The backend for the device, of this rank's group."""
    return (group or dist.group.WORLD)._get_backend(DEVICE)


def values(tensor: Tensor) -> Any:
    return (tensor.values if isinstance(tensor, DeviceTensor) else tensor).tolist()


Place = Callable[[Tensor], Tensor]


def numbers(place: Place, *shape: int, of: float = 0.0) -> Tensor:
    return place(torch.arange(float(torch.Size(shape).numel())).view(shape) + of)


def gathered(place: Place, rank: int) -> list[Tensor]:
    found = [numbers(place, 3) for _ in range(2)]
    dist.all_gather(found, numbers(place, 3, of=rank))
    return found


def gathered_by_0(place: Place, rank: int) -> list[Tensor]:
    found = [numbers(place, 3) for _ in range(2)] if rank == 0 else None
    dist.gather(numbers(place, 3, of=rank), found)
    return found or []


def scattered_by_1(place: Place, rank: int) -> list[Tensor]:
    given = [numbers(place, 3, of=each) for each in range(2)] if rank == 1 else None
    into = numbers(place, 3)
    dist.scatter(into, given, src=1)
    return [into]


def into(
    call: Callable[..., object], rows: int, given: int
) -> Callable[[Place, int], list[Tensor]]:
    def act(place: Place, rank: int) -> list[Tensor]:
        output = numbers(place, rows, 2)
        call(output, numbers(place, given, 2, of=rank))
        return [output]

    return act


def in_place(call: Callable[[Tensor], object]) -> Callable[[Place, int], list[Tensor]]:
    def act(place: Place, rank: int) -> list[Tensor]:
        tensor = numbers(place, 2, 2, of=rank)
        call(tensor)
        return [tensor]

    return act


CALLS: dict[str, Callable[[Place, int], list[Tensor]]] = {
    "allreduce": in_place(dist.all_reduce),
    "allreduce, MAX": in_place(lambda tensor: dist.all_reduce(tensor, dist.ReduceOp.MAX)),
    "allreduce, later": in_place(lambda tensor: dist.all_reduce(tensor, async_op=True).wait()),
    "allreduce, in short": in_place(lambda tensor: dist.group.WORLD.allreduce(tensor).wait()),
    "broadcast": in_place(lambda tensor: dist.broadcast(tensor, 1)),
    "allgather": gathered,
    "gather": gathered_by_0,
    "scatter": scattered_by_1,
    "_allgather_base": into(lambda *pair: dist.group.WORLD._allgather_base(*pair).wait(), 4, 2),
    "_reduce_scatter_base": into(
        lambda *pair: dist.group.WORLD._reduce_scatter_base(*pair).wait(), 2, 4
    ),
    "all_gather_into_tensor": into(dist.all_gather_into_tensor, 4, 2),
    "reduce_scatter_tensor": into(dist.reduce_scatter_tensor, 2, 4),
    "all_to_all_single": into(dist.all_to_all_single, 4, 4),
}


def test_a_collective_is_done_where_its_tensors_are() -> None:
    def act(rank: int) -> dict[str, bool]:
        same = {}
        for name, call in CALLS.items():
            expected = call(lambda tensor: tensor, rank)
            before = len(stand_in().called)
            came = call(on_device, rank)
            same[name] = list(map(values, came)) == list(map(values, expected))
            assert len(stand_in().called) == before + 1, name
        return same

    assert run(act, backend=BOTH) == [dict.fromkeys(CALLS, True)] * 2


def test_messages_and_what_is_put_together() -> None:
    def act(rank: int) -> tuple[list[Any], list[str]]:
        given, found = numbers(on_device, 3, of=rank), numbers(on_device, 3)
        if rank == 0:
            dist.send(given, 1, tag=3)
            dist.recv(found, tag=5)
        else:
            dist.recv(found, 0, tag=3)
            dist.send(given, 0, tag=5)
        come = [values(found)]
        into = numbers(on_device, 2)
        batch = [
            dist.P2POp(dist.isend, numbers(on_device, 2, of=7 + rank), 1 - rank),
            dist.P2POp(dist.irecv, into, 1 - rank),
        ]
        (work,) = dist.batch_isend_irecv(batch)
        work.wait()
        come.append(values(into))
        tensors = [numbers(on_device, 2, of=rank) for _ in range(2)]
        with dist._coalescing_manager(device=DEVICE):
            for tensor in tensors:
                dist.all_reduce(tensor)
        return [*come, *map(values, tensors)], stand_in().called

    batch = ["_start_coalescing", "send", "recv", "_end_coalescing"]
    together = ["_start_coalescing", "allreduce_coalesced", "_end_coalescing"]
    for rank, (come, called) in enumerate(run(act, backend=BOTH)):
        of = 1 - rank
        assert come == [[of, 1 + of, 2 + of], [7 + of, 8 + of], [1, 3], [1, 3]]
        messages = ["send", "recv_anysource"] if rank == 0 else ["recv", "send"]
        assert called[1:] == [*messages, *batch, *together]


def test_a_barrier_is_the_cpu_s_unless_its_device_is_said() -> None:
    def act(rank: int) -> list[str]:
        dist.barrier()
        assert dist.group.WORLD._others._made == {}
        options = dist.BarrierOptions()
        options.device = DEVICE
        dist.group.WORLD.barrier(opts=options).wait()
        options.device = torch.device("cuda", 0)  # for which there is none: ours
        dist.group.WORLD.barrier(options)
        return stand_in().called[1:]

    assert run(act, backend=BOTH) == [["barrier"]] * 2


def test_functional_collectives() -> None:
    def act(rank: int) -> list[Any]:
        tensor, name = numbers(on_device, 2, of=rank), dist.group.WORLD.group_name
        calls = torch.ops._c10d_functional
        found = [
            calls.all_reduce(tensor, "sum", name),
            calls.all_gather_into_tensor(tensor, 2, name),
            calls.all_reduce(torch.ones(2), "sum", name),
        ]
        return [values(calls.wait_tensor(each)) for each in found]

    assert run(act, backend=BOTH) == [[[1, 3], [0, 1, 1, 2], [2, 2]]] * 2


def test_it_is_made_at_the_first_tensor_and_objects_go_by_the_cpu() -> None:
    def act(rank: int) -> list[Any]:
        group = dist.group.WORLD
        found: list[Any] = [None, None]
        dist.all_gather_object(found, f"of {rank}")
        dist.all_reduce(torch.ones(1))
        assert group._others._made == {}
        assert c10d._get_object_coll_device(group) == "cpu"
        assert group._get_backend("cpu").backend is group.backend
        dist.all_reduce(numbers(on_device, 1))
        assert list(group._others._made) == ["meta"]
        assert dist.get_backend() == BOTH
        assert list(c10d._world.pg_map) == [group]
        at_once = dist.new_group([0, 1], device_id=torch.device("meta", 0))
        assert list(at_once._others._made) == ["meta"]
        return [*found, *map(str, group._device_types)]

    assert run(act, backend=BOTH) == [["of 0", "of 1", "cpu", "meta"]] * 2


def test_a_group_has_one_of_its_own_whatever_torch_calls_the_group() -> None:
    """Groups that only their members make have other names on each rank."""

    def act(rank: int) -> list[Any]:
        sums = []
        for members in ([0, 1], [1, 2], [0, 2]):
            group = dist.new_group(members, use_local_synchronization=True)
            if rank in members:
                tensor = numbers(on_device, 1, of=rank)
                dist.all_reduce(tensor, group=group)
                sums += values(tensor)
                assert stand_in(group).size() == 2
        turned = dist.new_group([2, 0, 1], sort_ranks=False)
        found = [numbers(on_device, 1) for _ in range(3)]
        dist.all_gather(found, numbers(on_device, 1, of=rank), group=turned)
        return [*sums, *map(values, found)]

    turned = [[2.0], [0.0], [1.0]]
    assert run(act, 3, backend=BOTH) == [[1, 2, *turned], [1, 3, *turned], [3, 2, *turned]]


def test_it_has_the_group_s_timeout_and_memory_and_ends_with_it() -> None:
    def act(rank: int) -> list[Any]:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=7))
        other = stand_in(group)
        timeouts = [other.timeout.total_seconds()]
        group.set_timeout(timedelta(seconds=9))
        timeouts.append(other.timeout.total_seconds())
        assert group.supports_tensor_alloc(DEVICE)
        assert (
            group.allocate_tensor(3, dtype=torch.int64, device=DEVICE).values.dtype == torch.int64
        )
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError, match="all_reduce on a group that is closed"):
            group.allreduce(numbers(on_device, 1))
        aborted = dist.new_group([0, 1])
        called = stand_in(aborted).called
        aborted.abort()
        return [*timeouts, other.called[1:], called[1:]]

    assert run(act, backend=BOTH) == [[7, 9, ["shutdown"], ["abort"]]] * 2


def test_worlds_one_after_the_other_through_one_store() -> None:
    def act(rank: int) -> float:
        total = 0.0
        store = dist.group.WORLD._store
        dist.destroy_process_group()
        for _ in range(3):
            dist.init_process_group(BOTH, store=store, rank=rank, world_size=2)
            tensor = numbers(on_device, 1, of=1)
            dist.all_reduce(tensor)
            total += tensor.values.item()
            dist.barrier()
            dist.destroy_process_group()
        return total

    assert run(act) == [6.0, 6.0]


# Backends of torch's own --------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu:phalanx,cuda:gloo", "cuda:gloo,cpu:phalanx"])
def test_a_backend_of_torch_s_own_before_or_after_ours(backend: str) -> None:
    def act(rank: int) -> list[Any]:
        group = dist.group.WORLD
        made_before = list(group._others._made)
        gloo = group._get_backend("cuda")
        assert isinstance(gloo, dist.ProcessGroupGloo)
        tensor, ours = torch.ones(1), torch.ones(1)
        gloo.allreduce([tensor]).wait()
        dist.all_reduce(ours)
        return [made_before, tensor.item(), ours.item(), *map(str, group._device_types)]

    before = [] if backend.startswith("cpu") else ["cuda"]
    expected = {"cpu", "cuda"}
    for made_before, theirs, ours, *devices in run(act, backend=backend):
        assert (made_before, theirs, ours, set(devices)) == (before, 2.0, 2.0, expected)


FAKE = ["cpu:phalanx,cuda:fake", "cuda:fake,cpu:phalanx"]


@pytest.mark.parametrize("backend", FAKE[VERSION >= CONTAINS_BACKENDS :])
def test_torch_s_group_takes_tensors_of_its_device(backend: str) -> None:
    def act(rank: int) -> str:
        with FakeTensorMode():
            tensor = torch.empty(2, 3, device="cuda")
            dist.all_reduce(tensor)
            assert dist.all_reduce(tensor, async_op=True).wait()
            dist.all_gather([tensor], tensor)
            dist.barrier(device_ids=[0])
        return dist.group.WORLD._get_backend("cuda").name()

    assert run(act, 1, backend=backend) == ["fake"]


@pytest.mark.skipif(VERSION < CONTAINS_BACKENDS, reason="this fake backend asks for nothing")
def test_a_backend_that_asks_for_itself_while_it_is_made() -> None:
    def act(rank: int) -> str:
        with pytest.raises(BackendUnavailableError) as caught:
            dist.group.WORLD._get_backend("cuda")
        return str(caught.value)

    assert (
        "'fake', which init_process_group was told for cuda, cannot be"
        in run(act, 1, backend=FAKE[0])[0]
    )


# Errors -------------------------------------------------------------------------------------------


def on_cuda() -> Tensor:
    return on_device(torch.ones(2), "cuda:0")


NOBODY: dict[str, tuple[str, str, Callable[[], object]]] = {
    "only phalanx was named": (
        "phalanx",
        r"all_reduce: this group takes tensors on cpu, not on cuda:0: write init_process_group\("
        r"'cpu:phalanx,cuda:nccl'\), or move it with \.cpu",
        lambda: dist.all_reduce(on_cuda()),
    ),
    "two were named, and not this one": (
        BOTH,
        r"all_reduce: .* cpu and meta, not .*: write .*'cpu:phalanx,meta:stand_in,cuda:nccl'",
        lambda: dist.all_reduce(on_cuda()),
    ),
    "a message": (
        "phalanx",
        "send: this group .* not on cuda:0",
        lambda: dist.send(on_cuda(), 1 - dist.get_rank()),
    ),
    "torch knows no backend for it": (
        "phalanx",
        r"all_gather: .* on cpu, not on meta: move it with \.cpu",
        lambda: dist.all_gather(
            list(torch.ones(2, 2, device="meta")), torch.ones(2, device="meta")
        ),
    ),
    "the device has no such backend": (
        "phalanx",
        "_get_backend: .* not on meta",
        lambda: dist.group.WORLD._get_backend("meta"),
    ),
    "phalanx was named for what is no accelerator": (
        "cpu:phalanx,meta:phalanx",
        "all_reduce_ moves dense CPU tensors and was given one on meta",
        lambda: dist.all_reduce(torch.ones(2, device="meta")),
    ),
}


@pytest.mark.parametrize("what", NOBODY)
def test_a_tensor_that_nobody_takes(what: str) -> None:
    backend, text, call = NOBODY[what]

    def act(rank: int) -> float:
        with pytest.raises(UnsupportedOperationError, match=f"rank {rank}: {text}"):
            call()
        tensor = torch.ones(1)  # the group goes on
        dist.all_reduce(tensor)
        return tensor.item()

    assert run(act, backend=backend) == [2.0, 2.0]


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_a_backend_that_torch_does_not_have() -> None:
    def act(rank: int) -> bool:
        for _ in range(2):
            with pytest.raises(
                BackendUnavailableError, match=r"all_reduce: .*'nccl'.*for cuda"
            ) as e:
                dist.all_reduce(on_cuda())
        return "NCCL built in" in str(e.value)

    assert run(act, backend="cpu:phalanx,cuda:nccl") == [True, True]


def test_who_gave_no_tensor_of_the_device_is_named() -> None:
    def act(rank: int) -> str:
        if rank == 1:
            return ""
        with pytest.raises(CollectiveTimeoutError, match=" timeout ") as caught:
            dist.all_reduce(numbers(on_device, 1))
        assert (caught.value.rank, caught.value.peer, caught.value.op) == (0, 1, "all_reduce")
        return str(caught.value)

    assert "rank 1 of 2 gave the group no tensor on meta" in run(act, backend=BOTH, timeout=0.5)[0]


def test_the_cpu_is_ours() -> None:
    with pytest.raises(UnsupportedOperationError, match=r"rank 0: .*'cpu:gloo,cuda:phalanx'"):
        run(lambda rank: None, 1, backend="cpu:gloo,cuda:phalanx")
