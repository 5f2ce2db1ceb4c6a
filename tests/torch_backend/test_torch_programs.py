"""What needs ranks that are processes: debug levels, threads that torch starts, the compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from forms import LONG, sizes
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.nn.parallel import DistributedDataParallel
from torch_power_sgd import WIDTH, problem
from torch_training import PROGRAMS, check, layers, plain, sgd, shard, train, whole

from phalanx import DesyncError

SIZE = 2


def returned(act: Callable[..., Any], *args: object, **environment: str) -> list[Any]:
    """What `act(rank)` returned on every rank."""
    outcomes = jobs.run(act, SIZE, *args, **environment)
    for outcome in outcomes.values():
        assert outcome.how == "returned", outcome
    return [outcomes[rank].value for rank in range(SIZE)]


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


# TORCH_DISTRIBUTED_DEBUG=DETAIL ----------------------------------------------------------------

IN_DETAIL = ["ddp_buckets", "ddp_static_graph", "fsdp2_with_clipping", "pipeline_1f1b"]


def in_detail(rank: int) -> str:
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    for name in IN_DETAIL:
        check(name, rank, SIZE, PROGRAMS[name].expected(SIZE)[rank])
    with pytest.raises(DesyncError) as caught:
        dist.all_reduce(torch.ones(2 + rank), group=dist.new_group([0, 1]))
    return str(caught.value)


def test_torch_s_debug_level_of_most_detail() -> None:
    """torch wraps groups of its own then. A group of ours stays, and compares all calls anyway."""
    for text in returned(in_detail, TORCH_DISTRIBUTED_DEBUG="DETAIL"):
        assert "float32 [2]" in text
        assert "float32 [3]" in text


# PowerSGD --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", sizes([3], [2, 3]))
@pytest.mark.parametrize("approximation_rank", sizes([WIDTH], [1, WIDTH]))
def test_collectives_in_callbacks_of_power_sgd(size: int, approximation_rank: int) -> None:
    assert problem(size, 3, approximation_rank) == ""


# Asynchronous checkpoints ----------------------------------------------------------------------

FORMS = [AsyncCheckpointerType.THREAD, *([AsyncCheckpointerType.PROCESS] if LONG else [])]


def saves_while_it_trains(rank: int, folder: str, form: AsyncCheckpointerType) -> None:
    model = shard(layers())
    optimizer = sgd(model)
    train(model, optimizer, rank, SIZE)
    group = dist.new_group() if form is AsyncCheckpointerType.THREAD else None
    saved = dcp.async_save(
        get_model_state_dict(model),
        checkpoint_id=folder,
        process_group=group,
        async_checkpointer_type=form,
    )
    train(model, optimizer, rank, SIZE)
    saved.result(60)
    dist.barrier()
    other = shard(layers())
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    same(whole(other), plain())


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_is_saved_while_training_goes_on(
    form: AsyncCheckpointerType, tmp_path: Path
) -> None:
    """In a thread, as dcp does unless it is told, or in processes, which take seconds to start."""
    returned(saves_while_it_trains, str(tmp_path), form)


# torch.compile ---------------------------------------------------------------------------------


def in_the_graph(values: Tensor) -> Tensor:
    total = functional.all_reduce(values * 2, "sum", dist.group.WORLD)
    dist.all_reduce(total)
    return total + 1


def in_the_graph_with_memory_for_the_result(values: Tensor) -> Tensor:
    """What Inductor makes of an all_gather."""
    operators: Any = torch.ops._c10d_functional
    group: Any = dist.group.WORLD
    whole, name = torch.empty(SIZE * len(values)), group.group_name
    operators.wait_tensor(operators.all_gather_into_tensor_out(values, SIZE, name, out=whole))
    return whole + 1


def breaks_the_graph(values: Tensor) -> Tensor:
    """Calls that torch does not compile, which are made from within a compiled function."""
    rank = dist.get_rank()
    total, first, found = torch.relu(values), values + 1, torch.empty_like(values)
    work = dist.all_reduce(total, async_op=True)
    dist.broadcast(first, 0)
    work.wait()
    dist.all_reduce(first, async_op=True).get_future().wait()
    messages = [
        dist.P2POp(dist.isend, values, 1 - rank),
        dist.P2POp(dist.irecv, found, 1 - rank),
    ]
    for each in dist.batch_isend_irecv(messages):
        each.wait()
    dist.send(found, 1) if rank == 0 else dist.recv(found, 0)
    dist.barrier()
    return total + first * found


def compiled(rank: int) -> None:
    values = torch.arange(3.0) + rank
    for function, whole_graph in (
        (in_the_graph, True),
        (in_the_graph_with_memory_for_the_result, True),
        (breaks_the_graph, False),
    ):
        expected = function(values)
        fast = torch.compile(function, backend="aot_eager", fullgraph=whole_graph)
        assert torch.equal(fast(values), expected)
    model = DistributedDataParallel(layers())
    train(torch.compile(model, backend="aot_eager"), sgd(model), rank, SIZE)
    same(model.module.state_dict(), plain())


def test_functions_and_models_under_torch_compile() -> None:
    returned(compiled)
