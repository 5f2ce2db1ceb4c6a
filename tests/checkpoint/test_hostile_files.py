"""What somebody else has put where a checkpoint's files belong; the long form is `make attack`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import small
from torch import nn
from xxhash import xxh3_64_hexdigest

from phalanx import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointIOError,
    MisuseError,
    load_checkpoint,
    save_checkpoint,
)

FILES = ["commit.json", "manifest.json", "model-00000-of-00001.safetensors"]


def untouched(victim: Path) -> bool:
    return {path.name: path.read_text() for path in victim.iterdir()} == {
        "keys": "my only key",
        "manifest.json": "mine",
    }


def with_manifest(checkpoint: Path, text: str) -> None:
    """Make this the manifest, and the commit record one that vouches for it."""
    (checkpoint / "manifest.json").write_text(text)
    commit = json.loads((checkpoint / "commit.json").read_text())
    commit |= {"bytes": len(text.encode()), "xxh3": xxh3_64_hexdigest(text.encode())}
    (checkpoint / "commit.json").write_text(json.dumps(commit, indent=1))


def changed(folder: Path, **fields: Any) -> None:
    """A checkpoint in `folder`, of whose manifest these fields are changed."""
    checkpoint = Path(save_checkpoint(folder, model=small(), step=1).wait())
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    with_manifest(checkpoint, json.dumps({**manifest, **fields}))


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_place_of_a_file_is_named_and_not_waited_for(folder: Path, name: str) -> None:
    path = Path(save_checkpoint(folder, model=small(), step=1).wait()) / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointIOError, match=f"{path}: it is no regular file"):
        load_checkpoint(folder, model=small())


@pytest.mark.parametrize("name", FILES)
def test_a_link_in_place_of_a_file_is_named_and_not_followed(folder: Path, name: str) -> None:
    path = Path(save_checkpoint(folder, model=small(), step=1).wait()) / name
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")
    with pytest.raises(CheckpointIOError, match=f"{path}: it is a link, which is not followed"):
        load_checkpoint(folder, model=small())


def test_a_link_to_a_checkpoint_is_followed_if_the_user_names_it_and_not_otherwise(
    folder: Path,
) -> None:
    runs, best = folder / "runs", folder / "best"
    best.symlink_to(save_checkpoint(folder / "elsewhere", model=small(), step=3).wait())
    assert load_checkpoint(best, model=small()).step == 3
    save_checkpoint(runs, model=small(), step=1)
    (runs / "000002-step-3").symlink_to(best)
    with pytest.raises(CheckpointError, match="000002-step-3 is a link"):
        load_checkpoint(runs, model=small())
    assert load_checkpoint(runs / "000002-step-3", model=small()).step == 3


def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_is_as_it_was(
    folder: Path, victim: Path
) -> None:
    save_checkpoint(folder / "runs", model=small(), step=1)
    lock = folder / "runs" / ".phalanx-lock"
    lock.unlink()
    lock.symlink_to(victim / "keys")
    with pytest.raises(CheckpointIOError, match=f"{lock}: it is a link"):
        save_checkpoint(folder / "runs", model=small(), step=2)
    assert untouched(victim)


def test_nothing_is_written_into_the_lock(folder: Path, victim: Path) -> None:
    """It may have a second name, or be another user's, in a folder that a group shares."""
    save_checkpoint(folder / "runs", model=small(), step=1)
    lock = folder / "runs" / ".phalanx-lock"
    lock.unlink()
    os.link(victim / "keys", lock)
    save_checkpoint(folder / "runs", model=small(), step=2)
    assert untouched(victim)


def test_what_a_save_removes_are_links_and_not_what_they_lead_to(
    folder: Path, victim: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = folder / "runs"
    save_checkpoint(runs, model=small(), step=1)
    left = runs / "000007-step-7"
    left.mkdir()
    for name in ("manifest.json", "begun"):
        (left / name).symlink_to(victim / "manifest.json")
    (runs / "000008-step-8").symlink_to(victim)
    save_checkpoint(runs, model=small(), step=2, keep=1)
    assert not left.exists()
    assert (runs / "000008-step-8").is_symlink()
    assert untouched(victim)
    assert not caplog.records


def test_values_do_not_ask_for_far_more_memory_than_the_files_have(folder: Path) -> None:
    extra = {"a": torch.ones(1 << 18)}
    checkpoint = Path(save_checkpoint(folder, model=small(), step=1, extra=extra).wait())
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    with_manifest(checkpoint, json.dumps({**manifest, "extra": [{"$tensor": "extra.a"}] * 900}))
    with pytest.raises(CheckpointDamagedError, match=r"refers too often to extra\.a"):
        load_checkpoint(folder, model=small())


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("[" * 200 + "]" * 200, "more than 100 levels"),
        (str(2**63), "more than 64 bits"),
        ("[" + '{"$tensor": "rng/0"}, ' * 2000 + "0]", "refers to tensors more often"),
        (json.dumps({"$dict": [[{"$int": hex(i * (2**61 - 1))}, 0] for i in range(200)]}), "keys"),
    ],
)
def test_a_value_that_is_slow_or_large_is_refused(folder: Path, value: str, problem: str) -> None:
    checkpoint = Path(save_checkpoint(folder, model=small(), step=1, extra="HERE").wait())
    text = (checkpoint / "manifest.json").read_text()
    with_manifest(checkpoint, text.replace('"HERE"', value))
    with pytest.raises(CheckpointDamagedError, match=f"{checkpoint}.*{problem}"):
        load_checkpoint(folder, model=small())


@pytest.mark.parametrize(
    ("shape", "pieces", "problem"),
    [
        ([1] * 65, [], "length <= 64"),
        ([2**63], [], "Expected `int` <= "),
        ([0, 2**62, 2**62], [], "of shape"),
        ([8], [[0, 0, 0, 4], [0, 8, 4, 8]], "are in two tensors"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(
    folder: Path, shape: list[int], pieces: list[Any], problem: str
) -> None:
    changed(folder, model={"\x1b[2Jw": {"dtype": "float32", "shape": shape, "pieces": pieces}})
    with pytest.raises(CheckpointDamagedError, match=problem) as caught:
        load_checkpoint(folder, model=nn.Linear(1, 1))
    assert str(caught.value).isprintable()


def test_many_tensors_and_one_many_times_are_kept(folder: Path) -> None:
    tensor = torch.ones(1)
    extra = [tensor] * 1500 + [torch.full((1,), float(i)) for i in range(1500)]
    save_checkpoint(folder, model=small(), step=1, extra=extra)
    assert torch.cat(load_checkpoint(folder).extra).equal(torch.cat(extra))


def test_a_manifest_that_would_not_be_read_is_not_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.checkpoint.manifest.MOST_BYTES", 10_000)
    with pytest.raises(CheckpointError, match="keep long lists as tensors"):
        save_checkpoint(folder, model=small(), step=1, extra=[0] * 10_000)
    save_checkpoint(folder, model=small(), step=1)


def test_a_folder_whose_name_cannot_be_is_named() -> None:
    with pytest.raises((CheckpointError, MisuseError), match="runs"):
        load_checkpoint("runs\0x", model=small())
