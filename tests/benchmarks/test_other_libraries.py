"""`benchmarks/other_libraries.py`: further libraries, by the command line of `phalanx bench`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "other_libraries.py")


def run(folder: Path, *words: str, under: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    """The figures, and what is printed."""
    command = [*under, sys.executable, SCRIPT, *words, "--rounds", "1", "--json", "all.json"]
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "all.json").read_text()), ended.stdout


def test_other_libraries_are_measured_where_they_are_installed(tmp_path: Path) -> None:
    names = ("deepspeed", "mlx", "mpi", "nccl")
    found, printed = run(
        tmp_path, "all_reduce", "--backends", ",".join(("tcp", *names)), "--sizes", "64"
    )
    measured = {line["peer"] for line in found["lines"]}
    assert "tcp" in measured
    for name in names:
        reasons = [left["reason"] for left in found["left_out"] if left["peer"] == name]
        assert (name in measured) is (reasons == [])
        assert all(f"{name} is left out: {reason}" in printed for reason in reasons)
    assert "mpi is left out: MPI starts its own ranks: mpirun" in printed


def find_mpirun() -> str:
    beside = str(Path(sys.executable).parent)
    return shutil.which("mpirun", path=beside) or shutil.which("mpirun") or ""


@pytest.mark.skipif(not find_mpirun(), reason="there is no mpirun")
def test_mpi_is_measured_under_mpirun(tmp_path: Path) -> None:
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    mpirun = (find_mpirun(), *as_root, "--oversubscribe", "--bind-to", "none", "-n", "2")
    collectives = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
    backends = ("--backends", "phalanx-mpi,mpi", "--no-machine")
    found, _ = run(
        tmp_path,
        *(*collectives, "p2p", "barrier", *backends, "--sizes", "64", "--seconds", "0.0005"),
        under=mpirun,
    )
    measured = {(line["operation"], line["peer"]) for line in found["lines"]}
    for operation in (*collectives, "ping_pong", "stream", "barrier"):
        assert {(operation, "mpi"), (operation, "phalanx-mpi")} <= measured
    assert {line["wrong"] for line in found["lines"]} == {0}


def test_fully_shard_trains_in_memory_of_phalanx_s_group(tmp_path: Path) -> None:
    name = "stock+group-memory"
    found, _ = run(tmp_path, "fsdp", "--backends", name, "--width", "64", "--no-machine")
    reasons = [left["reason"] for left in found["left_out"]]
    wrong = {line["peer"]: line["wrong"] for line in found["lines"]}
    assert wrong == ({} if reasons else {name: 0})


def test_steps_without_communication_show_what_the_machine_can_do(tmp_path: Path) -> None:
    names = ("tcp", "alone+copies", "alone+fully_shard")
    found, _ = run(
        tmp_path, "ddp", "fsdp", "--backends", ",".join(names), "--width", "64", "--no-machine"
    )
    wrong = {(line["operation"], line["peer"]): line["wrong"] for line in found["lines"]}
    assert wrong == {
        ("ddp", "tcp"): 0,
        ("fsdp", "tcp"): 0,
        ("ddp", "alone+copies"): 0,
        ("fsdp", "alone+fully_shard"): None,  # nothing comes from other ranks
    }
