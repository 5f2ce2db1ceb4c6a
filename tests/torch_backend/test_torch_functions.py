"""The functions of torch.distributed, each in its forms: see torch_functions.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch_functions import CHECKS, REFUSALS
from worlds import run


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


def test_the_table_of_the_docs_has_every_function_as_its_tests_say() -> None:
    page = Path(__file__).parents[2] / "docs" / "torch-backend.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `dist.")]
    works = [f"| `dist.{name}` | works | works | works |" for name in CHECKS]
    refused = [f"| `dist.{name}` | refused." for name in REFUSALS]
    assert [row for row in rows if row in works] == works
    assert [start for start in refused if any(row.startswith(start) for row in rows)] == refused
