"""Ranks whose threads have no cores of their own do not wait for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import beside, run_ranks

import phalanx
from phalanx import Backend, SharedMemoryBackend, TcpBackend


def threads_started(tcp: Backend) -> tuple[int, int, int]:
    """By an all_reduce of 16 MiB, in two ways, and by torch's own sum of as much."""

    def started_by(act: Callable[[], object]) -> int:
        before = threads()
        act()
        return threads() - before

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    torch.set_num_threads(2 * (os.cpu_count() or 1))
    tensor = torch.empty(4 << 20)
    with beside(tcp, SharedMemoryBackend) as shm:
        for backend in (tcp, shm):
            phalanx.all_reduce_(tensor[:1], backend)
        return (
            started_by(lambda: phalanx.all_reduce_(tensor, tcp)),
            started_by(lambda: phalanx.all_reduce_(tensor, shm)),
            started_by(lambda: torch.add(tensor, tensor, out=tensor)),
        )


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="shows no threads")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="torch starts no thread with one core")
def test_more_threads_than_cores_are_not_used_to_reduce() -> None:
    for how, started in run_ranks(threads_started, 3, kind=TcpBackend):
        assert how == "returned", started
        over_tcp, in_shared_memory, torchs = started
        assert (over_tcp, in_shared_memory) == (0, 0)
        assert torchs > 0
