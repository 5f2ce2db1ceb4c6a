"""Conversions that are killed, fail, or run twice at a time: the whole result is there, or none."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import killed_conversions
import pytest
from conversions import save, silent
from file_operations import failing, in_a_process_that_may_fork, recorded, watched

from phalanx import CheckpointError, CheckpointIOError
from phalanx.checkpoint.group import CheckpointGroup
from phalanx.checkpoint.stored import open_checkpoint
from phalanx.ops.interop.dcp_export import export_dcp
from phalanx.ops.interop.hugging_face import export_hugging_face


def export_hf(folder: Path) -> None:
    export_hugging_face(
        open_checkpoint(folder / "runs"), folder / "out", shard_size=400, begin=silent
    )


def export_torch(folder: Path) -> None:
    export_dcp(open_checkpoint(folder / "runs"), folder / "out", begin=silent)


def test_a_conversion_that_is_killed_leaves_the_whole_result_or_none(folder: Path) -> None:
    """Real kills: in a call, or in the middle of a write, torch's own included."""
    found = in_a_process_that_may_fork(killed_conversions.check_all, folder, 1)
    assert sum("killed at" in line for line in found) == 3


@pytest.mark.parametrize(("convert", "step"), [(export_hf, 5), (export_torch, 50)])
def test_an_error_at_any_call_names_the_file_and_leaves_nothing(
    folder: Path, convert: Callable[[Path], None], step: int
) -> None:
    save(folder / "runs", 2)
    with recorded(str(folder)) as operations:
        convert(folder)
    whole = {path.name for path in (folder / "out").iterdir()}
    failed = 0
    for number in range(0, len(operations), step):
        for path in (folder / "out").iterdir() if (folder / "out").exists() else ():
            path.unlink()
        with watched(str(folder), failing(number, errno.EIO, str(folder))):
            try:
                CheckpointGroup(None, "export", None).on_all(lambda: convert(folder))
            except CheckpointIOError as error:
                assert error.errno == errno.EIO  # noqa: PT017 - it may end well, too
                assert str(folder) in str(error)  # noqa: PT017
                failed += 1
        out = folder / "out"
        found = {path.name for path in out.iterdir()} if out.exists() else set()
        assert found in (set(), whole)
    assert failed > len(operations) / step / 2


def test_two_conversions_into_one_folder_do_not_meet(folder: Path) -> None:
    save(folder / "runs", 1)
    unfinished = folder / ".out.unfinished"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_text("left over, or of the other one")
    descriptor = os.open(unfinished, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match="is being written by another process"):
        export_hf(folder)
    assert (unfinished / "model.safetensors").exists()
    os.close(descriptor)
    export_hf(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["out", "runs"]
