from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import DistributedError, InvalidRankError, InvalidWorldSizeError, MisuseError
from phalanx.launch.environment import (
    ElasticJob,
    World,
    read_elastic_environment,
    read_environment,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
BY_HAND = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_PORT": "29500",
}
MPICH = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "3,2(x2),1",
    "SLURM_STEP_NODELIST": "node[003-005,9]",
    "SLURM_JOB_NODELIST": "node[001-005,9]",
    "MASTER_PORT": "29500",
}


def world(**changes: object) -> World:
    base = World(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        master_addr="node1",
        master_port=29500,
        restart_count=0,
        agent_store=False,
        source="environment",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


EXPECTED = {
    "torchrun": (
        TORCHRUN,
        world(
            rank=5,
            world_size=8,
            local_rank=1,
            local_world_size=4,
            restart_count=2,
            agent_store=True,
            source="torchrun",
            run_id="job7",
        ),
    ),
    "by hand": (
        BY_HAND,
        world(rank=1, world_size=2, local_rank=1, local_world_size=2, master_addr="127.0.0.1"),
    ),
    "open mpi": (
        OPEN_MPI,
        world(
            rank=3,
            world_size=4,
            local_rank=3,
            local_world_size=4,
            master_addr="127.0.0.1",
            source="mpirun",
        ),
    ),
    "mpich": (
        MPICH,
        world(rank=3, world_size=4, local_rank=1, local_world_size=2, source="mpirun"),
    ),
    "slurm": (
        SLURM,
        world(
            rank=6,
            world_size=8,
            local_rank=1,
            local_world_size=2,
            master_addr="node003",
            source="slurm",
            run_id="77.0",
        ),
    ),
}


@pytest.mark.parametrize("launcher", EXPECTED)
def test_each_launcher_is_read(launcher: str) -> None:
    environ, expected = EXPECTED[launcher]
    assert read_environment(environ) == expected


@pytest.mark.parametrize("inner", [MPICH, SLURM, OPEN_MPI])
def test_torchrun_inside_another_launcher_counts(inner: dict[str, str]) -> None:
    found = read_environment({**inner, **TORCHRUN})
    assert found == EXPECTED["torchrun"][1]


@pytest.mark.parametrize(("launcher", "environ"), [("open mpi", OPEN_MPI), ("mpich", MPICH)])
def test_mpirun_inside_a_job_of_slurm_counts(launcher: str, environ: dict[str, str]) -> None:
    """Whose ranks all see the numbers of the batch script, or of the daemon of their host."""
    job = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NAME": "train"}
    assert read_environment({**job, **environ}) == EXPECTED[launcher][1]


def test_srun_that_speaks_pmi_counts_as_srun() -> None:
    assert read_environment({**SLURM, "PMI_RANK": "6", "PMI_SIZE": "8"}) == EXPECTED["slurm"][1]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"},
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "node[1-2]"},
        {**SLURM, "SLURM_STEP_ID": "4294967290", "SLURM_JOB_NAME": "interactive"},
    ],
    ids=["nothing", "only a master", "an allocation", "a shell in an allocation"],
)
def test_no_launcher_is_none(environ: dict[str, str]) -> None:
    assert read_environment(environ) is None


def test_a_step_started_from_an_interactive_shell_is_a_launch() -> None:
    assert read_environment({**SLURM, "SLURM_JOB_NAME": "bash"}) == EXPECTED["slurm"][1]


def test_what_only_looks_like_a_number_says_nothing() -> None:
    assert read_environment({**SLURM, "SLURM_NODEID": "²"}) == EXPECTED["slurm"][1]


def test_the_store_of_phalanx_run_comes_before_the_master() -> None:
    found = read_environment({**TORCHRUN, "PHALANX_STORE": "[::1]:4000"})
    assert found is not None
    assert (found.master_addr, found.master_port, found.agent_store) == ("::1", 4000, True)
    assert found.own_store


def test_a_world_of_one_needs_no_master() -> None:
    found = read_environment({"RANK": "0", "WORLD_SIZE": "1"})
    assert found is not None
    assert (found.rank, found.world_size, found.one_host) == (0, 1, True)


WRONG = [
    ({**BY_HAND, "RANK": "abc"}, InvalidRankError, ["RANK", "abc"]),
    ({**BY_HAND, "RANK": "-1"}, InvalidRankError, ["RANK", "-1"]),
    ({**BY_HAND, "RANK": ""}, InvalidRankError, ["RANK", "''"]),
    ({**BY_HAND, "RANK": "2"}, InvalidRankError, ["RANK=2", "WORLD_SIZE=2"]),
    ({**BY_HAND, "WORLD_SIZE": "0"}, InvalidWorldSizeError, ["WORLD_SIZE", "0"]),
    ({**BY_HAND, "WORLD_SIZE": "²"}, InvalidWorldSizeError, ["WORLD_SIZE", "²"]),
    ({**BY_HAND, "LOCAL_RANK": "x"}, InvalidRankError, ["LOCAL_RANK", "x"]),
    ({**TORCHRUN, "LOCAL_RANK": "4"}, InvalidRankError, ["LOCAL_RANK=4", "4 ranks"]),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, InvalidWorldSizeError, ["LOCAL_WORLD_SIZE=9"]),
    ({**BY_HAND, "MASTER_PORT": "http"}, MisuseError, ["MASTER_PORT", "http"]),
    ({**BY_HAND, "MASTER_PORT": "65536"}, MisuseError, ["MASTER_PORT", "65536"]),
    ({"RANK": "0"}, InvalidWorldSizeError, ["WORLD_SIZE is not set"]),
    ({"WORLD_SIZE": "2"}, InvalidRankError, ["RANK is not set"]),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, MisuseError, ["MASTER_ADDR"]),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, MisuseError, ["MASTER_PORT"]),
    ({**TORCHRUN, "PHALANX_STORE": "here"}, MisuseError, ["PHALANX_STORE", "here"]),
    ({**SLURM, "SLURM_STEP_NODELIST": "node[a-b]"}, MisuseError, ["SLURM_STEP_NODELIST"]),
]


@pytest.mark.parametrize(("environ", "error", "words"), WRONG)
def test_what_makes_no_sense_is_named(
    environ: dict[str, str], error: type[DistributedError], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        read_environment(environ)
    assert all(word in str(caught.value) for word in words)


@given(st.dictionaries(st.sampled_from(sorted(SLURM | TORCHRUN | MPICH)), st.text(max_size=8)))
def test_any_environment_gives_a_sound_world_or_a_clear_error(environ: dict[str, str]) -> None:
    try:
        found = read_environment(environ)
    except DistributedError:
        return
    if found is not None:
        assert 0 <= found.rank < found.world_size
        assert 0 <= found.local_rank < found.local_world_size <= found.world_size
        assert found.world_size == 1 or 0 < found.master_port < 65536


@given(st.data())
def test_every_rank_of_every_launcher_reads_its_own_place(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 1000))
    rank = data.draw(st.integers(0, size - 1))
    names = data.draw(st.sampled_from([("RANK", "WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")]))
    environ = dict(zip(names, (str(rank), str(size)), strict=True))
    found = read_environment({**environ, "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    assert found is not None
    assert (found.rank, found.world_size) == (rank, size)


# ------------------------------------------------------------------------------
# Elastic jobs.

ELASTIC = {"PHALANX_STORE": "etcd://a:2379,[::1]:2379", "PHALANX_JOB": "night.7_b-1"}


def test_an_elastic_job_needs_a_store_and_a_name() -> None:
    assert read_elastic_environment({}) is None
    assert read_elastic_environment({"PHALANX_STORE": "a:1"}) is None, "any job of phalanx run"
    assert read_elastic_environment({"PHALANX_JOB": "a"}) is None
    expected = ElasticJob("etcd://a:2379,[::1]:2379", "night.7_b-1", "night.7_b-1")
    assert read_elastic_environment(ELASTIC) == expected


def test_a_launcher_says_more_of_an_elastic_job() -> None:
    said = {
        "PHALANX_LAUNCH": "x",
        "PHALANX_MIN_RANKS": "2",
        "PHALANX_MAX_RANKS": "8",
        "LOCAL_RANK": "3",
    }
    found = read_elastic_environment({**ELASTIC, **said})
    assert found == ElasticJob(ELASTIC["PHALANX_STORE"], "night.7_b-1", "x", 2, 8, 3)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("PHALANX_STORE", "here", MisuseError),
        ("PHALANX_STORE", "etcd://a:2379,b", MisuseError),
        ("PHALANX_JOB", "a/b", MisuseError),
        ("PHALANX_JOB", "a" * 101, MisuseError),
        ("PHALANX_MIN_RANKS", "0", InvalidWorldSizeError),
        ("PHALANX_MAX_RANKS", "many", InvalidWorldSizeError),
        ("PHALANX_MIN_RANKS", "9", InvalidWorldSizeError),
        ("LOCAL_RANK", "-1", InvalidRankError),
    ],
)
def test_an_elastic_job_that_cannot_be_is_named(
    name: str, value: str, error: type[DistributedError]
) -> None:
    with pytest.raises(error, match=f"{name}=['{value[0]}]"):
        read_elastic_environment({"PHALANX_MAX_RANKS": "8", **ELASTIC, name: value})


def test_an_elastic_job_has_no_world_for_init() -> None:
    for launcher in ({}, TORCHRUN, SLURM):
        with pytest.raises(MisuseError, match=r"elastic job night.*phalanx\.Elastic\(\)"):
            read_environment({**launcher, **ELASTIC})
