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
from processes import run_python
from warm_python import warm_python

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "other_libraries.py")


OTHERS = ("deepspeed", "mlx", "mpi", "nccl")
ALONE = ("alone+copies", "alone+fully_shard")
GROUP_MEMORY = "stock+group-memory"
Found = tuple[dict[str, Any], str]  # the figures, and what is printed


def words(*asked: str) -> list[str]:
    return [SCRIPT, *asked, "--sizes", "64", "--rounds", "1", "--json", "all.json", "--no-machine"]


def found_in(folder: Path, ended: subprocess.CompletedProcess[str]) -> Found:
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "all.json").read_text()), ended.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All of them, on two ranks."""
    folder = tmp_path_factory.mktemp("figures")
    backends = ("--backends", ",".join(("tcp", *OTHERS, *ALONE)))
    asked = words("all_reduce", "ddp", "fsdp", *backends, "--width", "64")
    return found_in(folder, run_python(asked, folder=folder, python=warm_python()))


def test_other_libraries_are_measured_where_they_are_installed(found: Found) -> None:
    figures, printed = found
    of_messages = ("", "all_reduce")
    measured = {line["peer"] for line in figures["lines"] if line["operation"] in of_messages}
    left_out = [left for left in figures["left_out"] if left["operation"] in of_messages]
    assert "tcp" in measured
    for name in OTHERS:
        reasons = [left["reason"] for left in left_out if left["peer"] == name]
        assert (name in measured) is (reasons == [])
        assert all(f"{name} is left out: {reason}" in printed for reason in reasons)
    assert "mpi is left out: MPI starts its own ranks: mpirun" in printed


def test_steps_without_communication_show_what_the_machine_can_do(found: Found) -> None:
    lines = [line for line in found[0]["lines"] if line["peer"] in ("tcp", *ALONE)]
    wrong = {(line["operation"], line["peer"]): line["wrong"] for line in lines}
    assert wrong == {
        ("all_reduce", "tcp"): 0,
        ("ddp", "tcp"): 0,
        ("fsdp", "tcp"): 0,
        ("ddp", "alone+copies"): 0,
        ("fsdp", "alone+fully_shard"): None,  # nothing comes from other ranks
    }


def test_fully_shard_trains_in_memory_of_phalanx_s_group(tmp_path: Path) -> None:
    """Not beside alone+fully_shard, over whose group torch would then gather the result."""
    asked = words("fsdp", "--backends", GROUP_MEMORY, "--width", "64")
    figures, _ = found_in(tmp_path, run_python(asked, folder=tmp_path, python=warm_python()))
    reasons = [left["reason"] for left in figures["left_out"]]
    wrong = {line["peer"]: line["wrong"] for line in figures["lines"]}
    assert wrong == ({} if reasons else {GROUP_MEMORY: 0})


def find_mpirun() -> str:
    beside = str(Path(sys.executable).parent)
    return shutil.which("mpirun", path=beside) or shutil.which("mpirun") or ""


@pytest.mark.skipif(not find_mpirun(), reason="there is no mpirun")
def test_mpi_is_measured_under_mpirun(tmp_path: Path) -> None:
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    mpirun = [find_mpirun(), *as_root, "--oversubscribe", "--bind-to", "none", "-n", "2"]
    collectives = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
    backends = ("--backends", "phalanx-mpi,mpi", "--seconds", "0.0005")
    ended = subprocess.run(
        [*mpirun, warm_python(), *words(*collectives, "p2p", "barrier", *backends)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    figures, _ = found_in(tmp_path, ended)
    measured = {(line["operation"], line["peer"]) for line in figures["lines"]}
    for operation in (*collectives, "ping_pong", "stream", "barrier"):
        assert {(operation, "mpi"), (operation, "phalanx-mpi")} <= measured
    assert {line["wrong"] for line in figures["lines"]} == {0}
