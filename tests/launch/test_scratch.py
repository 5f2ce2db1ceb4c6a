from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from phalanx.errors import BackendUnavailableError
from phalanx.launch.scratch import scratch_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_there_for_a_while_and_its_owners_alone(temporary: Path) -> None:
    with scratch_folder() as folder:
        assert Path(folder).parent == temporary
        assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert list(temporary.iterdir()) == []


def test_the_folders_of_launchers_that_live_are_left_alone() -> None:
    with scratch_folder() as first, scratch_folder() as second:
        assert Path(first).is_dir()
        assert Path(second).is_dir()


def hold_a_folder(folder: str, pipe: Connection) -> None:
    import tempfile

    tempfile.tempdir = folder
    with scratch_folder() as held:
        pipe.send(held)
        signal.pause()


def test_the_folder_of_a_launcher_that_was_killed_is_removed_by_the_next(temporary: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    owner = context.Process(target=hold_a_folder, args=(str(temporary), theirs))
    owner.start()
    left = Path(ours.recv())
    owner.kill()
    owner.join()
    assert left.is_dir()
    (left / "more").mkdir()
    with scratch_folder():
        assert not left.exists()


def test_what_is_no_launchers_is_left_alone(temporary: Path) -> None:
    (temporary / "phalanx-of-mine").mkdir()
    (temporary / "phalanx-file").touch()
    with scratch_folder():
        pass
    assert sorted(path.name for path in temporary.iterdir()) == ["phalanx-file", "phalanx-of-mine"]


def test_no_room_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(temporary / "missing"))
    with (
        pytest.raises(BackendUnavailableError, match="set TMPDIR to a folder"),
        scratch_folder(),
    ):
        os.abort()
