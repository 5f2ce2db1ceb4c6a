"""Ranks that a real mpirun starts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from forms import sizes
from mpi_jobs import TESTS, needs_mpi, run_under_mpi
from processes import run_python
from test_training import alone

HERE = Path(__file__).parent


# Messages are the mesh's, which is that of the cluster "hybrid": the short form tries them there.
OF_MESSAGES = ("any_source", "any_source_leaving", "isend", "messages", "retries", "wait_any")


@needs_mpi
def test_the_conformance_suite_passes_on_ranks_of_mpi() -> None:
    conformance = sorted((TESTS / "backends").glob("test_conformance_*.py"))
    left_out = {f"test_conformance_{name}.py" for name in sizes(OF_MESSAGES, ())}
    # Those of memory that ranks have in common apply to none of MPI's groups.
    files = [
        str(path)
        for path in conformance
        if "_common" not in path.name and path.name not in left_out
    ]
    files.append(str(TESTS / "collectives" / "test_collectives_every_cluster.py"))
    files.append(str(TESTS / "mpi_collectives.py"))
    ended = run_under_mpi(
        4, str(TESTS / "mpi_ranks.py"), "-q", "-rs", "--color=no", *files, seconds=240
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    summary = re.search(r"(\d+) passed, (\d+) skipped", said)
    assert summary is not None, said
    passed, skipped = map(int, summary.groups())
    assert passed >= sizes(180, 200), said
    assert skipped <= 38, said  # each says why: see `Mpi.lacks` and `shared` in mpi_cluster.py


@needs_mpi
def test_a_script_under_mpirun_finds_its_ranks_and_trains_like_one_process() -> None:
    """As fresh processes; those of the other tests are forks."""
    words = [str(HERE / "mpi_training.py")]
    ended = run_under_mpi(2, *words, python=sys.executable, PYTHONPATH=_path(HERE, TESTS))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(ended.stdout)
    kinds = [kind for kind, _, _ in told["made"]]
    assert kinds[1:] == ["TcpBackend", "MpiBackend"]
    assert all(size == 2 and total == [2.0, 1.0] for _, size, total in told["made"])
    losses, weights = alone()
    assert told["trained"][0] == told["trained"][1], "bit for bit"
    for their_losses, their_weights in told["trained"]:
        torch.testing.assert_close(torch.tensor(their_losses), torch.tensor(losses))
        torch.testing.assert_close(torch.tensor(their_weights), torch.tensor(weights))


@needs_mpi
def test_when_a_rank_is_killed_mpirun_ends_the_job() -> None:
    ended = run_under_mpi(2, str(HERE / "mpi_death.py"))
    assert ended.returncode not in (0, 124), ended.stdout + ended.stderr
    assert "signal 9" in ended.stdout + ended.stderr


@needs_mpi
def test_a_process_that_mpirun_has_not_started_is_a_world_of_one() -> None:
    script = """if True:
        import torch
        from phalanx import MpiBackend, all_reduce
        with MpiBackend() as backend:
            print(backend.rank, backend.world_size, all_reduce(torch.ones(2), backend).tolist())
    """
    ended = run_python(["-c", script])
    assert (ended.returncode, ended.stdout) == (0, "0 1 [1.0, 1.0]\n"), ended.stderr


def _path(*folders: Path) -> str:
    return ":".join([*map(str, folders), *sys.path])
