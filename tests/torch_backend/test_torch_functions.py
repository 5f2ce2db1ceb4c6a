"""The functions of torch.distributed, each in its forms: see torch_functions.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.autograd.profiler import profile
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch_functions import CHECKS, REFUSALS
from worlds import run, run_gloo


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CHECKS)
def test_function(name: str, size: int) -> None:
    run(lambda rank: CHECKS[name](rank, size), size)


@pytest.mark.parametrize("kind", ["tcp", "hybrid"])
@pytest.mark.parametrize("size", [2, 3])
def test_all_functions_between_hosts(kind: str, size: int) -> None:
    def act(rank: int) -> None:
        for function in CHECKS.values():
            function(rank, size)

    run(act, size, kind=kind)


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name: str) -> None:
    run(lambda rank: REFUSALS[name](rank, 2), 2)


WITHOUT_MEMORY: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda tensor: dist.broadcast(tensor, 0),
    "gather": lambda tensor: dist.all_gather([torch.empty(4) for _ in range(2)], tensor),
    "scatter": lambda tensor: dist.reduce_scatter(tensor, [tensor, tensor]),
    "all_to_all": lambda tensor: dist.all_to_all_single(torch.empty(4), tensor),
    "messages": lambda tensor: dist.send(tensor, 1) if dist.get_rank() == 0 else dist.recv(tensor),
}


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_the_result_of_a_functional_collective_is_waited_for(name: str) -> None:
    """It has no memory before; autograd and DTensor hand such tensors on."""

    def act(rank: int) -> list[float]:
        tensor = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
        assert type(tensor) is not Tensor
        WITHOUT_MEMORY[name](tensor)
        return tensor.tolist()

    factor = {"all_reduce": 2, "scatter": 2}.get(name, 1)
    assert run(act) == [[2.0 * factor] * 4] * 2


def test_a_tensor_of_a_class_that_has_no_memory_is_refused() -> None:
    def act(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        for call in (dist.all_reduce, lambda tensor: dist.send(tensor, 1 - rank)):
            with pytest.raises(RuntimeError, match=r"class DTensor.* use \.to_local\(\)"):
                call(tensor)

    run(act)


# The forms of torch's C++ class ----------------------------------------------------------------


def forms(rank: int) -> dict[str, Any]:
    """The methods of a process group, which torch overloads, with what each leaves in tensors."""
    group: Any = dist.group.WORLD
    op, later = dist.ReduceOp.MAX, timedelta(seconds=20)
    found: dict[str, Any] = {}

    def call(method: str, *arguments: Any, at: int = rank, **named: Any) -> None:
        """`at` is the one rank whose tensors say anything."""
        assert getattr(group, method)(*arguments, **named).wait()
        left = arguments[0] if method != "barrier" and at == rank else []
        found[f"{method}, call {len(found)}"] = left

    def one() -> Tensor:
        return torch.arange(4.0) + 10 * rank

    def two() -> list[Tensor]:
        return [torch.zeros(4), torch.zeros(4)]

    for options in ((), (op,), (op, later)):
        call("allreduce", one(), *options)
        call("allreduce", [one()], *options)
    call("allreduce", one(), op=op)
    call("allreduce", [one()], dist.AllreduceOptions())
    call("allreduce_coalesced", [one(), one()])
    for rest in ((1,), (1, later)):
        call("broadcast", one(), *rest)
        call("reduce", one(), 1, op, *rest[1:], at=1)
        call("gather", two() if rank == 1 else [], one(), *rest)
        call("scatter", one(), two() if rank == 1 else [], *rest)
    call("broadcast", one(), root=1)
    call("broadcast", [one()])
    call("reduce", [one()], at=0)
    for rest in ((), (later,)):
        call("allgather", two(), one(), *rest)
        call("reduce_scatter", one(), [one(), one() + 1], op, *rest)
        call("alltoall_base", one(), one(), [], [], *rest)
        call("barrier", *rest)
    call("allgather", [two()], [one()])
    call("_allgather_base", torch.zeros(8), one())
    call("allgather_into_tensor_coalesced", [torch.zeros(8)], [one()])
    call("reduce_scatter", [one()], [[one(), one()]])
    call("_reduce_scatter_base", torch.zeros(2), one(), dist.ReduceScatterOptions())
    call("gather", [two()] if rank == 0 else [], [one()])
    call("scatter", [one()], [two()] if rank == 0 else [])
    call("alltoall_base", torch.zeros(4), one(), *([[3, 1]] * 2 if rank else [[1, 3]] * 2))
    call("recv" if rank else "send", [one()], 1 - rank, 5)
    return found


def test_the_forms_of_torch_s_c_plus_plus_class_give_what_gloo_gives() -> None:
    torch.testing.assert_close(run(forms), run_gloo(forms, 2))


MANY: dict[str, Callable[[list[Tensor], int], object]] = {
    "all_reduce": lambda two, _: group().allreduce(two),
    "broadcast": lambda two, _: group().broadcast(two),
    "reduce": lambda two, _: group().reduce(two, dist.ReduceOptions()),
    "all_gather": lambda two, _: group().allgather([two, two], two),
    "gather": lambda two, _: group().gather([two, two], two, dist.GatherOptions()),
    "scatter": lambda two, _: group().scatter(two, [two, two], dist.ScatterOptions()),
    "reduce_scatter": lambda two, _: group().reduce_scatter(two, [two, two]),
    "send": lambda two, rank: group().send(two, 1 - rank, 0),
    "recv": lambda two, rank: group().recv(two, 1 - rank, 0),
}


def group() -> Any:
    return dist.group.WORLD


@pytest.mark.parametrize("name", MANY)
def test_a_list_of_several_tensors_is_refused_before_anything_is_sent(name: str) -> None:
    def act(rank: int) -> None:
        words = rf"rank {rank}: {name}: it takes one tensor a call, not a list of 2: call it for"
        with pytest.raises(RuntimeError, match=words):
            MANY[name]([torch.zeros(2), torch.zeros(2)], rank)
        dist.all_reduce(torch.zeros(2))

    run(act)


# Operators and modes of torch's ----------------------------------------------------------------


def test_functional_operators_with_memory_for_their_results_give_what_gloo_gives() -> None:
    """All that torch has, which Inductor's passes put into programs."""

    def act(rank: int) -> dict[str, list[float]]:
        ops: Any = torch.ops._c10d_functional
        name = group().group_name
        given = torch.arange(4.0) + rank
        calls: dict[str, Callable[[], Tensor]] = {
            "all_gather_into_tensor_out": lambda: ops.all_gather_into_tensor_out(
                given, 2, name, out=torch.empty(8)
            ),
            "reduce_scatter_tensor_out": lambda: ops.reduce_scatter_tensor_out(
                given, "sum", 2, name, out=torch.empty(2)
            ),
        }
        known = {op.split("::")[1] for op in torch._C._dispatch_get_all_op_names()}
        return {
            name: ops.wait_tensor(call()).tolist() for name, call in calls.items() if name in known
        }

    assert run(act) == run_gloo(act, 2)


COUNTED: dict[str, Callable[[int, Tensor], object]] = {
    "all_reduce": lambda _, tensor: dist.all_reduce(tensor),
    "async": lambda _, tensor: dist.all_reduce(tensor, async_op=True).wait(),
    "broadcast": lambda _, tensor: dist.broadcast(tensor, 0),
    "reduce": lambda _, tensor: dist.reduce(tensor, 0),
    "all_gather": lambda _, tensor: dist.all_gather(list(torch.empty(2, 4)), tensor),
    "in one": lambda _, tensor: dist.all_gather_into_tensor(torch.empty(8), tensor),
    "gather": lambda rank, tensor: dist.gather(tensor, None if rank else list(torch.ones(2, 4))),
    "scatter": lambda rank, tensor: dist.scatter(tensor, None if rank else [tensor, tensor]),
    "reduce_scatter": lambda _, tensor: dist.reduce_scatter_tensor(torch.empty(2), tensor),
    "all_to_all": lambda _, tensor: dist.all_to_all_single(torch.empty(4), tensor),
    "barrier": lambda *_: dist.barrier(),
    "functional": lambda _, tensor: functional.all_reduce(tensor, "sum", group()).sum(),
    "DTensor": lambda _, tensor: distribute_tensor(
        tensor, init_device_mesh("cpu", (2,)), [Shard(0)]
    ).full_tensor(),
}


def test_comm_debug_mode_counts_what_it_counts_with_gloo() -> None:
    def act(rank: int) -> dict[str, dict[str, int]]:
        found = {}
        for name, call in COUNTED.items():
            with CommDebugMode() as mode:
                call(rank, torch.ones(4))
            found[name] = {str(op): count for op, count in mode.get_comm_counts().items()}
        assert "c10d_functional" in mode.generate_comm_debug_tracing_table(noise_level=3)
        return found

    assert run(act) == run_gloo(act, 2)


# The profiler ----------------------------------------------------------------------------------

PROFILED: dict[str, tuple[list[list[int]], Callable[[], object]]] = {
    "all_reduce": ([[2, 3]], lambda: dist.all_reduce(torch.ones(2, 3))),
    "broadcast": ([[4]], lambda: dist.broadcast(torch.ones(4), 0, async_op=True).wait()),
    "all_gather": (
        [[2], [2], [2]],
        lambda: dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2)),
    ),
    "barrier": ([], dist.barrier),
}


def test_a_profiler_shows_each_call_with_its_shapes() -> None:
    def act(rank: int) -> dict[str, list[list[int]]]:
        with profile(record_shapes=True) if rank == 0 else nullcontext() as profiler:
            for _, call in PROFILED.values():
                call()
        if rank == 1:
            return {}
        return {
            event.name.removeprefix("phalanx:"): event.input_shapes
            for event in profiler.function_events
            if event.name.startswith("phalanx:")
        }

    found, _ = run(act)
    assert found == {name: shapes for name, (shapes, _) in PROFILED.items()}


def test_the_table_of_the_docs_has_every_function_as_its_tests_say() -> None:
    page = Path(__file__).parents[2] / "docs" / "torch-backend.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `dist.")]
    works = [f"| `dist.{name}` | works | works | works |" for name in CHECKS]
    refused = [f"| `dist.{name}` | refused." for name in REFUSALS]
    assert [row for row in rows if row in works] == works
    assert [start for start in refused if any(row.startswith(start) for row in rows)] == refused
