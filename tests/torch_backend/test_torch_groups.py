"""Groups, how ranks meet for them, and what is said of bad input."""

from __future__ import annotations

import inspect
import os
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import run, world_of_each_thread

import phalanx
import phalanx.torch_backend
from phalanx import (
    CollectiveTimeoutError,
    DesyncError,
    DistributedError,
    MisuseError,
)
from phalanx.torch_backend import creation, process_group
from phalanx.torch_backend.errors import as_torch
from phalanx.torch_backend.rendezvous import meet


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="this torch sorts the ranks of every group",
)
def test_a_group_keeps_the_order_that_it_is_given() -> None:
    def act(rank: int) -> tuple[int, list[float]]:
        group = dist.new_group([2, 0, 1], sort_ranks=False)
        found = [torch.empty(1) for _ in range(3)]
        dist.all_gather(found, torch.tensor([float(rank)]), group=group)
        return dist.get_rank(group), torch.cat(found).tolist()

    assert run(act, 3) == [(1, [2.0, 0.0, 1.0]), (2, [2.0, 0.0, 1.0]), (0, [2.0, 0.0, 1.0])]


def test_groups_that_only_their_members_make() -> None:
    """torch names such groups by a local count, so each rank has other names for them."""

    def act(rank: int) -> list[float]:
        sums = []
        for members in ([0, 1], [1, 2], [0, 2], [0, 1, 2]):
            group = dist.new_group(members, use_local_synchronization=True)
            tensor = torch.tensor([float(rank)])
            if rank in members:
                dist.all_reduce(tensor, group=group)
                sums.append(tensor.item())
        return sums

    assert run(act, 3) == [[1.0, 2.0, 3.0], [1.0, 3.0, 3.0], [3.0, 2.0, 3.0]]


def test_fifty_groups_need_no_port_and_no_message() -> None:
    def act(rank: int) -> int:
        dist.barrier()
        sockets = count_of_sockets()
        groups = [dist.new_group([0, 1]) for _ in range(50)]
        assert count_of_sockets() <= sockets
        dist.all_reduce(torch.ones(1), group=groups[49])
        return len({group.group_name for group in groups})

    assert run(act) == [50, 50]


def count_of_sockets() -> int:
    number = 0
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile, such as that of this folder
            number += os.readlink(f"/proc/self/fd/{each}").startswith("socket:")
    return number


def test_a_group_has_the_timeout_that_it_is_given() -> None:
    def act(rank: int) -> list[float]:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=7))
        before = group.backend.timeout
        group.set_timeout(timedelta(seconds=9))
        return [before, group.backend.timeout, dist.group.WORLD.backend.timeout]

    assert run(act) == [[7.0, 9.0, 20.0]] * 2


def test_the_backend_in_a_group_has_the_calls_of_the_group() -> None:
    """From torch 2.14 on a group contains backends; before, Phalanx's was its own."""

    def act(rank: int) -> tuple[str, list[float], list[str], float]:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        tensor = torch.ones(2)
        backend.allreduce([tensor]).wait()
        names = [name for name in dir(backend) if name.startswith("supports_")]
        supported = [name for name in names if getattr(backend, name) is not False]
        kind = type(backend).__name__
        return kind, tensor.tolist(), supported, backend.options._timeout.total_seconds()

    contained = process_group.VERSION >= process_group.CONTAINS_BACKENDS
    kind = "PhalanxBackend" if contained else "PhalanxProcessGroup"
    assert run(act) == [(kind, [2.0, 2.0], ["supports_tensor_alloc"], 20.0)] * 2


def test_gloo_beside_it_stays_gloo_and_it_meets_through_the_store_beside_gloo() -> None:
    def act(rank: int) -> tuple[str, float]:
        gloo = dist.new_group([0, 1], backend="gloo")
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=gloo)
        return dist.get_backend(gloo), tensor.item()

    assert run(act) == [("gloo", 2.0)] * 2

    def beside(rank: int, store: dist.Store) -> float:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        group = dist.new_group([0, 1], backend="phalanx")
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        dist.barrier(group)
        dist.destroy_process_group(group)
        return tensor.item()

    store = dist.HashStore()
    with world_of_each_thread():
        assert in_threads(*(lambda rank=rank: beside(rank, store) for rank in range(2))) == [2, 2]


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """What each returns, or the exception that it raises."""
    results: list[Any] = [None] * len(functions)

    def call(place: int) -> None:
        try:
            results[place] = functions[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=call, args=(n,)) for n in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_a_hundred_worlds_one_after_the_other_through_one_store() -> None:
    store = dist.HashStore()

    def rounds(rank: int) -> float:
        total = 0.0
        for _ in range(100):
            dist.init_process_group("phalanx", store=store, rank=rank, world_size=2)
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            total += tensor.item()
            dist.destroy_process_group()
        return total

    with world_of_each_thread():
        assert in_threads(lambda: rounds(0), lambda: rounds(1)) == [200.0, 200.0]


# Bad input -------------------------------------------------------------------------------------


def meeting(store: Any, rank: int, size: int, timeout: float = 20.0) -> Callable[[], Any]:
    return lambda: meet(store, rank, size, timeout)


def close_all(*found: Any) -> None:
    for each in found:
        if isinstance(each, phalanx.Backend):
            each.close()


def test_a_rank_that_does_not_come_is_named_by_all() -> None:
    store = dist.HashStore()
    for error in in_threads(meeting(store, 0, 3, 0.5), meeting(store, 2, 3, 0.5)):
        assert isinstance(error, CollectiveTimeoutError)
        assert error.peer == 1
        assert "for rank 1 of 3" in str(error)
        assert " timeout " in str(as_torch(error))


def test_ranks_that_were_told_another_number_of_ranks() -> None:
    store = dist.HashStore()
    errors = in_threads(meeting(store, 0, 2), meeting(store, 1, 3))
    assert all(isinstance(error, DistributedError) for error in errors)
    assert "told that there are 2 ranks, and rank 1 that there are 3" in str(errors[0])
    assert "told that there are 2 ranks" in str(errors[1])


def test_two_processes_that_are_one_rank() -> None:
    store = dist.HashStore()
    first = f'{{"host": "{phalanx.transport.tcp.heartbeat.host_id()}", "process": 1, '
    store.set("phalanx//0//last/1", first + '"world_size": 2}')
    with pytest.raises(MisuseError, match="rank 1 has come to this store already, as process 1"):
        meet(store, 1, 2, 1.0)


@pytest.mark.parametrize("method", ["add", "set", "check", "get"])
def test_a_store_that_is_gone(method: str) -> None:
    """Its process dies before the ranks meet there, or while they do."""

    def gone(*_: object) -> None:
        raise dist.DistNetworkError("failed to recv, got 0 bytes")

    store = type("Store", (dist.HashStore,), {method: gone})()
    dist.HashStore.set(store, "phalanx//0//1/1", "something that is to be got")
    with pytest.raises(phalanx.BackendUnavailableError, match="is the process that holds it alive"):
        meet(store, 0, 2, 1.0)


def test_a_version_of_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(creation, "VERSION", (2, 8))
    monkeypatch.setattr(torch, "__version__", "2.8.1+cpu")
    with pytest.raises(phalanx.BackendUnavailableError, match=r"2.9 or newer, and this is 2\.8\.1"):
        creation.check_version()


def test_ranks_that_call_different_things_are_told_both_lines() -> None:
    def act(rank: int) -> str:
        tensor = torch.ones(2)
        with pytest.raises(DesyncError) as caught:
            dist.all_reduce(tensor) if rank == 0 else dist.broadcast(tensor, 0)
        with pytest.raises(DesyncError):
            dist.barrier()
        return str(caught.value)

    for text in run(act):
        assert "all_reduce #0" in text
        assert "broadcast #0" in text
        assert text.count("test_torch_groups.py") == 2


def test_splits_are_given_by_all_ranks_or_by_none() -> None:
    def mixed(rank: int) -> str:
        splits = [[2, 2], [2, 2]] if rank else []
        with pytest.raises(DesyncError) as caught:
            dist.all_to_all_single(torch.empty(4), torch.ones(4), *splits)
        return str(caught.value)

    for text in run(mixed):
        assert "all_to_all #0" in text
        assert "all_to_all_uneven #0" in text
        assert text.count("test_torch_groups.py") == 2

    def one_has_equal_ones(rank: int) -> list[float]:
        splits = [2, 5] if rank else [2, 2]
        out = torch.empty(sum(splits))
        dist.all_to_all_single(out, torch.full((sum(splits),), float(rank)), splits, splits)
        return out.tolist()

    assert run(one_has_equal_ones) == [[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, *[1.0] * 5]]


def test_errors_are_torch_s_too_and_survive_pickling() -> None:
    def act(rank: int) -> Exception | None:
        group = dist.new_group(timeout=timedelta(seconds=0.2))
        if rank == 1:
            return None
        with pytest.raises(dist.DistBackendError, match=" timeout ") as caught:
            dist.barrier(group)
        return caught.value

    error = run(act)[0]
    again = pickle.loads(pickle.dumps(error))
    for each in (error, again):
        assert isinstance(each, CollectiveTimeoutError)
        assert isinstance(each, dist.DistBackendError)
        assert (each.rank, each.peer, each.op, each.sequence) == (0, 1, "barrier", 0)


BAD: dict[str, tuple[str, Callable[[], object]]] = {
    "a list of the wrong length": (
        "one tensor for each of 2 ranks, not 3",
        lambda: dist.all_gather([torch.empty(2) for _ in range(3)], torch.ones(2)),
    ),
    "another shape": (
        r"rank 1 in the list is torch.float32 \[3\]",
        lambda: dist.all_gather([torch.empty(2), torch.empty(3)], torch.ones(2)),
    ),
    "another dtype": (
        "torch.float64",
        lambda: dist.group.WORLD.allgather(
            [[torch.empty(2).double(), torch.empty(2).double()]], [torch.ones(2)]
        ),
    ),
    "an output that is too small": (
        "holds 2 times",
        lambda: dist.group.WORLD.all_gather_single(torch.empty(3), torch.ones(2)),
    ),
    "an output of another dtype": (
        "holds 2 times torch.float32",
        lambda: dist.group.WORLD.all_gather_single(torch.empty(4).double(), torch.ones(2)),
    ),
    "a list for the root of the wrong length": (
        "gather: there is one tensor for each of 2 ranks, not 1",
        lambda: dist.gather(torch.ones(2), [torch.empty(2)], dst=dist.get_rank()),
    ),
    "a list of the root that is too short": (
        "scatter: there is one tensor for each of 2 ranks, not 1",
        lambda: dist.scatter(torch.ones(2), [torch.empty(2)], src=dist.get_rank()),
    ),
    "a list of the root of another shape": (
        r"scatter: the tensor for rank 1 in the list is torch.float32 \[3\]",
        lambda: dist.scatter(torch.ones(2), [torch.empty(2), torch.empty(3)], src=dist.get_rank()),
    ),
    "a list to reduce of the wrong length": (
        "reduce_scatter: there is one tensor for each of 2 ranks, not 3",
        lambda: dist.reduce_scatter(torch.ones(2), [torch.ones(2) for _ in range(3)]),
    ),
    "an input that is too small": (
        "reduce_scatter: the input is torch.float32 .*holds 2 times",
        lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(3)),
    ),
    "a list for all of the wrong length": (
        "all_to_all: there is one tensor for each of 2 ranks, not 3",
        lambda: dist.all_to_all([torch.empty(1), torch.empty(1)], [torch.ones(1)] * 3),
    ),
    "rows that do not divide by the ranks": (
        r"dim 0 of \[3\] does not divide by the 2 ranks",
        lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3)),
    ),
    "split sizes": (
        "add up to dim 0",
        lambda: dist.all_to_all_single(torch.empty(4), torch.ones(4), [1, 2], [2, 2]),
    ),
    "a root that does not exist": (
        "root 5",
        lambda: dist.group.WORLD.broadcast(torch.ones(2), 5),
    ),
    "a device that nobody takes": (
        "(?i)meta",
        lambda: dist.all_reduce(torch.ones(2, device="meta")),
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_before_anything_is_sent(what: str) -> None:
    text, call = BAD[what]

    def act(rank: int) -> float:
        with pytest.raises(RuntimeError, match=text):
            call()
        tensor = torch.ones(1)  # the group goes on
        dist.all_reduce(tensor)
        return tensor.item()

    assert run(act) == [2.0, 2.0]


def test_a_group_that_was_destroyed() -> None:
    def act(rank: int) -> bool:
        group = dist.new_group([0, 1])
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError, match="closed"):
            group.allreduce(torch.ones(1)).wait()
        return True

    assert run(act) == [True, True]


def test_who_is_no_member_is_told_so_by_torch() -> None:
    def act(rank: int) -> bool:
        group = dist.new_group([0])
        if rank == 1:
            with pytest.warns(UserWarning, match="does not belong to the given group"):
                assert dist.all_reduce(torch.ones(1), group=group) is None
        return True

    assert run(act) == [True, True]


def test_a_wait_says_who_is_late_within_the_deadline() -> None:
    def act(rank: int) -> float:
        began = time.monotonic()
        if rank == 0:
            with pytest.raises(CollectiveTimeoutError, match="rank 1"):
                dist.all_reduce(torch.ones(1))
        return time.monotonic() - began

    run(act, timeout=0.5)


def test_monitored_barrier_of_the_group_names_all_that_are_late() -> None:
    def act(rank: int) -> str:
        if rank:
            return ""
        with pytest.raises(CollectiveTimeoutError) as caught:
            dist.group.WORLD.monitored_barrier(timedelta(seconds=0.2), wait_all_ranks=True)
        return str(caught.value)

    assert "Ranks 1, 2 failed to pass monitoredBarrier" in run(act, 3)[0]


def test_monitored_barrier_with_a_timeout_of_0_does_not_wait_for_that_of_the_group() -> None:
    def act(rank: int) -> str:
        if rank:
            return ""
        with pytest.raises(CollectiveTimeoutError) as caught:
            dist.group.WORLD.monitored_barrier(timedelta(0))
        return str(caught.value)

    assert "Rank 0 timed out in monitoredBarrier after 0 s: Rank 1 failed" in run(act)[0]
