"""A tensor-parallel model's checkpoints, one for each part, become one of whole tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import silent
from msgspec import structs
from safetensors.torch import load_file
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from phalanx import (
    FSDP,
    Backend,
    CheckpointDamagedError,
    CheckpointMismatchError,
    DeviceMesh,
    UnsupportedOperationError,
    load_pretrained,
    parallelize,
    save_checkpoint,
    simulate,
)
from phalanx.checkpoint.manifest import VERSION, Commit, decode_manifest, encode
from phalanx.checkpoint.stored import open_checkpoint
from phalanx.ops.interop.dcp_export import export_dcp
from phalanx.ops.interop.hugging_face import Exported, export_hugging_face
from phalanx.tensor import full_state_dict


def mlp(seed: int) -> nn.Sequential:
    """Seven features are cut unevenly."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4), nn.LayerNorm(4))


def saved(folder: Path, *, seed: int = 0, step: int = 1, ways: int = 1) -> dict[str, Tensor]:
    """Each of two parts saves itself, on `ways` ranks; the whole tensors."""

    def run(backend: Backend) -> dict[str, Tensor]:
        mesh = DeviceMesh(backend, (ways, 2), ("data", "tensor"))
        model: nn.Module = parallelize(mlp(seed), mesh["tensor"], {"0": "column", "2": "row"})
        if ways > 1:
            model = FSDP(model, mesh["data"])
        save_checkpoint(folder / str(mesh["tensor"].rank), model=model, step=step)
        return {name: tensor.clone() for name, tensor in full_state_dict(model).items()}

    return simulate(run, 2 * ways)[0]


def export(out: Path, first: Path, *parts: Path, **options: Any) -> Exported:
    others = [open_checkpoint(part) for part in parts]
    return export_hugging_face(open_checkpoint(first), out, parts=others, begin=silent, **options)


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_parts_become_whole_bit_for_bit(folder: Path, ways: int, order: tuple[int, int]) -> None:
    whole = saved(folder, ways=ways)
    exported = export(folder / "out", *(folder / str(part) for part in order))
    assert exported.notes == []
    found = load_file(folder / "out" / "model.safetensors")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    model, plain = mlp(5), mlp(0)
    load_pretrained(folder / "out", model)
    inputs = torch.randn(3, 4)
    assert torch.equal(model(inputs), plain(inputs))


@pytest.mark.parametrize("given", [("0",), ("1",), ("0", "0"), ("0", "1", "1")])
def test_parts_that_are_missing_or_there_twice_are_named(folder: Path, given: Any) -> None:
    saved(folder)
    with pytest.raises(CheckpointMismatchError, match=rf"cut into 2 parts.*is part {given[0]}"):
        export(folder / "out", *(folder / name for name in given))
    assert not (folder / "out").exists()


def test_parts_of_different_steps_are_refused(folder: Path) -> None:
    saved(folder / "a")
    saved(folder / "b", step=2)
    with pytest.raises(CheckpointMismatchError, match=r"of step 1 and .* of step 2"):
        export(folder / "out", folder / "a" / "0", folder / "b" / "1")


def test_what_is_whole_in_parts_and_differs_is_named(folder: Path) -> None:
    saved(folder / "a")
    saved(folder / "b", seed=1)
    exported = export(folder / "out", folder / "a" / "0", folder / "b" / "1")
    assert "other values: 2.bias. " in exported.notes[0]


def test_a_whole_model_has_no_other_part(folder: Path) -> None:
    save_checkpoint(folder / "a", model=mlp(0), step=1)
    with pytest.raises(CheckpointMismatchError, match="does not say that it is a part"):
        export(folder / "out", folder / "a", folder / "a")


def test_a_part_is_not_exported_to_torch(folder: Path) -> None:
    saved(folder)
    with pytest.raises(UnsupportedOperationError, match="--format hf writes the whole model"):
        export_dcp(open_checkpoint(folder / "0"), folder / "out", begin=silent)


BAD_CUTS = [
    {"rank": 2},
    {"dim": 1},
    {"total": 9},
    {"runs": (((0, 4),), ((5, 7),))},
    {"runs": (((0, 5),), ((5, 7),))},
    {"runs": (((0, 4),), ((3, 7),))},
]


@pytest.mark.parametrize("change", BAD_CUTS, ids=str)
def test_a_manifest_whose_parts_make_no_whole_is_not_believed(folder: Path, change: Any) -> None:
    saved(folder)
    path, manifest = open_checkpoint(folder / "0")
    bias = structs.replace(manifest.cuts["0.bias"], **change)
    content = encode(structs.replace(manifest, cuts={"0.bias": bias}))
    commit = Commit(VERSION, 1, len(content), xxh3_64_hexdigest(content))
    with pytest.raises(CheckpointDamagedError, match=r"makes no sense: 0.bias cannot be part"):
        decode_manifest(path, encode(commit), content)
