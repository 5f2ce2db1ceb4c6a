"""Errors while calls are under way: whom they name, and what goes on after them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from worlds import run

from phalanx import MisuseError, PeerLostError, SelfSendError

# DDP: the error comes out of a future --------------------------------------------------------


def plain(model: DistributedDataParallel) -> None:
    pass


def fp16_in_python(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, fp16_compress_hook)


def fp16_in_cpp(model: DistributedDataParallel) -> None:
    model._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)


def power_sgd(model: DistributedDataParallel) -> None:
    model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)


HOOKS = [plain, fp16_in_python, fp16_in_cpp, power_sgd]
Hook = Callable[[DistributedDataParallel], None]


def backward_of(hook: Hook) -> tuple[DistributedDataParallel, Callable[[], object]]:
    """A model with several buckets, and a backward pass of it."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.linspace(-1, 2, parameter.numel()).view_as(parameter))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.0001)
    hook(model)
    rank = dist.get_rank()
    return model, lambda: model(torch.full((2, 8), rank + 1.0)).sum().backward()


@pytest.mark.parametrize("known", [False, True], ids=["while it waits", "before it begins"])
@pytest.mark.parametrize("hook", HOOKS)
def test_ddp_ends_the_pass_that_fails_and_the_next_one_raises_the_error_itself(
    hook: Hook, known: bool
) -> None:
    """Else DDP would refuse the next pass with words of its own, which name nobody."""

    def act(rank: int) -> list[RuntimeError]:
        _, backward = backward_of(hook)
        for _ in range(3):  # the second pass has other buckets; then PowerSGD begins
            backward()
        group = dist.group.WORLD
        if rank == 1:
            group.abort()
            return []
        if known:
            with pytest.raises(PeerLostError):
                group.backend.recv(bytearray(1), 1)
        caught = []
        for _ in range(2):
            with pytest.raises(RuntimeError) as info:
                backward()
            caught.append(info.value)
        return caught

    first, then = run(act)[0]
    assert isinstance(then, PeerLostError)
    assert (then.rank, then.peer, then.op) == (0, 1, "all_reduce")
    for error in (first, then):
        assert "rank 0: all_reduce #" in str(error)
        assert " at test_torch_errors.py:" in str(error)
        assert "rank 1 was lost" in str(error)
    assert "Connection closed by peer" in str(then)  # what scripts look for


def test_ddp_s_hook_in_cpp_compresses_as_the_one_in_python_does() -> None:
    def act(rank: int) -> list[list[Tensor]]:
        found = []
        for hook in (fp16_in_python, fp16_in_cpp):
            model, backward = backward_of(hook)
            for _ in range(3):
                backward()
            found.append([parameter.grad for parameter in model.parameters()])
        return found

    first, second = run(act)
    for found in zip(*first, *second, strict=True):
        assert found[0].abs().sum() > 0
        assert all(torch.equal(each, found[0]) for each in found)


# Whatever a program does with its works ------------------------------------------------------


@pytest.mark.parametrize("kind", ["auto", "tcp"])
def test_a_group_is_destroyed_while_its_works_are_under_way(kind: str) -> None:
    def act(rank: int) -> list[str]:
        group = dist.new_group([0, 1])
        if rank == 1:
            assert destroyed.wait(20)
            return []
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        future = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()
        after = future.then(lambda done: done.value())
        dist.destroy_process_group(group)
        destroyed.set()
        texts = []
        for wait in (work.wait, work.wait, work.result, future.wait, after.wait):
            with pytest.raises(RuntimeError) as caught:
                wait()
            texts.append(str(caught.value))
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), MisuseError)
        return texts

    destroyed = threading.Event()
    texts = run(act, kind=kind)[0]
    assert all("in the group of ranks [0, 1]" in text for text in texts)
    assert all("on a backend that is closed" in text for text in texts)


@pytest.mark.parametrize("kind", ["auto", "tcp"])
def test_many_threads_wait_for_one_work(kind: str) -> None:
    def act(rank: int) -> list[object]:
        tensor, found = torch.ones(3), []
        work = dist.all_reduce(tensor, async_op=True)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        waits = [work.wait, work.result, future.wait] * 3
        threads = [
            threading.Thread(target=lambda wait=wait: found.append(wait())) for wait in waits
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(found) == len(threads)
        return [tensor.tolist()]

    assert run(act, kind=kind) == [[[4.0] * 3]] * 2


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_what_a_callback_raises_is_its_own_future_s(error: type[BaseException]) -> None:
    def fail(done: object) -> None:
        raise error("mine")

    def act(rank: int) -> list[float]:
        tensor = torch.ones(1)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        future.add_done_callback(fail)
        after = future.then(fail)
        (value,) = future.wait()
        with pytest.raises(RuntimeError, match="mine"):
            after.wait()
        dist.all_reduce(tensor)  # the group goes on
        return [value.item(), tensor.item()]

    assert run(act) == [[4.0, 4.0]] * 2


# Worlds of every size --------------------------------------------------------------------------


def test_a_world_of_one() -> None:
    def act(rank: int) -> list[float]:
        tensor, found = torch.ones(2), [torch.empty(2)]
        dist.all_reduce(tensor)
        dist.all_gather(found, tensor)
        dist.reduce_scatter(tensor, found)
        dist.all_to_all(found, [tensor])
        dist.broadcast(tensor, 0)
        dist.barrier()
        work = dist.all_reduce(tensor, group=dist.new_group([0]), async_op=True)
        (value,) = work.get_future().wait()
        objects = [None]
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": 0}]
        with pytest.raises(SelfSendError):
            dist.recv(tensor)
        return value.tolist()

    assert run(act, 1) == [[1.0, 1.0]]


def test_more_ranks_than_processors() -> None:
    def act(rank: int) -> list[float]:
        tensors = [torch.full((100,), float(rank)) for _ in range(5)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        return [tensor[99].item() for tensor in tensors]

    assert run(act, 8) == [[28.0] * 5] * 8
