"""The examples of tensor parallelism and of a mesh: short, and the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import device_mesh
import pytest
import tensor_parallel
import torch
from torch import Tensor

from phalanx import Backend, simulate

EXAMPLES = Path(__file__).parents[2] / "examples"
Result = tuple[list[float], dict[str, Tensor]]
TRAIN: dict[str, Callable[..., Result]] = {
    "tensor_parallel": tensor_parallel.train,
    "device_mesh": device_mesh.train,
}


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("tensor_parallel", 2, {}),
        ("tensor_parallel", 3, {}),
        ("device_mesh", 4, {"data": 2}),
        ("device_mesh", 6, {"data": 2}),
    ],
)
def test_an_example_trains_as_it_does_on_one_rank(
    name: str, ranks: int, options: dict[str, Any]
) -> None:
    def run(backend: Backend) -> Result:
        return TRAIN[name](backend, steps=5, **(options if backend.world_size > 1 else one))

    one = {"data": 1} if options else {}
    ((losses, state),) = simulate(run, 1)
    assert losses[-1] < losses[0]
    for found, whole in simulate(run, ranks):
        assert found == pytest.approx(losses, rel=1e-3)
        for key, value in state.items():
            torch.testing.assert_close(whole[key], value, rtol=1e-3, atol=1e-4)


def test_the_mesh_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    simulate(lambda backend: device_mesh.train(backend, steps=1), 4)
    assert capsys.readouterr().out.count("DeviceMesh(data=2, tensor=2), rank 0 at (0, 0)") == 1


@pytest.mark.parametrize("name", TRAIN)
def test_an_example_is_at_most_60_lines_long(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60
