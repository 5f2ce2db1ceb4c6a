"""Backends over torch's Gloo, with ranks that are processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ports import unused_port
from test_training import alone, train_on_my_rows

from phalanx import Backend, PeerLostError, all_reduce, spawn

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


def test_ranks_over_gloo_train_like_one_and_name_the_one_that_is_killed() -> None:
    with pytest.raises(PeerLostError, match=r"rank 1 .*SIGKILL"):
        spawn(train_and_die_in_a_collective, 2, "gloo")


def test_a_launched_script_has_gloo_by_itself_and_over_torchs_process_group(
    tmp_path: Path,
) -> None:
    program = tmp_path / "script.py"
    program.write_text(SCRIPT)
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(unused_port()), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in ranks]
    for rank, (process, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert process.returncode == 0, output
        assert f"rank {rank} is done" in output
