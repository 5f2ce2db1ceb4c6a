"""Phalanx under a real Slurm: two nodes with two ranks each (slurm_cluster.py)."""

from __future__ import annotations

import re
import stat
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from slurm_cluster import (
    SlurmCluster,
    kill,
    parent,
    processes,
    slurm_cluster,
    until,
    variables,
    why_not,
)

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

PROGRAM = Path(__file__).with_name("slurm_program.py")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


SUM = """
import os, socket, sys
import torch
import phalanx

backend = phalanx.init(timeout=120)
rank = torch.tensor([backend.rank])
total = phalanx.all_reduce(rank, backend).item()
hosts = len(set(backend.topology))
line = f"rank {backend.rank} on {socket.gethostname()}: sum {total}, {hosts} hosts"
print(line, len(os.environ["PHALANX_TOKEN"]))
"""


def test_srun_needs_no_exports_and_leaves_no_token(slurm: SlurmCluster) -> None:
    said = slurm.ask("srun", "-N2", "-n4", sys.executable, "-c", SUM)
    nodes = ["n1", "n1", "n2", "n2"]
    expected = [f"rank {rank} on {node}: sum 6, 2 hosts 64" for rank, node in enumerate(nodes)]
    assert sorted(re.findall(r"^rank .*", said, flags=re.MULTILINE)) == expected, said
    assert not list(slurm.home.glob(".phalanx-token*"))


def test_two_steps_run_side_by_side_and_do_not_meet(slurm: SlurmCluster) -> None:
    """Each on two ranks, one of each node, under one job."""
    step = 'srun --overlap -N2 -n2 "$0" -c "$1" &'
    script = f"{step} {step} wait"
    said = slurm.ask("salloc", "-N2", "-n4", "bash", "-c", script, sys.executable, SUM)
    assert len(re.findall(r"rank [01] on n[12]: sum 1, 2 hosts", said)) == 4, said


STOCK = """
import os, socket
import torch
import torch.distributed as dist

dist.init_process_group("phalanx")
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item()}")
dist.destroy_process_group()
"""


def test_a_job_of_a_stock_program_has_a_folder_a_token_and_a_log_a_rank(
    slurm: SlurmCluster,
) -> None:
    (slurm.home / "stock.py").write_text(STOCK)
    script = slurm.phalanx("slurm", "--nodes", "2", "-n", "2", "--dry-run", "stock.py")
    assert not (slurm.home / "phalanx-stock-1").exists()
    number, folder = submit(slurm, "--time", "1:00:00", "--partition", "all", "stock.py")
    assert folder == slurm.home / "phalanx-stock-1"
    added = "#SBATCH --time=1:00:00\n#SBATCH --partition=all\n"
    assert (folder / "job.sh").read_text().replace(added, "").strip() == script
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    ended = slurm.wait_for(number, "COMPLETED", "FAILED", "TIMEOUT")
    assert ended["ExitCode"] == "0:0", (folder / "job.log").read_text()
    for rank in range(4):
        assert (folder / f"rank-{rank}.log").read_text().endswith(f"rank {rank} of 4: 6\n")
    assert not (folder / "token").exists()


# As docs/clusters.md has it.
EXPORTS = "export MASTER_ADDR=$(hostname) MASTER_PORT=29500"
AS_RANK = "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec"


def test_a_stock_program_runs_under_plain_srun_with_what_torch_asks_for(
    slurm: SlurmCluster,
) -> None:
    (slurm.home / "plain.py").write_text(STOCK)
    script = f"{EXPORTS}; srun bash -c '{AS_RANK} {sys.executable} plain.py'"
    said = slurm.ask("salloc", "-N2", "-n4", "bash", "-c", script)
    assert sorted(re.findall(r"rank \d of 4: 6", said)) == [f"rank {n} of 4: 6" for n in range(4)]


def submit(slurm: SlurmCluster, *words: str) -> tuple[str, Path]:
    """Return the number of a job of 2 x 2 ranks, and its folder."""
    said = slurm.phalanx("slurm", "--nodes", "2", "-n", "2", *words)
    found = re.fullmatch(r"Submitted batch job (\d+); its folder: (.*)", said)
    assert found is not None, said
    return found[1], Path(found[2])


def train(slurm: SlurmCluster, name: str) -> tuple[str, Path]:
    """A job that trains until it is told to end, when all its ranks do."""
    number, folder = submit(slurm, str(PROGRAM), str(slurm.home / name))
    logs = [folder / f"rank-{rank}.log" for rank in range(4)]

    def trains() -> bool:
        texts = [log.read_text() if log.exists() else "" for log in logs]
        assert slurm.job(number)["JobState"] in ("PENDING", "RUNNING"), "\n".join(texts)
        return all("trains from 0" in text for text in texts)

    until(trains, f"the ranks of job {number} train")
    return number, folder


def test_a_job_that_ends_with_75_is_put_back_and_goes_on_from_its_checkpoint(
    slurm: SlurmCluster,
) -> None:
    number, folder = train(slurm, "requeued")
    slurm.ask("scancel", "--signal=TERM", number)  # to its steps, as --signal does
    ended = slurm.wait_for(number, "COMPLETED", "FAILED", "CANCELLED")
    log = (folder / "job.log").read_text()
    assert (ended["ExitCode"], ended["Restarts"]) == ("0:0", "1"), log
    assert "start 0: the ranks ended with exit code 75" in log
    assert "start 1: the ranks ended with exit code 0" in log
    texts = [(folder / f"rank-{rank}.log").read_text() for rank in range(4)]
    (step,) = {int(each) for text in texts for each in re.findall(r"saved at step (\d+)", text)}
    assert step > 0
    for rank, text in enumerate(texts):
        lines = text.splitlines()
        assert f"rank {rank} of 4 trains from 0" in lines
        assert f"rank {rank} of 4 trains from {step}" in lines
        assert lines[-1] == f"start 1 ends at step {step + 3} with {step + 3:g}"


def test_a_job_that_is_cancelled_stays_cancelled_and_leaves_no_process(
    slurm: SlurmCluster,
) -> None:
    number, _ = train(slurm, "cancelled")
    ranks = partial(ranks_of, slurm, "cancelled")
    assert len(ranks()) == 4
    slurm.ask("scancel", number)
    until(lambda: not ranks(), "no rank is left")
    assert slurm.wait_for(number, "CANCELLED")["Restarts"] == "0"


def test_a_killed_slurmstepd_leaves_no_process(slurm: SlurmCluster) -> None:
    number, folder = train(slurm, "killed")
    ranks = partial(ranks_of, slurm, "killed")
    (slurmstepd,) = {parent(pid) for pid in ranks() if variables(pid)["SLURM_NODEID"] == "1"}
    kill(slurmstepd)
    until(lambda: not ranks(), "no rank is left")
    for rank in (0, 1):  # those of the other node say whom they have lost
        text = (folder / f"rank-{rank}.log").read_text()
        assert re.search(r"PeerLostError: .*rank [23]", text), text
    slurm.ask("scancel", number)  # srun would wait for its other node for some minutes
    slurm.wait_for(number, "FAILED", "NODE_FAIL", "CANCELLED")


def ranks_of(slurm: SlurmCluster, name: str) -> list[int]:
    """The processes that train with checkpoints in that folder."""
    return processes(sys.executable, str(PROGRAM), str(slurm.home / name))
