"""Checkpoints of torch's (DCP): torch reads what is exported, and what it wrote is imported."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import assert_same, cut_like, state_of
from conversions import allocations, save, silent, trained
from flat_shards import FlatShards
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import phalanx
from phalanx import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    MisuseError,
    load_checkpoint,
    save_checkpoint,
)
from phalanx.checkpoint.stored import Exported, open_checkpoint
from phalanx.checkpoint.tensor_files import BLOCK
from phalanx.ops.interop.dcp_export import export_dcp
from phalanx.ops.interop.dcp_import import Imported, import_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def export(runs: Path, out: Path, **options: Any) -> Exported:
    return export_dcp(open_checkpoint(runs), out, begin=silent, **options)


def import_(source: Path, runs: Path, **options: Any) -> Imported:
    return import_dcp(source, runs, **({"trust_pickle": True, "begin": silent} | options))


def loaded_by_torch(out: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained(seed=5, steps=0)
    states = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": states[0], "optimizer": states[1]}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return model, optimizer


def loaded(runs: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained(seed=5, steps=1)
    load_checkpoint(runs, model=model, optimizer=optimizer)
    return model, optimizer


def saved_by_torch(out: Path, *, flatten: bool = False, **more: Any) -> None:
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    states = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": states[0], "optimizer": states[1], **more}, checkpoint_id=out, no_dist=True)


# Export


@pytest.mark.parametrize("ranks", [1, 3])
def test_torch_loads_what_was_exported_bit_for_bit(folder: Path, ranks: int) -> None:
    save(folder / "runs", ranks)
    exported = export(folder / "runs", folder / "out")
    assert sum(path.stat().st_size for path in (folder / "out").iterdir()) == exported.nbytes
    assert_same(state_of(*loaded_by_torch(folder / "out")), state_of(*trained()))


def test_what_is_exported_has_the_entries_that_torch_would_have_written(folder: Path) -> None:
    save(folder / "runs", 2)
    export(folder / "runs", folder / "out")
    saved_by_torch(folder / "theirs", step=2)
    ours, theirs = (
        dcp.FileSystemReader(folder / name).read_metadata() for name in ("out", "theirs")
    )
    assert ours.planner_data == theirs.planner_data
    assert ours.state_dict_metadata == theirs.state_dict_metadata


def test_step_and_extra_are_there_too(folder: Path) -> None:
    save(folder / "runs", 2, extra={"epoch": 3, "means": torch.arange(3)})
    export(folder / "runs", folder / "out")
    state: dict[str, Any] = {"step": 0, "extra": {"epoch": 0, "means": torch.zeros(3).long()}}
    dcp.load(state, checkpoint_id=folder / "out", no_dist=True)
    assert state["step"] == 2
    assert state["extra"]["epoch"] == 3
    assert state["extra"]["means"].tolist() == [0, 1, 2]


def test_model_only_leaves_the_optimizer_out(folder: Path) -> None:
    save(folder / "runs", 2, extra=1)
    export(folder / "runs", folder / "out", model_only=True)
    keys = dcp.FileSystemReader(folder / "out").read_metadata().state_dict_metadata
    assert {key.partition(".")[0] for key in keys} == {"model", "step"}


def test_no_more_is_held_than_the_largest_tensor_or_64_mib_of_smaller_ones(folder: Path) -> None:
    model = nn.Module()
    for number, mib in enumerate((40, 80, 30, 30, 30)):
        model.register_buffer(f"of{number}", torch.full((mib << 20,), number, dtype=torch.uint8))
    save_checkpoint(folder / "runs", model=model, step=1)
    with allocations() as allocated:
        exported = export(folder / "runs", folder / "out")
    assert allocated.tensors == 80 << 20
    assert allocated.python < BLOCK + (2 << 20)
    assert len(list((folder / "out").glob("*.distcp"))) == 4
    assert exported.files == sorted(path.name for path in (folder / "out").iterdir())
    state = {"model": {name: torch.empty_like(b) for name, b in model.named_buffers()}}
    dcp.load(state, checkpoint_id=folder / "out", no_dist=True)
    for name, buffer in model.named_buffers():
        assert torch.equal(state["model"][name], buffer)


def test_state_that_belongs_to_shards_is_named(folder: Path) -> None:
    def run(backend: phalanx.Backend) -> None:
        model = FlatShards(nn.Linear(4, 4), backend)
        optimizer = torch.optim.SGD(model.parameters())
        for parameter in model.parameters():
            optimizer.state[parameter]["rows"] = torch.ones(3)
        save_checkpoint(folder / "runs", model=model, optimizer=optimizer, step=1)

    phalanx.simulate(run, 2)
    with pytest.raises(CheckpointMismatchError, match=r"belongs to shards of it \(0:8, 8:16\)"):
        export(folder / "runs", folder / "out")
    assert [path.name for path in folder.iterdir()] == ["runs"]
    export(folder / "runs", folder / "out", model_only=True)


def test_a_damaged_checkpoint_is_not_exported(folder: Path) -> None:
    save(folder / "runs", 2)
    path = next((folder / "runs").rglob("state-00001*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match="state-00001-of-00002"):
        export(folder / "runs", folder / "out")
    assert [path.name for path in folder.iterdir()] == ["runs"]


# Import


@pytest.mark.parametrize("flatten", [False, True])
def test_what_torch_has_saved_loads_after_an_import_bit_for_bit(
    folder: Path, flatten: bool
) -> None:
    saved_by_torch(folder / "x.dcp", flatten=flatten, step=2)
    imported = import_(folder / "x.dcp", folder / "runs")
    assert imported.step == 2
    assert imported.notes == ["tied, since they are equal: head.weight = embed.weight"]
    assert_same(state_of(*loaded(folder / "runs")), state_of(*trained()))


def test_there_and_back_is_the_same(folder: Path) -> None:
    extra = {"epoch": 3, "nested": [1, {"x": torch.ones(2)}], "none": None, "pair": (1, 2.5)}
    save(folder / "runs", 3, extra=extra)
    export(folder / "runs", folder / "out")
    import_(folder / "out", folder / "back")
    assert_same(state_of(*loaded(folder / "back")), state_of(*trained()))
    found = load_checkpoint(folder / "back")
    assert found.step == 2
    assert repr(found.extra) == repr(extra)


def test_an_import_loads_on_any_number_of_ranks(folder: Path) -> None:
    saved_by_torch(folder / "x.dcp", step=2)
    import_(folder / "x.dcp", folder / "runs")
    expected = state_of(*trained())

    def load(backend: phalanx.Backend) -> None:
        model = FlatShards(trained(seed=5, steps=0)[0], backend)
        optimizer = torch.optim.AdamW(model.parameters())
        load_checkpoint(folder / "runs", model=model, optimizer=optimizer)
        assert_same(state_of(model, optimizer), cut_like(model, expected))

    phalanx.simulate(load, 3)


def test_a_pickle_is_not_read_without_trust_and_the_error_says_why(folder: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return (Path.touch, (folder / "harm",))

    source = folder / "x.dcp"
    source.mkdir()
    (source / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(MisuseError, match=r"is a pickle.* runs whatever code.*--trust-pickle"):
        import_(source, folder / "runs", trust_pickle=False)
    assert not (folder / "harm").exists()
    with pytest.raises(CheckpointDamagedError, match=r"\.metadata cannot be read"):
        import_(source, folder / "runs")
    assert (folder / "harm").exists()  # which is why


def test_values_are_read_without_running_what_is_in_them(folder: Path) -> None:
    saved_by_torch(folder / "x.dcp", step=2, odd=Path("x"), fine={"a": 1})
    imported = import_(folder / "x.dcp", folder / "runs")
    assert "left out" in imported.notes[0]
    assert "odd cannot be read: UnpicklingError" in imported.notes[0]
    assert load_checkpoint(folder / "runs").extra == {"fine": {"a": 1}}


def test_a_model_at_the_top_is_found_although_its_names_begin_with_model(folder: Path) -> None:
    model = nn.ModuleDict({"model": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    dcp.save(model.state_dict(), checkpoint_id=folder / "x.dcp", no_dist=True)
    import_(folder / "x.dcp", folder / "runs", step=7)
    other = nn.ModuleDict({"model": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    assert load_checkpoint(folder / "runs", model=other).step == 7
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


def test_a_model_elsewhere_is_found_by_its_key(folder: Path) -> None:
    model = nn.Linear(2, 2)
    state = {"nets": {"a": model.state_dict()}}
    dcp.save(state, checkpoint_id=folder / "x.dcp", no_dist=True)
    with pytest.raises(CheckpointMismatchError, match="it has nets"):
        import_(folder / "x.dcp", folder / "runs", step=1)
    with pytest.raises(MisuseError, match=r"has nothing under nets\.b"):
        import_(folder / "x.dcp", folder / "runs", step=1, model="nets.b")
    import_(folder / "x.dcp", folder / "runs", step=1, model="nets.a")
    load_checkpoint(folder / "runs", model=nn.Linear(2, 2))


def test_a_step_has_to_be_there_or_given(folder: Path) -> None:
    saved_by_torch(folder / "x.dcp")
    with pytest.raises(MisuseError, match="does not say of which step it is: give --step"):
        import_(folder / "x.dcp", folder / "runs")
    with pytest.raises(MisuseError, match="step must be 0 or more, not -1"):
        import_(folder / "x.dcp", folder / "runs", step=-1)
    assert not (folder / "runs").exists()
    assert import_(folder / "x.dcp", folder / "runs", step=4).step == 4


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "NAdam", "Adafactor", "RMSprop"])
def test_the_optimizers_class_is_known_by_its_options(folder: Path, kind: str) -> None:
    model = nn.Linear(3, 4)
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optim": get_optimizer_state_dict(model, optimizer),
        "step": 1,
    }
    dcp.save(state, checkpoint_id=folder / "x.dcp", no_dist=True)
    import_(folder / "x.dcp", folder / "runs")
    other = nn.Linear(3, 4)
    another = getattr(torch.optim, kind)(other.parameters(), **options)
    load_checkpoint(folder / "runs", model=other, optimizer=another)
    assert_same(state_of(other, another), state_of(model, optimizer))


def test_an_optimizer_of_another_kind_is_named_by_the_caller(folder: Path) -> None:
    model, optimizer = trained()
    states = get_state_dict(model, optimizer)
    states[1]["param_groups"][0]["rho"] = 1
    dcp.save(
        {"model": states[0], "optimizer": states[1]}, checkpoint_id=folder / "x.dcp", no_dist=True
    )
    with pytest.raises(MisuseError, match=r"which optimizer has the options .*rho.*\?"):
        import_(folder / "x.dcp", folder / "runs", step=1)
    import_(folder / "x.dcp", folder / "runs", step=1, optimizer_class="AdamW")
    loaded(folder / "runs")
    dcp.save({"model": states[0]}, checkpoint_id=folder / "y.dcp", no_dist=True)
    with pytest.raises(MisuseError, match="no optimizer was found: say with --optimizer where"):
        import_(folder / "y.dcp", folder / "runs", step=1, optimizer_class="AdamW")


def test_an_optimizer_without_names_does_not_fit(folder: Path) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder / "x.dcp", no_dist=True)
    with pytest.raises(CheckpointMismatchError, match=r"optimizer.state.0.step does not fit"):
        import_(folder / "x.dcp", folder / "runs", step=1)
    assert not (folder / "runs").exists()


def test_equal_layers_that_are_trained_apart_are_not_taken_for_tied(folder: Path) -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    model.load_state_dict({**model.state_dict(), "1.weight": model[0].weight.detach().clone()})
    optimizer = torch.optim.SGD(model.parameters())
    states = get_state_dict(model, optimizer)
    dcp.save(
        {"model": states[0], "optimizer": states[1], "step": 1},
        checkpoint_id=folder / "x.dcp",
        no_dist=True,
    )
    assert import_(folder / "x.dcp", folder / "runs").notes == []


@pytest.mark.parametrize("what", ["removed", "truncated"])
def test_a_damaged_file_is_named_and_no_checkpoint_is_there(folder: Path, what: str) -> None:
    saved_by_torch(folder / "x.dcp", step=1)
    path = folder / "x.dcp" / "__0_0.distcp"
    if what == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(CheckpointDamagedError, match=r"x\.dcp"):
        import_(folder / "x.dcp", folder / "runs")
    with pytest.raises(CheckpointNotFoundError):
        load_checkpoint(folder / "runs")


def test_a_missing_chunk_is_named(folder: Path) -> None:
    saved_by_torch(folder / "x.dcp", step=1)
    file = folder / "x.dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["model.layers.3.weight"].chunks.clear()
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointDamagedError, match=r"of model.layers.3.weight .* is missing"):
        import_(folder / "x.dcp", folder / "runs")


def test_a_save_that_did_not_end_is_not_found(folder: Path) -> None:
    saved_by_torch(folder / "x.dcp", step=1)
    (folder / "x.dcp" / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"which torch's dcp\.save writes last"):
        import_(folder / "x.dcp", folder / "runs", trust_pickle=False)
