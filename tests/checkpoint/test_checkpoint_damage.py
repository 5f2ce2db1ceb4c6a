"""A file that is not as it was written is named and refused, and nothing is changed."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
from checkpoint_runs import (
    Mixed,
    adamw,
    assert_same,
    load_plain,
    plain_after,
    save_sharded,
    small,
    state_of,
)
from file_operations import Operation, watched
from flat_shards import FlatShards
from xxhash import xxh3_64_hexdigest

import phalanx
from phalanx import (
    Backend,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    PeerLostError,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from phalanx.checkpoint.group import CheckpointGroup
from phalanx.checkpoint.storage import committed
from phalanx.checkpoint.storage import remove as remove_checkpoint

FILES = ["commit.json", "manifest.json", "model-00001-of-00002.safetensors"]
FILES += ["state-00000-of-00002.safetensors"]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


@pytest.fixture
def two(folder: Path) -> Path:
    """A folder with checkpoints of step 1 and, newer, step 2."""
    for steps in (1, 2):
        phalanx.simulate(save_sharded(folder, steps), 2)
    return folder


@pytest.mark.parametrize("damage", [truncate, empty, lengthen, alter, remove])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_named_and_the_previous_checkpoint_offered(
    name: str, damage: object, two: Path
) -> None:
    path = two / "000002-step-2" / name
    damage(path)  # type: ignore[operator]
    if name == "commit.json" and damage is remove:
        assert latest_checkpoint(two) == two / "000001-step-1"  # it is none any more
        return

    def load(backend: Backend) -> str:
        model = FlatShards(Mixed(seed=3), backend)
        optimizer = adamw(model)
        before = state_of(model, optimizer)
        with pytest.raises(CheckpointDamagedError) as caught:
            load_checkpoint(two, model=model, optimizer=optimizer)
        assert_same(state_of(model, optimizer), before)
        return str(caught.value)

    texts = phalanx.simulate(load, 2)
    assert len(set(texts)) == 1
    assert str(path) in texts[0]
    offered = re.search(r'load_checkpoint\("(.*)", ...\)', texts[0])
    assert offered is not None
    assert_same(load_plain(Path(offered[1])), plain_after(1))


def test_every_byte_of_a_tensor_counts(folder: Path) -> None:
    save_checkpoint(folder, model=Mixed(), step=1)
    (path,) = folder.glob("*/model-*")
    content = path.read_bytes()
    for place in range(0, len(content), 41):
        path.write_bytes(content[:place] + bytes([content[place] ^ 128]) + content[place + 1 :])
        with pytest.raises(CheckpointDamagedError, match="not as it was written"):
            load_checkpoint(folder, model=Mixed())


def test_every_byte_of_the_records_counts(folder: Path) -> None:
    save_checkpoint(folder, model=small(), step=1)
    for name, stride in (("commit.json", 1), ("manifest.json", 37)):
        path = folder / "000001-step-1" / name
        content = path.read_bytes()
        for place in range(0, len(content), stride):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(CheckpointDamagedError):
                load_checkpoint(folder, model=small())
        path.write_bytes(content)
    load_checkpoint(folder, model=small())


def test_a_damaged_checkpoint_without_another_says_so(folder: Path) -> None:
    save_checkpoint(folder, model=Mixed(), step=1)
    remove(folder / "000001-step-1" / "manifest.json")
    with pytest.raises(CheckpointDamagedError, match="No other checkpoint"):
        load_checkpoint(folder, model=Mixed())


def test_another_damaged_checkpoint_is_not_offered(folder: Path) -> None:
    for step in range(3):
        save_checkpoint(folder, model=Mixed(), step=step)
    truncate(folder / "000003-step-2" / "manifest.json")
    truncate(folder / "000002-step-1" / "model-00000-of-00001.safetensors")
    with pytest.raises(CheckpointDamagedError, match="previous checkpoint, of step 0,"):
        load_checkpoint(folder, model=Mixed())


def test_a_rank_needs_no_file_that_it_has_no_part_in(folder: Path) -> None:
    """What it does not read it cannot check, and need not: rank 0 of 2 reads the first half."""
    phalanx.simulate(save_sharded(folder, 1), 4)
    alter(folder / "000001-step-1" / "model-00003-of-00004.safetensors")

    def load(backend: Backend) -> None:
        model = FlatShards(Mixed(), backend, shards=4)
        load_checkpoint(folder, model=model)

    with pytest.raises(CheckpointDamagedError, match="model-00003"):
        phalanx.simulate(load, 4)
    load_checkpoint(folder)  # the step and the extra only


CUTS = '"cuts": {"x": {"dim": 0, "total": 4, "runs": [[[0, 2]], [[2, 4]]], "rank": 1}}'


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"version": 1', '"version": 2', "of version 2"),
        ('"format": "phalanx checkpoint"', '"format": "another"', "another"),
        ('"name": "model-', '"name": "../model-', "no file of a checkpoint is named"),
        ('"block": 4194304', '"block": 0', "blocks of 0 bytes"),
        ('"block": 4194304', '"block": 134217728', "blocks of 134217728 bytes"),
        ('"dtype": "float64"', '"dtype": "float65"', "float65"),
        ('"world_size": 1', '"world_size": 2', "random states"),
        ('"shape": [', '"shape": [9,', "has no elements from"),
        ('"step": 7', '"step": "7"', "Expected `int`"),
        ('"extra": null', f'"extra": null, {CUTS}', "x cannot be part 1 of 2"),
        ('"extra": null', '"extra": {"$int": 7}', "cannot be read: "),
        ('"extra": null', '"extra": {"$tensor": "rng/1"}', "does not say where rng/1 is"),
        ('"shared": {}', '"shared": 7', "it has int in place of a dict"),
        ('"options": {', '"options": {"$tuple": []}, "o": {', "it has tuple in place of a dict"),
    ],
)
def test_a_manifest_from_a_stranger_is_only_data(
    old: str, new: str, problem: str, folder: Path
) -> None:
    model = Mixed()
    save_checkpoint(folder, model=model, optimizer=adamw(model), step=7)
    manifest = folder / "000001-step-7" / "manifest.json"
    assert old in manifest.read_text()
    content = manifest.read_text().replace(old, new, 1).encode()
    manifest.write_bytes(content)
    commit = folder / "000001-step-7" / "commit.json"
    record = {**json.loads(commit.read_text()), "bytes": len(content)}
    record["xxh3"] = xxh3_64_hexdigest(content)
    commit.write_text(json.dumps(record, indent=1))
    other = Mixed(1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointDamagedError, match=problem):
        load_checkpoint(folder, model=other, optimizer=adamw(other))
    assert_same(other.state_dict(), before)


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_called_damaged_only(
    folder: Path,
) -> None:
    save_checkpoint(folder, model=Mixed(), step=1)

    def hook(operation: Operation) -> None:
        if operation.name == "open" and operation.path.endswith(".safetensors"):
            for each in committed(str(folder)):
                remove_checkpoint(each)

    with watched(str(folder), hook), pytest.raises(CheckpointDamagedError, match="was removed"):
        load_checkpoint(folder, model=Mixed())


def test_no_checkpoint_is_not_found(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load_checkpoint(folder / "none", model=Mixed())
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint in"):
        load_checkpoint(folder, model=Mixed())
    save_checkpoint(folder, model=Mixed(), step=3)
    with pytest.raises(CheckpointNotFoundError, match=r"of step 4 .* those of steps 3"):
        load_checkpoint(folder, model=Mixed(), step=4)
    assert latest_checkpoint(folder / "none") is None


def test_errors_are_told_alike_on_every_rank(two: Path) -> None:
    """Only one rank reads the damaged part."""
    alter(two / "000002-step-2" / "model-00001-of-00002.safetensors")

    def load(backend: Backend) -> tuple[str, object]:
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(two, model=FlatShards(Mixed(), backend))
        return str(caught.value), caught.value.peer

    outcomes = phalanx.simulate(load, 2)
    assert outcomes[0] == outcomes[1]
    assert "rank 1: " in outcomes[0][0]
    assert outcomes[0][1] == 1


def test_a_rank_that_fails_while_another_dies_says_what_failed_here() -> None:
    def run(backend: Backend) -> str:
        if backend.rank == 0:
            backend.abort()
            return ""

        def attempt() -> None:
            raise OSError(errno.ENOSPC, "No space left on device", "a/file")

        with pytest.raises(PeerLostError) as caught:
            CheckpointGroup(backend, "save_checkpoint", 20.0).on_all(attempt)
        return repr(caught.value.__cause__)

    assert "No space left" in phalanx.simulate(run, 2)[1]
