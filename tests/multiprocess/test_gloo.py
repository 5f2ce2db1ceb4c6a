"""Backends over torch's Gloo, with ranks that are processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_job
from ranks import run_ranks
from test_training import alone, train_on_my_rows

from phalanx import Backend, GlooBackend, PeerLostError, all_reduce

SCRIPT = """
import torch, torch.distributed as dist, phalanx
backend = phalanx.init("gloo")
assert type(backend).__name__ == "GlooBackend", backend
total = phalanx.all_reduce(torch.full((3,), backend.rank + 1.0), backend)
assert total.tolist() == [3.0] * 3
dist.init_process_group("gloo")
with phalanx.TorchBackend(timeout=30) as over_torchs:
    assert phalanx.all_reduce(torch.ones(2), over_torchs).tolist() == [2.0, 2.0]
    assert phalanx.all_gather_object(backend.rank, over_torchs.subgroup([0, 1])) == [0, 1]
dist.destroy_process_group()
backend.barrier()
print("rank", backend.rank, "is done", flush=True)
"""  # that no rank closes the first backend is part of it


# Whichever notices first says so: Gloo, or the mesh beside it.
KILLED = "rank 1 was lost: "


def train_and_die_in_a_collective(backend: Backend) -> None:
    for theirs, expected in zip(train_on_my_rows(backend), alone(), strict=True):
        torch.testing.assert_close(torch.tensor(theirs), torch.tensor(expected))

    def twice() -> None:  # the other rank may still be in the first when this one is killed
        all_reduce(torch.ones(10), backend, timeout=20)
        if backend.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce(torch.ones(10), backend, timeout=20)

    with pytest.raises(PeerLostError, match=KILLED) as info:
        twice()
    assert info.value.peer == 1


def gloo(rank: int, world_size: int, address: str, **options: Any) -> GlooBackend:
    """Gloo's ranks have neither a token nor a heartbeat."""
    known = {name: options[name] for name in ("timeout", "listener")}
    return GlooBackend(rank, world_size, address, **known)


def test_ranks_over_gloo_train_like_one_and_name_the_one_that_is_killed() -> None:
    outcomes = run_ranks(train_and_die_in_a_collective, 2, kind=gloo)
    assert outcomes == [("returned", None), ("died", -signal.SIGKILL)]


def test_a_launched_script_has_gloo_by_itself_and_over_torchs_process_group(
    tmp_path: Path,
) -> None:
    program = tmp_path / "script.py"
    program.write_text(SCRIPT)
    for rank, ended in enumerate(run_job([str(program)], 2)):
        assert ended.returncode == 0, ended.stderr
        assert f"rank {rank} is done" in ended.stdout
