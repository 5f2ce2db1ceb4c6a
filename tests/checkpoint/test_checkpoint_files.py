"""What is on disk: files that others can read, and a folder in which others may keep theirs."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import (
    Mixed,
    adamw,
    assert_same,
    load_plain,
    plain_after,
    save_sharded,
    small,
    state_of,
    trained,
)
from file_operations import Operation, recorded, watched
from flat_shards import FlatShards
from safetensors import safe_open
from safetensors.torch import load_file

import phalanx
from phalanx import (
    DDP,
    Backend,
    CheckpointError,
    CheckpointIOError,
    chunk_ranges,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from phalanx.checkpoint.manifest import Manifest, decode
from phalanx.checkpoint.tensor_files import BLOCK


def tensors_of(checkpoint: Path, kind: str) -> dict[str, torch.Tensor]:
    """All tensors in the files of a kind; each is in one of them."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint.glob(f"{kind}-*.safetensors")):
        tensors = load_file(path)
        assert not tensors.keys() & found.keys()
        found |= tensors
    return found


def test_plain_safetensors_tools_read_whole_tensors_under_their_names(folder: Path) -> None:
    def save(backend: Backend) -> None:
        model = DDP(Mixed(), backend)
        save_checkpoint(folder, model=model, optimizer=trained(model), step=2)

    phalanx.simulate(save, 3)
    checkpoint = folder / "000001-step-2"
    model = tensors_of(checkpoint, "model")
    whole = {key: value for key, value in plain_after(2).items() if isinstance(value, torch.Tensor)}
    waves = model.pop("waves")  # complex numbers, which the format does not have
    assert torch.equal(torch.view_as_complex(waves), whole.pop("model.waves"))
    assert model.keys() == {key.removeprefix("model.") for key in whole if key.startswith("model.")}
    for name, tensor in model.items():
        assert tensor.shape == whole[f"model.{name}"].shape
        assert tensor.dtype == whole[f"model.{name}"].dtype
        assert torch.equal(tensor, whole[f"model.{name}"])
    state = tensors_of(checkpoint, "state")
    average = state["optimizer/body.0.weight/exp_avg"]
    assert torch.equal(average, whole["optimizer.body.0.weight.exp_avg"])


def test_a_part_says_of_what_it_is_one(folder: Path) -> None:
    phalanx.simulate(save_sharded(folder, 1), 2)
    flat = plain_after(1)["model.body.0.weight"].reshape(-1)
    reached = 0
    for path in sorted((folder / "000001-step-1").glob("model-*")):
        with safe_open(path, "pt") as file:
            parts = json.loads(file.metadata()["phalanx.parts"])
            part = parts["body.0.weight"]
            assert part["shape"] == [5, 3]
            assert part["start"] == reached
            assert torch.equal(file.get_tensor("body.0.weight"), flat[reached : part["stop"]])
            reached = part["stop"]
    assert reached == 15


def test_what_all_ranks_have_is_written_once_and_by_all_about_as_much(folder: Path) -> None:
    def save(backend: Backend) -> None:
        torch.manual_seed(0)
        model = DDP(torch.nn.Sequential(*(torch.nn.Linear(60, 60) for _ in range(20))), backend)
        save_checkpoint(folder, model=model, optimizer=trained(model), step=2)

    phalanx.simulate(save, 4)
    sizes = Counter[str]()
    for path in (folder / "000001-step-2").glob("*.safetensors"):
        sizes[path.name.split("-")[1]] += path.stat().st_size
    assert len(sizes) == 4
    elements = 3 * 20 * 60 * 61 * 4
    assert sum(sizes.values()) < 1.1 * elements
    assert max(sizes.values()) < 1.1 * min(sizes.values())


def test_a_rank_reads_only_the_blocks_that_it_has_something_in(folder: Path) -> None:
    elements = 10 * BLOCK // 4

    def make() -> torch.nn.Module:
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.arange(elements, dtype=torch.float32))
        return model

    def save(backend: Backend) -> None:
        save_checkpoint(folder, model=FlatShards(make(), backend), step=1)

    def load(backend: Backend) -> None:
        model = FlatShards(make(), backend)
        part = dict(model.named_parameters())["weight"]
        with torch.no_grad():
            part.zero_()
        load_checkpoint(folder, model=model)
        start, stop = chunk_ranges(elements, 5)[backend.rank]
        assert torch.equal(part, torch.arange(start, stop, dtype=torch.float32))

    phalanx.simulate(save, 3)
    with recorded(str(folder)) as operations:
        phalanx.simulate(load, 5)
    reads = sum(operation.name == "preadv" for operation in operations)
    random_states = 5
    assert 10 < reads - random_states <= 10 + 3 + 2 * 4  # each file's last block, each cut twice


def test_every_save_is_a_new_folder_and_the_last_few_are_kept(folder: Path) -> None:
    for step in (5, 6, 6, 3):
        save_checkpoint(folder, model=small(), step=step, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".phalanx-lock",
        "000003-step-6",
        "000004-step-3",
    ]
    assert load_checkpoint(folder).step == 3  # the newest, not the one of the highest step
    assert load_checkpoint(folder, step=6).folder.name == "000003-step-6"
    assert load_checkpoint(folder / "000003-step-6").step == 6
    save_checkpoint(folder, model=small(), step=7, keep=None)
    assert len(list(folder.iterdir())) == 4


def test_what_others_keep_in_the_folder_stays(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "000009-step-best").mkdir()
    (folder / "000001-step-1.bak").mkdir()
    elsewhere = save_checkpoint(folder / "elsewhere", model=small(), step=8).folder
    (folder / "000000-step-8").symlink_to(elsewhere)
    (folder / "000001-step-1.bak" / "commit.json").write_text("{}")
    save_checkpoint(folder, model=small(), step=1, keep=1)
    inside = folder / "000001-step-1" / "loss.png"
    inside.write_text("mine, too")
    for step in (2, 3):
        save_checkpoint(folder, model=small(), step=step, keep=1)
    assert (folder / "notes.txt").read_text() == "mine"
    assert inside.read_text() == "mine, too"
    assert [path.name for path in inside.parent.iterdir()] == ["loss.png"]
    assert (folder / "000009-step-best").is_dir()
    assert load_checkpoint(elsewhere, model=small()).step == 8
    assert (folder / "000001-step-1.bak" / "commit.json").exists()
    assert latest_checkpoint(folder) == folder / "000003-step-3"


def test_the_folder_and_those_around_it_are_made(folder: Path) -> None:
    save_checkpoint(folder / "runs" / "a", model=small(), step=1)
    assert load_checkpoint(folder / "runs" / "a").step == 1


def test_a_folder_that_is_relative_is_one_of_the_moment_of_the_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    pending = save_checkpoint("here", model=small(), step=1, async_save=True)
    monkeypatch.chdir("/")
    assert pending.wait() == folder / "here" / "000001-step-1"


def test_ranks_without_a_common_file_system_are_told_which(folder: Path) -> None:
    def save(backend: Backend) -> str:
        mine = folder / f"host{backend.rank // 2}"
        mine.mkdir(exist_ok=True)
        with pytest.raises(CheckpointIOError) as caught:
            save_checkpoint(mine, model=FlatShards(small(), backend), step=1)
        return str(caught.value)

    texts = phalanx.simulate(save, 4)
    assert len(set(texts)) == 1
    assert "rank 2: " in texts[0]
    assert "cannot be seen from here" in texts[0]
    assert not any(path.is_dir() for path in folder.glob("host*/*"))


def test_ranks_that_do_not_see_a_checkpoint_are_told_which(folder: Path) -> None:
    save_checkpoint(folder, model=small(), step=1)

    def load(backend: Backend) -> None:
        where = folder if backend.rank != 1 else folder / "elsewhere"
        load_checkpoint(where, model=FlatShards(small(), backend))

    with pytest.raises(CheckpointError, match=r"rank 1: .*elsewhere.* is missing"):
        phalanx.simulate(load, 2)


def test_two_jobs_do_not_save_into_one_folder_at_once(folder: Path) -> None:
    save_checkpoint(folder, model=small(), step=1)

    def say_by_whom(operation: Operation) -> None:
        if operation.path.endswith("manifest.json"):
            with pytest.raises(CheckpointError, match=rf"saved into by process {os.getpid()} on"):
                save_checkpoint(folder, model=small(), step=2, timeout=0.1)
            raise InterruptedError

    with watched(str(folder), say_by_whom), pytest.raises(CheckpointError):
        save_checkpoint(folder, model=small(), step=2)
    with (folder / ".phalanx-lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="saved into by somebody else"):
            save_checkpoint(folder, model=small(), step=2, timeout=0.1)
    assert (folder / ".phalanx-lock").read_bytes() == b""
    save_checkpoint(folder, model=small(), step=3)
    assert [path.name for path in sorted(folder.iterdir())] == [
        ".phalanx-lock",
        "000001-step-1",
        "000002-step-3",
    ]


def test_jobs_that_share_a_folder_take_turns(folder: Path) -> None:
    def save(step: int) -> None:
        save_checkpoint(folder, model=small(), step=step, keep=None)

    threads = [threading.Thread(target=save, args=(step,)) for step in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step in range(6):
        assert load_checkpoint(folder, model=small(), step=step).step == step


def test_the_extra_comes_back_with_its_types(folder: Path) -> None:
    model = small()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    extra: Any = {
        "none": None,
        "numbers": [1, 2**70, -(2**64), 0.1, float("inf"), True],
        "tuple": (1, ("a", b"\x00\xff")),
        3: "three",
        "$tuple": {"$int": "no"},
        "schedule": schedule.state_dict(),
        "tensors": [torch.arange(4), torch.tensor(1.5, dtype=torch.float16), torch.empty(0)],
    }
    save_checkpoint(folder, model=model, step=1, extra=extra)
    loaded = load_checkpoint(folder).extra
    tensors, expected = loaded.pop("tensors"), extra.pop("tensors")
    assert loaded == {**extra, "schedule": {**extra["schedule"], "milestones": {2: 2, 5: 1}}}
    assert isinstance(loaded["tuple"], tuple)
    assert loaded["numbers"][-1] is True
    for one, other in zip(tensors, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    schedule.load_state_dict(loaded["schedule"])


def test_the_manifest_says_what_is_there(folder: Path) -> None:
    phalanx.simulate(save_sharded(folder, 1), 2)
    path = folder / "000001-step-1" / "manifest.json"
    manifest = decode(path.read_bytes(), Manifest, str(path))
    assert (manifest.step, manifest.world_size) == (1, 2)
    assert manifest.aliases == {"head.weight": "embed.weight"}
    on_disk = {each.name for each in path.parent.glob("*.safetensors")}
    assert {file.name for file in manifest.files} == on_disk
    weight = manifest.model["body.0.weight"]
    assert (weight.dtype, weight.shape) == ("float32", (5, 3))
    assert [(piece.start, piece.stop) for piece in weight.pieces] == [(0, 7), (7, 15)]
    assert manifest.optimizer is not None
    assert manifest.optimizer.groups[0].options["lr"] == 0.1
    assert manifest.optimizer.state["scale"]["step"].value == {"$tensor": "optimizer/scale/step"}


def test_a_loaded_state_is_the_optimizers_own(folder: Path) -> None:
    """Not memory that something else writes, too."""
    model = Mixed()
    save_checkpoint(folder, model=model, optimizer=trained(model), step=2)
    fresh = Mixed(seed=1)
    optimizer = adamw(fresh)
    load_checkpoint(folder, model=fresh, optimizer=optimizer)
    memory = [
        value.data_ptr()
        for state in optimizer.state.values()
        for value in state.values()
        if value.numel()
    ]
    assert len(set(memory)) == len(memory)
    assert_same(state_of(fresh, optimizer), load_plain(folder))


def test_tensors_whose_names_would_be_the_same_are_kept_apart(folder: Path) -> None:
    extra = {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2), "a.b'": torch.full((2,), 3.0)}
    save_checkpoint(folder, model=small(), step=1, extra=extra)
    loaded = load_checkpoint(folder).extra
    assert loaded["a"]["b"].tolist() == [1, 1]
    assert loaded["a.b"].tolist() == [0, 0]
    assert loaded["a.b'"].tolist() == [3, 3]
