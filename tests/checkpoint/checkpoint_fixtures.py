"""Small tensors and many ranks, and folders that cost nothing to fsync."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_runs import MEMORY


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def victim(folder: Path) -> Path:
    """A folder that has nothing to do with any checkpoint; nothing may happen to it."""
    elsewhere = folder / "victim"
    elsewhere.mkdir()
    (elsewhere / "keys").write_text("my only key")
    (elsewhere / "manifest.json").write_text("mine")
    return elsewhere
