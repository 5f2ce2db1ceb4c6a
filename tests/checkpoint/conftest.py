"""Small tensors and many ranks, and folders that cost nothing to fsync."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_a_rank() -> Iterator[None]:
    """More, inside torch's kernels, would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder, in memory if the system has such a place."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)
