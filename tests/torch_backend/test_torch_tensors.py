"""What a call does to tensors beside their values: nothing, as with Gloo.

Version counters, which autograd compares with those of what it has saved; tensors that were made in
`torch.inference_mode()`; PREMUL_SUM.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from worlds import run, run_gloo

SIZE = 2
Call = Callable[[Tensor, int, bool], Any]


def cut(whole: Tensor) -> list[Tensor]:
    return list(whole.chunk(SIZE))


def message(tensor: Tensor, rank: int, later: bool) -> Any:
    if rank == 0:
        return (dist.isend if later else dist.send)(tensor, 1)
    work = (dist.irecv if later else dist.recv)(tensor, 0)
    return work if later else None


CALLS: dict[str, Call] = {
    "all_reduce": lambda t, _, later: dist.all_reduce(t, async_op=later),
    "all_reduce_coalesced": lambda t, _, later: dist.group.WORLD.allreduce_coalesced([t]),
    "broadcast": lambda t, _, later: dist.broadcast(t, 0, async_op=later),
    "reduce": lambda t, rank, later: dist.reduce(t if rank == 0 else t + 0, 0, async_op=later),
    "all_gather": lambda t, rank, later: dist.all_gather(cut(t), torch.ones(len(t) // 2) + rank),
    "all_gather, in one": lambda t, rank, later: dist.all_gather_into_tensor(
        t, torch.ones(len(t) // 2) + rank, async_op=later
    ),
    "reduce_scatter": lambda t, _, later: dist.reduce_scatter(t, [t + 1, t + 2], async_op=later),
    "reduce_scatter, in one": lambda t, _, later: dist.reduce_scatter_tensor(
        t, torch.arange(2.0 * len(t)), async_op=later
    ),
    "gather": lambda t, rank, later: dist.gather(
        torch.ones(len(t) // 2) + rank, cut(t) if rank == 0 else None, async_op=later
    ),
    "scatter": lambda t, rank, later: dist.scatter(
        t, [torch.ones(len(t)), torch.ones(len(t)) + 1] if rank == 0 else None, async_op=later
    ),
    "all_to_all": lambda t, rank, later: dist.all_to_all_single(
        t, torch.arange(1.0 * len(t)) + rank, async_op=later
    ),
    "message": message,
}


def called(name: str, tensor: Tensor, rank: int, later: bool) -> Tensor:
    work = CALLS[name](tensor, rank, later)
    if work is not None:
        work.wait()
    return tensor


# Version counters ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["auto", "tcp"])
def test_no_call_raises_a_version_counter(kind: str) -> None:
    """Nor on a tensor with room between its elements, which is received elsewhere, and copied."""

    def act(rank: int) -> dict[str, int]:
        raised = {}
        for name in CALLS:
            for count in (4, 20_000):
                for later in (False, True):
                    for tensor in (torch.ones(count), torch.ones(2 * count)[::2]):
                        before = tensor._version
                        called(name, tensor, rank, later)
                        raised[name] = tensor._version - before
        return raised

    assert run(act, kind=kind) == [dict.fromkeys(CALLS, 0)] * SIZE


def test_backward_after_what_it_goes_through_was_replicated() -> None:
    def act(rank: int) -> Tensor:
        whole = torch.arange(4.0).requires_grad_()
        mine = whole.chunk(SIZE)[rank]
        distribute_tensor(whole, init_device_mesh("cpu", (SIZE,)), [Replicate()])
        mine.sum().backward()
        assert whole.grad is not None
        return whole.grad

    torch.testing.assert_close(run(act), run_gloo(act, SIZE))


@pytest.mark.filterwarnings("ignore:c10d..allreduce_. an autograd kernel was not registered")
def test_backward_after_what_an_operator_has_saved_was_reduced() -> None:
    def act(rank: int) -> Tensor:
        given = torch.ones(4, requires_grad=True)
        saved = torch.relu(given)
        dist.all_reduce(saved, async_op=True).wait()
        saved.sum().backward()
        assert given.grad is not None
        return given.grad

    torch.testing.assert_close(run(act), run_gloo(act, SIZE))


# Tensors that were made in inference mode ------------------------------------------------------


@pytest.mark.checkered
@pytest.mark.parametrize("kind", ["auto", "tcp"])
@pytest.mark.parametrize("later", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("count", [4, 20_000])
def test_tensors_of_inference_mode_get_what_gloo_gives_others(
    count: int, later: bool, kind: str
) -> None:
    """After the mode, in it, and by a call that is begun in it. Then an ordinary one.

    Gloo does this as well for all_reduce, broadcast and reduce, and refuses most others after it.
    """

    def act(rank: int, mode: bool) -> list[Tensor]:
        found = []
        for name, call in CALLS.items():
            with torch.inference_mode(mode):
                made, other, third = (torch.arange(1.0 * count) + rank for _ in range(3))
                called(name, other, rank, later)
                work = call(third, rank, later)
            if work is not None:
                work.wait()
            called(name, made, rank, later)
            found += [made, other, third, called(name, torch.ones(count), rank, later)]
        return [each.clone() for each in found]

    expected = run_gloo(lambda rank: act(rank, False), SIZE)
    torch.testing.assert_close(run(lambda rank: act(rank, True), kind=kind), expected)


def test_sparse_tensors_of_inference_mode() -> None:
    def act(rank: int) -> Tensor:
        with torch.inference_mode():
            tensor = torch.eye(3).to_sparse()
        dist.all_reduce(tensor)
        return tensor.to_dense()

    assert all(torch.equal(found, 2 * torch.eye(3)) for found in run(act))


# PREMUL_SUM ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_premul_sum_multiplies_what_each_rank_gives(dtype: torch.dtype) -> None:
    def act(rank: int) -> None:
        group: Any = dist.group.WORLD
        op = dist._make_nccl_premul_sum(0.5 * (rank + 1))  # type: ignore[attr-defined]
        ones, total = torch.ones(4, dtype=dtype), torch.full((4,), 1.5, dtype=dtype)
        tensor = ones.clone()
        dist.all_reduce(tensor, op)
        assert torch.equal(tensor, total)
        listed = [ones.clone(), torch.ones(8, dtype=dtype)[::2]]
        group.allreduce_coalesced(listed, op).wait()
        assert torch.equal(torch.stack(listed), torch.stack([total, total]))
        tensor = ones.clone()
        dist.reduce(tensor, 1, op)
        assert torch.equal(tensor, total if rank == 1 else ones)
        given, part = ones.clone(), torch.empty(2, dtype=dtype)
        dist.reduce_scatter_tensor(part, given, op)
        assert torch.equal(part, total[:2])
        dist.reduce_scatter(part, cut(given), op, async_op=True).wait()
        assert torch.equal(part, total[:2])
        assert torch.equal(given, ones)

    run(act)


def test_premul_sum_of_whole_numbers_is_refused_and_changes_nothing() -> None:
    def act(rank: int) -> None:
        tensor = torch.ones(2, dtype=torch.int64)
        with pytest.raises(RuntimeError, match=r"PREMUL_SUM is for dense .* not torch\.int64"):
            dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0))  # type: ignore[attr-defined]
        assert tensor.tolist() == [1, 1]
        dist.all_reduce(tensor)

    run(act)


def test_fully_shard_divides_gradients_by_what_it_is_told() -> None:
    """With PREMUL_SUM, which Gloo does not have."""

    def gradients(model: nn.Module, batch: Tensor) -> list[Tensor]:
        model(batch).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    layer, batch = nn.Linear(6, 5), torch.arange(24.0).view(4, 6) / 24
    expected = [grad / 4 for grad in gradients(copy.deepcopy(layer), batch)]

    def act(rank: int) -> None:
        model: Any = fully_shard(copy.deepcopy(layer), mesh=init_device_mesh("cpu", (SIZE,)))
        model.set_gradient_divide_factor(4.0)
        found: list[Any] = gradients(model, batch.chunk(SIZE)[rank])
        torch.testing.assert_close([each.full_tensor() for each in found], expected)

    run(act)


def test_ddp_with_a_hook_that_scales_by_premul_sum() -> None:
    def hook(state, bucket):  # type: ignore[no-untyped-def] # torch compares annotations
        op = dist._make_nccl_premul_sum(1 / SIZE)  # type: ignore[attr-defined]
        work: Any = dist.all_reduce(bucket.buffer(), op, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def act(rank: int) -> Tensor:
        model = DistributedDataParallel(nn.Linear(3, 1))
        model.register_comm_hook(None, hook)
        model(torch.full((1, 3), rank + 1.0)).sum().backward()
        return model.module.weight.grad  # type: ignore[return-value]

    assert all(torch.equal(found, torch.full((1, 3), 1.5)) for found in run(act))
