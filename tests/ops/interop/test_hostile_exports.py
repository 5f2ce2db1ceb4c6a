"""What somebody else has put where an export belongs; the long form is `make attack`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoint_runs import small
from processes import run_python
from test_hostile_files import untouched
from typer.testing import CliRunner

from phalanx import CheckpointError, CheckpointIOError, save_checkpoint
from phalanx.cli.app import app

ATTACKS = Path(__file__).parents[2] / "attacks" / "files.py"


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_an_export_neither_follows_a_link_nor_removes_files_that_are_not_its_own(
    folder: Path, victim: Path, kind: str
) -> None:
    save_checkpoint(folder / "runs", model=small(), step=1)
    words = ["checkpoint", "export", str(folder / "runs"), str(folder / "out"), "--format", kind]
    unfinished = folder / ".out.unfinished"
    unfinished.symlink_to(victim)
    ended = CliRunner().invoke(app, words)
    assert isinstance(ended.exception, CheckpointIOError)
    assert f"{unfinished}: it is a link" in str(ended.exception)
    assert untouched(victim)
    unfinished.unlink()
    victim.rename(unfinished)
    ended = CliRunner().invoke(app, words)
    assert isinstance(ended.exception, CheckpointError)
    assert f"{unfinished} has keys, which no export has left there" in str(ended.exception)
    assert untouched(unfinished)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_an_export_does_not_write_into_a_strangers_folder(folder: Path) -> None:
    save_checkpoint(folder / "runs", model=small(), step=1)
    (folder / ".out.unfinished").mkdir()
    os.chown(folder / ".out.unfinished", 54321, 54321)
    words = ["checkpoint", "export", str(folder / "runs"), str(folder / "out"), "--format", "hf"]
    assert "belongs to user 54321" in str(CliRunner().invoke(app, words).exception)


def test_the_short_form_of_the_attacks_finds_nothing() -> None:
    ended = run_python([str(ATTACKS), "--short"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
