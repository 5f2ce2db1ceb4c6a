"""Layers that are cut over ranks: each part has a checkpoint of its own, and parts never meet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx import (
    DDP,
    FSDP,
    Backend,
    CheckpointMismatchError,
    DeviceMesh,
    load_checkpoint,
    parallelize,
    save_checkpoint,
    simulate,
)
from phalanx.tensor import full_state_dict

AXES = ("data", "tensor")


def cut(mesh: DeviceMesh, seed: int = 0) -> nn.Module:
    """Parts of equal shapes on every rank."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    return parallelize(model, mesh["tensor"], {"0": "column", "1": "row"})


@pytest.mark.parametrize("wrap", [DDP, FSDP])
def test_ranks_with_the_same_part_save_and_load_together(wrap: Any, tmp_path: Path):
    def run(backend: Backend) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        mesh = DeviceMesh(backend, (2, 2), AXES)
        folder = tmp_path / f"tensor{mesh['tensor'].rank}"
        saved, loaded = (wrap(cut(mesh, seed), mesh["data"]) for seed in (0, 1))
        save_checkpoint(folder, model=saved, step=1)
        load_checkpoint(folder, model=loaded)
        return full_state_dict(saved), full_state_dict(loaded)

    for before, after in simulate(run, 4):
        assert list(before) == list(after)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_model_that_is_not_wrapped_is_saved_by_each_rank_for_itself(tmp_path: Path):
    def run(backend: Backend) -> None:
        mesh = DeviceMesh(backend, (1, 2), AXES)
        folder = tmp_path / f"tensor{backend.rank}"
        model = cut(mesh)
        save_checkpoint(folder, model=model, step=1)
        load_checkpoint(folder, model=model)

    simulate(run, 2)


WRONG: dict[str, Callable[[Backend, DeviceMesh], dict[str, Any]]] = {
    "all ranks together": lambda world, mesh: {"model": cut(mesh), "backend": world},
    "those that share layers": lambda _, mesh: {"model": cut(mesh), "backend": mesh["tensor"]},
    "all ranks, wrapped": lambda world, mesh: {
        "model": DDP(cut(mesh), mesh["data"]),
        "backend": world,
    },
    "one folder": lambda _, mesh: {"model": DDP(cut(mesh), mesh["data"])},
    "one folder, alone": lambda _, mesh: {"model": cut(mesh)},
}


@pytest.mark.parametrize("case", WRONG)
def test_parts_that_would_meet_are_refused_on_every_rank(case: str, tmp_path: Path):
    def run(backend: Backend) -> None:
        options = WRONG[case](backend, DeviceMesh(backend, (2, 2), AXES))
        with pytest.raises(CheckpointMismatchError, match="a folder for each part"):
            save_checkpoint(tmp_path, step=1, **options)
        with pytest.raises(CheckpointMismatchError, match=r"load_checkpoint: .* share .*0 has"):
            load_checkpoint(tmp_path, **options)

    simulate(run, 4)
    assert not list(tmp_path.iterdir())
