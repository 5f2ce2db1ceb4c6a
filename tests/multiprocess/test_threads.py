"""Ranks whose threads have no cores of their own do not wait for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import phalanx
from phalanx import Backend


def threads_started(backend: Backend) -> tuple[int, int]:
    """By an all_reduce of 16 MiB, and by torch's own sum of as much."""

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    tensor = torch.empty(4 << 20)
    phalanx.all_reduce_(tensor[:1], backend)
    before = threads()
    phalanx.all_reduce_(tensor, backend)
    between = threads()
    torch.add(tensor, tensor, out=tensor)
    return between - before, threads() - between


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="shows no threads")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="torch starts no thread with one core")
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_more_threads_than_cores_are_not_used_to_reduce(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(2 * (os.cpu_count() or 1)))
    for ours, torchs in phalanx.spawn(threads_started, 3, backend):
        assert ours == 0
        assert torchs > 0
