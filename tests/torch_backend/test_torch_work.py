"""Work and futures: what is asynchronous waits for nobody, and callbacks are called."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn import Linear, Sequential
from torch.nn.parallel import DistributedDataParallel
from worlds import run

from phalanx import CollectiveTimeoutError


def test_groups_in_another_order_on_each_rank() -> None:
    """Rank 0 issues on A, then B; rank 1 on B, then A."""

    def act(rank: int) -> list[float]:
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        tensors = [torch.ones(1000) * (n + 1) for n in range(2)]
        order = (0, 1) if rank == 0 else (1, 0)
        works = [dist.all_reduce(tensors[n], group=groups[n], async_op=True) for n in order]
        for work in works:
            work.wait()
        return [tensor[0].item() for tensor in tensors]

    assert run(act) == [[2.0, 4.0]] * 2


def test_a_collective_is_issued_before_a_message_that_the_other_rank_waits_for_first() -> None:
    def act(rank: int) -> float:
        tensor, message = torch.ones(4), torch.zeros(4)
        if rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            dist.send(message + 1, 1)
            work.wait()
        else:
            dist.recv(message, 0)
            dist.all_reduce(tensor)
        return tensor[0].item()

    assert run(act) == [2.0, 2.0]


def test_large_messages_go_both_ways_while_receives_wait() -> None:
    def act(rank: int) -> list[float]:
        given = [torch.full((1_500_000,), float(n)) for n in range(2)]  # 12 MB
        found = [torch.empty(1_500_000) for _ in range(2)]
        works = [dist.isend(tensor, 1 - rank) for tensor in given]
        for tensor in found:  # first in, first out
            dist.recv(tensor, 1 - rank)
        for work in works:
            work.wait()
        return [tensor[-1].item() for tensor in found]

    assert run(act) == [[0.0, 1.0]] * 2


def test_work_says_how_it_is() -> None:
    def act(rank: int) -> bool:
        tensor = torch.ones(3)
        come = torch.empty(1)
        if rank == 1:
            dist.recv(come, 0)
        work = dist.all_reduce(tensor, async_op=True)
        if rank == 0:
            assert not work.is_completed()
            assert work.exception() is None
            dist.send(come, 1)
        work.synchronize()
        assert work.result()[0] is tensor
        return work.is_completed() and work.is_success() and work.exception() is None

    assert run(act) == [True, True]


@pytest.mark.parametrize("unset", [timedelta(0), None, timedelta(milliseconds=-1)])
def test_an_unset_timeout_is_the_group_s(unset: timedelta | None) -> None:
    def act(rank: int) -> float:
        group = dist.group.WORLD
        tensor = torch.ones(2)
        work = group.allreduce(tensor, dist.ReduceOp.SUM, unset)
        assert work.wait(unset) if unset is not None else work.wait()
        return tensor[0].item()

    assert run(act) == [2.0, 2.0]


def test_a_timeout_of_wait_names_whom_it_waited_for_and_the_work_goes_on() -> None:
    def act(rank: int) -> str:
        tensor = torch.ones(2)
        if rank:
            assert done.wait(20)
            dist.all_reduce(tensor)
            return ""
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(RuntimeError, match=" timeout ") as caught:
            work.wait(timedelta(seconds=0.2))
        done.set()
        assert isinstance(caught.value, CollectiveTimeoutError)
        assert work.wait()  # it has gone on
        assert tensor.tolist() == [2.0, 2.0]
        return f"{caught.value.peer} {caught.value.op} {caught.value.sequence}"

    done = threading.Event()
    assert run(act)[0] == "1 all_reduce 0"


# Futures ---------------------------------------------------------------------------------------


def test_a_future_holds_a_list_of_tensors() -> None:
    def act(rank: int) -> float:
        tensor = torch.ones(2)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        (value,) = future.wait()
        assert value is tensor
        return dist.all_reduce(tensor, async_op=True).get_future().then(sum_of).wait()

    def sum_of(future: torch.futures.Future[list[torch.Tensor]]) -> float:
        return future.value()[0].sum().item()

    assert run(act) == [8.0, 8.0]


def test_a_callback_runs_while_nobody_waits() -> None:
    def act(rank: int) -> float:
        called = threading.Event()
        tensor = torch.ones(2)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        future.add_done_callback(lambda _: called.set())
        assert called.wait(20)
        return tensor[0].item()

    assert run(act) == [2.0, 2.0]


def test_collectives_in_a_callback_wait_for_no_other_callback() -> None:
    def act(rank: int) -> float:
        outer, inner = torch.ones(2), torch.ones(2)
        group = dist.new_group([0, 1])
        early = dist.all_reduce(inner, group=group, async_op=True).get_future()

        def callback(future: object) -> float:
            (first,) = early.wait()
            (second,) = dist.all_reduce(first, group=group, async_op=True).get_future().wait()
            return second[0].item()

        return dist.all_reduce(outer, async_op=True).get_future().then(callback).wait()

    assert run(act) == [4.0, 4.0]


def test_an_error_comes_out_of_a_future() -> None:
    def act(rank: int) -> str:
        future = dist.all_reduce(torch.ones(2 + rank), async_op=True).get_future()
        with pytest.raises(RuntimeError, match="all_reduce #0") as caught:
            future.wait()
        with pytest.raises(RuntimeError, match="all_reduce #0"):
            future.then(lambda done: done.value()).wait()
        return type(caught.value).__name__

    assert run(act) == ["DesyncError", "DesyncError"]


def test_a_hook_that_issues_collectives_in_callbacks_has_one_order_on_all_ranks() -> None:
    """As PowerSGD's does, with several buckets."""

    def hook(state, bucket):  # type: ignore[no-untyped-def] # torch compares annotations
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        def more(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            (value,) = done.value()
            (value,) = dist.all_reduce(value / 2, async_op=True).get_future().wait()
            return value / 2

        return future.then(more)

    def act(rank: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = DistributedDataParallel(
            Sequential(*(Linear(32, 32) for _ in range(6))), bucket_cap_mb=0.001
        )
        model.register_comm_hook(None, hook)
        for step in range(6):
            generator = torch.Generator().manual_seed(2 * step + rank)
            model(torch.rand(4, 32, generator=generator)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    first, second = run(act)
    assert all(map(torch.equal, first, second))
