"""What Slurm says in the environment, and the token of a step. tests/clients/ has a real Slurm."""

from __future__ import annotations

import logging
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import BackendUnavailableError, CollectiveTimeoutError, MisuseError
from phalanx.launch.environment import World, read_environment
from phalanx.launch.init import rendezvous
from phalanx.launch.slurm import PORTS, STEPS, expand_hosts, shared_token, step_port
from phalanx.transport.tcp.admission import find_token

STEP = {  # as `srun -N 2 -n 4` leaves it, on the second node
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NAME": "python",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
ON_ONE_NODE = {**STEP, "SLURM_STEP_NODELIST": "n2", "SLURM_STEP_TASKS_PER_NODE": "4"}
ON_ONE_NODE |= {"SLURM_NODEID": "0", "SLURM_LOCALID": "3"}


def read(environ: dict[str, str]) -> World:
    world = read_environment(environ)
    assert world is not None
    return world


# Where the ranks meet ---------------------------------------------------------------------------


def test_srun_needs_no_exports() -> None:
    expected = World(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        master_addr="n2",
        master_port=12000 + 77 * 64,
        source="slurm",
        run_id="77.0",
    )
    assert read(STEP) == expected


def test_the_ranks_of_one_node_meet_on_loopback() -> None:
    world = read(ON_ONE_NODE)
    assert (world.master_addr, world.one_host) == ("127.0.0.1", True)


def test_what_the_user_exports_comes_first() -> None:
    world = read({**STEP, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"})
    assert (world.master_addr, world.master_port) == ("10.0.0.7", 29500)


def test_a_rank_that_was_set_for_torch_is_still_sruns() -> None:
    copied = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert read({**STEP, **copied}) == read(STEP)
    master = {"MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    assert read({**STEP, **copied, **master, "RANK": "2"}).source == "environment"


def test_a_job_that_was_put_back_into_the_queue_is_another_generation() -> None:
    assert read({**STEP, "SLURM_RESTART_COUNT": "2"}) == replace(read(STEP), restart_count=2)


@given(st.integers(1, 2**26), st.integers(1, 311), st.lists(st.integers(0, STEPS - 1), min_size=2))
def test_jobs_and_steps_that_may_run_side_by_side_do_not_meet(
    job: int, later: int, steps: list[int]
) -> None:
    def port(job: int, step: int) -> str:
        return step_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})

    ports = {(j, s): port(j, s) for j in (job, job + later) for s in steps}
    assert len(set(ports.values())) == len(ports)
    assert all(12000 <= int(each) < 12000 + PORTS for each in ports.values())


def test_the_script_of_a_job_is_none_of_its_tasks() -> None:
    """Who forgets `srun` is told so, and does not train alone."""
    script = {name: text for name, text in STEP.items() if "STEP" not in name}
    script |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    with pytest.raises(MisuseError, match=r"4 tasks .* start the ranks from it with srun"):
        read_environment(script)
    alone = read_environment({**script, "SLURM_NTASKS": "1"})
    assert alone is not None
    assert alone.world_size == 1


def test_without_a_job_number_there_is_no_port() -> None:
    with pytest.raises(MisuseError, match="MASTER_PORT is not set"):
        read_environment({name: text for name, text in STEP.items() if name != "SLURM_JOB_ID"})


def test_a_name_that_does_not_resolve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {**STEP, "SLURM_STEP_NODELIST": "gone[1-2].invalid"}
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(BackendUnavailableError) as caught:
        rendezvous(read(environ), timeout=5)
    text = str(caught.value)
    assert "rank 3" in text
    assert "gone1.invalid" in text
    assert "SLURM_STEP_NODELIST=gone[1-2].invalid" in text
    assert "Set MASTER_ADDR to an address of gone1.invalid" in text


# Lists of hosts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", "node1"),
        ("node[003-005,9]", "node003 node004 node005 node9"),
        ("node[003-005,9],gpu1", "node003 node004 node005 node9 gpu1"),
        ("a,b-c.example.org", "a b-c.example.org"),
        ("rack[1-2]n[01-02]-ib", "rack1n01-ib rack1n02-ib rack2n01-ib rack2n02-ib"),
        ("n[098-101]", "n098 n099 n100 n101"),
    ],
)
def test_short_forms(text: str, hosts: str) -> None:
    assert expand_hosts(text) == hosts.split()


@pytest.mark.parametrize("text", ["", "  ", "node[1", "node]1[", "n[1-]", "n[x]", "n[]", "n[3-1]"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"list of|holds no number"):
        expand_hosts(text)


@given(st.lists(st.integers(0, 9999), min_size=1), st.integers(1, 4))
def test_numbers_come_back_in_order_and_width(numbers: list[int], width: int) -> None:
    listed = ",".join(f"{n:0{width}d}" for n in numbers)
    assert expand_hosts(f"n[{listed}]") == [f"n{n:0{width}d}" for n in numbers]


@given(st.text(alphabet="n0123456789[]-, ", max_size=12))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except ValueError:
        return
    assert hosts
    assert all(host and not set(host) & set("[], ") for host in hosts)


# The token of a step ----------------------------------------------------------------------------


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**STEP, "SLURM_SUBMIT_DIR": str(tmp_path)}


def token_of(
    environ: dict[str, str], rank: int, met: threading.Barrier, tokens: dict[int, str]
) -> None:
    with shared_token(environ, rank, one_host=False, timeout=60):
        tokens[rank] = environ["PHALANX_TOKEN"]
        if rank == 0:
            (path,) = Path(environ["SLURM_SUBMIT_DIR"]).iterdir()
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        met.wait()


def tokens_of_all(environ: dict[str, str], *order: int) -> dict[int, str]:
    met, tokens = threading.Barrier(len(order)), dict[int, str]()
    ranks = [
        threading.Thread(target=token_of, args=(dict(environ), rank, met, tokens)) for rank in order
    ]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    return tokens


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_all_ranks_get_the_token_of_rank_0(
    environ: dict[str, str], order: tuple[int, ...], tmp_path: Path
) -> None:
    tokens = tokens_of_all(environ, *order)
    assert len(tokens) == 4
    assert len(set(tokens.values())) == 1
    assert len(tokens[0]) == 64
    assert not list(tmp_path.iterdir())


def test_two_steps_and_two_starts_have_tokens_of_their_own(environ: dict[str, str]) -> None:
    starts = [{}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "78"}]
    names = []
    for changes in starts:
        with shared_token({**environ, **changes}, 0, one_host=False, timeout=60):
            names += [path.name for path in Path(environ["SLURM_SUBMIT_DIR"]).iterdir()]
    assert len(set(names)) == len(starts)


def test_a_second_world_of_the_same_ranks_needs_no_file(environ: dict[str, str]) -> None:
    with shared_token(environ, 0, one_host=False, timeout=60):
        first = environ["PHALANX_TOKEN"]
    with shared_token(environ, 0, one_host=False, timeout=60):
        assert not list(Path(environ["SLURM_SUBMIT_DIR"]).iterdir())
        assert find_token(environ) == first


@pytest.mark.parametrize("given", ["PHALANX_TOKEN", "PHALANX_TOKEN_FILE"])
def test_a_token_that_was_given_stays(environ: dict[str, str], given: str, tmp_path: Path) -> None:
    token, path = "0123456789abcdef", tmp_path / "mine"
    path.touch(mode=0o600)
    path.write_text(token)
    environ[given] = token if given == "PHALANX_TOKEN" else str(path)
    with shared_token(environ, 0, one_host=False, timeout=60):
        assert find_token(environ) == token
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("content", "mode"), [("short", 0o600), ("0123456789abcdef", 0o644)])
def test_a_file_that_is_no_token_is_replaced_by_rank_0_and_not_taken_by_others(
    environ: dict[str, str], content: str, mode: int, tmp_path: Path
) -> None:
    with shared_token(dict(environ), 0, one_host=False, timeout=60):
        (path,) = tmp_path.iterdir()
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1 waited 0.1 s"):
        shared_token(dict(environ), 1, one_host=False, timeout=0.1).__enter__()
    assert content not in tokens_of_all(environ, 1, 0).values()


def test_a_stale_file_of_the_same_name_is_the_same_for_all(
    environ: dict[str, str], tmp_path: Path
) -> None:
    with shared_token(dict(environ), 0, one_host=False, timeout=60):
        (path,) = tmp_path.iterdir()
    path.touch(mode=0o600)
    path.write_text("a token of long ago")
    assert tokens_of_all(environ, 0, 1) == dict.fromkeys((0, 1), "a token of long ago")


def test_the_file_is_gone_also_when_the_ranks_did_not_meet(
    environ: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ZeroDivisionError), shared_token(environ, 0, one_host=False, timeout=60):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_who_waits_in_vain_says_for_which_file_and_what_to_set(environ: dict[str, str]) -> None:
    with pytest.raises(CollectiveTimeoutError) as caught:
        shared_token(environ, 3, one_host=False, timeout=0.1).__enter__()
    text = str(caught.value)
    assert f"{environ['SLURM_SUBMIT_DIR']}/.phalanx-token-77.0.0" in text
    assert "SLURM_SUBMIT_DIR" in text
    assert "PHALANX_TOKEN" in text
    assert (caught.value.rank, caught.value.peer) == (3, 0)


@pytest.mark.parametrize(
    ("one_host", "means"),
    [(True, "any process of this user on this host"), (False, "only ranks of rank 0")],
)
def test_without_a_shared_folder_rank_0_alone_warns_once(
    environ: dict[str, str],
    one_host: bool,
    means: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    environ["SLURM_SUBMIT_DIR"] += "/not/there"
    with caplog.at_level(logging.WARNING, "phalanx"):
        for rank in (1, 0, 2):
            with shared_token(environ, rank, one_host=one_host, timeout=60):
                assert "PHALANX_TOKEN" not in environ
    (record,) = caplog.records
    assert means in record.getMessage()
    assert environ["SLURM_SUBMIT_DIR"] in record.getMessage()


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder that root cannot write to")
def test_a_folder_that_takes_no_file_is_warned_of(
    environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    environ["SLURM_SUBMIT_DIR"] = "/proc/self"
    with shared_token(environ, 0, one_host=False, timeout=60):
        assert "PHALANX_TOKEN" not in environ
    assert "/proc/self" in caplog.text
