"""What is exported to DCP, torch's ranks read, also into a model that `fully_shard` has split."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from checkpoint_runs import assert_same, state_of
from conversions import save, silent, trained
from ranks import run_ranks
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from phalanx import Backend, load_checkpoint
from phalanx.checkpoint.stored import open_checkpoint
from phalanx.ops.interop.dcp_export import export_dcp
from phalanx.ops.interop.dcp_import import import_dcp


def through_torch(backend: Backend, folder: str) -> dict[str, Any]:
    """Load x.dcp into a split model; save it again, as ranks.dcp; the whole state that it has."""
    warnings.simplefilter("ignore")
    place = Path(folder)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place / 'store'}",
        rank=backend.rank,
        world_size=backend.world_size,
    )
    model, _ = trained(seed=5, steps=0)
    mesh = init_device_mesh("cpu", (backend.world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    parts = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": parts[0], "optimizer": parts[1], "step": 0}
    dcp.load(state, checkpoint_id=place / "x.dcp")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    parts = get_state_dict(model, optimizer)
    again = {"model": parts[0], "optimizer": parts[1], "step": state["step"]}
    dcp.save(again, checkpoint_id=place / "ranks.dcp")
    found = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).tolist()
        for name, value in model.state_dict().items()
    }
    dist.destroy_process_group()
    return found


def test_ranks_of_torch_read_an_export_and_an_import_reads_what_they_save(tmp_path: Path) -> None:
    save(tmp_path / "runs", 3)
    export_dcp(open_checkpoint(tmp_path / "runs"), tmp_path / "x.dcp", begin=silent)
    expected, optimizer = trained()
    for how, found in run_ranks(through_torch, 2, str(tmp_path)):
        assert how == "returned", found
        for name, tensor in expected.state_dict().items():
            assert found[name] == tensor.tolist(), name
    import_dcp(tmp_path / "ranks.dcp", tmp_path / "back", trust_pickle=True, begin=silent)
    model, other = trained(seed=5, steps=1)
    assert load_checkpoint(tmp_path / "back", model=model, optimizer=other).step == 2
    assert_same(state_of(model, other), state_of(expected, optimizer))
