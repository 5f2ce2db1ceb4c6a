"""Makes examples/ importable, as it is for a script in it; and one thread does the arithmetic."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


@pytest.fixture(autouse=True, scope="module")
def _one_thread_a_rank() -> Iterator[None]:
    """These models are tiny, and threads that wait for each other take time from other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
