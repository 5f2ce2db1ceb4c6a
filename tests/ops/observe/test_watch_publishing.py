"""What ranks and launchers publish: files of one folder, or lines over the network."""

from __future__ import annotations

import itertools
import math
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from clusters import CLUSTERS, Cluster
from waiting import wait_until

from phalanx import Backend, SimulatedBackend, all_reduce
from phalanx.errors import (
    LONGEST_TEXT,
    AuthenticationError,
    BackendUnavailableError,
    MisuseError,
    plain,
)
from phalanx.launch.environment import World
from phalanx.ops.observe.watch import folder as watch_folder
from phalanx.ops.observe.watch.folder import (
    WatchFolder,
    make_private_folder,
    open_folder,
    private_base,
    private_folders,
    process_status,
)
from phalanx.ops.observe.watch.nodes import RemoteNode, WatchServer, as_address, token_for_watchers
from phalanx.ops.observe.watch.publish import Publisher, begin
from phalanx.ops.observe.watch.state import (
    MOST_BYTES,
    JobState,
    RankState,
    bounded,
    number,
)
from phalanx.wire.control import Endpoint

TOKEN = b"the token of the tests"
PATIENCE = 30.0
TCP = next(cluster for cluster in CLUSTERS if cluster.name == "tcp")


def job(*ranks: RankState, **more: object) -> JobState:
    fields = {"name": "train.py", "world_size": 4, "time": 1.0} | more
    return JobState(ranks=list(ranks), **fields)  # type: ignore[arg-type]


def publisher(backend: Backend, folder: Path) -> Publisher:
    world = World(backend.rank, backend.world_size)
    return Publisher(backend.engine, world, WatchFolder(folder))


# ------------------------------------------------------------------------------
# A rank.


@pytest.mark.parametrize("ranks", [c for c in CLUSTERS if c.name in ("tcp", "shm")], ids=str)
def test_a_rank_publishes_its_call_for_whom_it_waits_and_what_it_logs(
    ranks: Cluster, tmp_path: Path
) -> None:
    seen: list[RankState] = []
    all_seen = threading.Event()

    def run(backend: Backend) -> None:
        ours = publisher(backend, tmp_path)
        backend.progress.log(7, loss=2.5, bad=math.nan)
        if backend.rank:
            assert all_seen.wait(PATIENCE)
            backend.send(torch.ones(8), 0)
            return

        def waiting() -> RankState | None:
            state = ours.state()
            return state if state.waits_for else None

        def look() -> None:
            seen.append(wait_until(waiting))
            all_seen.set()

        looker = threading.Thread(target=look)
        looker.start()
        backend.recv(torch.empty(8), 1)
        looker.join()

    ranks.run(run, 2)
    (state,) = seen
    assert (state.operation, state.sequence, state.waits_for) == ("recv", 0, [1])
    assert state.where.startswith("test_watch_publishing.py:")
    assert (state.step, state.values) == (7, {"loss": 2.5, "bad": "nan"})


def test_rates_are_those_since_the_state_before(tmp_path: Path) -> None:
    def run(backend: Backend) -> RankState:
        ours = publisher(backend, tmp_path)
        ours.state()
        all_reduce(torch.ones(1 << 16), backend)
        return ours.state()

    for state in TCP.run(run, 2):
        assert state.sent > 0
        assert state.received > 0
        assert 0 <= state.waiting <= 1
        assert 0 <= state.waiting + state.communicating <= 1
        assert state.operation == ""
        assert state.last_call.startswith("all_reduce #0")


def test_ranks_publish_while_somebody_watches_and_no_thread_is_there_before_or_after(
    tmp_path: Path,
) -> None:
    def thread_of(rank: int) -> bool:
        return any(t.name == f"phalanx rank {rank} publishes" for t in threading.enumerate())

    def run(backend: Backend) -> list[bool]:
        threads = []
        ours, folder = publisher(backend, tmp_path), WatchFolder(tmp_path)
        ours.begin()
        threads.append(thread_of(backend.rank))

        def is_published() -> bool:  # in step, so that all see it
            if backend.rank == 0:
                folder.touch()
            job = folder.read()
            published = job is not None and all(state.memory for state in job.ranks)
            enough = torch.tensor([float(published and job is not None and len(job.ranks) == 2)])
            return all_reduce(enough, backend).item() == 2

        wait_until(is_published)
        threads.append(thread_of(backend.rank))
        return threads

    wait_until(lambda: not (thread_of(0) or thread_of(1)))  # those of a test before
    assert TCP.run(run, 2) == [[False, True], [False, True]]
    ended = WatchFolder(tmp_path).read()
    assert ended is not None
    assert [state.status for state in ended.ranks] == ["ended", "ended"]
    wait_until(lambda: not thread_of(0) and not thread_of(1))


def test_a_rank_without_peers_publishes_when_it_logs_its_steps(tmp_path: Path) -> None:
    def run(backend: Backend) -> None:
        publisher(backend, tmp_path).begin()
        backend.progress.log(0, loss=2.0)  # where it looks, and nobody watches
        WatchFolder(tmp_path).touch()
        steps = itertools.count(1)

        def shows() -> bool:
            backend.progress.log(next(steps), loss=1.0)
            return any(state.values == {"loss": 1.0} for state in seen().ranks)

        wait_until(shows)

    def seen() -> JobState:
        read = WatchFolder(tmp_path).read()
        assert read is not None
        return read

    TCP.run(run, 1)
    assert [state.status for state in seen().ranks] == ["ended"]


# ------------------------------------------------------------------------------
# The folder.


def test_only_a_new_touch_means_that_somebody_watches(tmp_path: Path) -> None:
    WatchFolder(tmp_path).touch()  # by a watcher of yesterday
    folder = WatchFolder(tmp_path)
    assert not folder.is_watched()
    WatchFolder(tmp_path).touch()
    assert folder.is_watched()


def test_what_is_published_is_for_its_user_only(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "new" / "folder")
    folder.write("rank-0.json", job(RankState(rank=0)))
    folder.touch()
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.path.iterdir()}
    assert modes == {"rank-0.json": 0o600, "watched": 0o600}
    assert folder.path.stat().st_mode & 0o777 == 0o700


def test_a_folder_in_which_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(MisuseError, match="nobody else may write: chmod 700"):
        open_folder(tmp_path)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's jobs have their folders, as everybody knows."""
    path = tmp_path / f"phalanx-{os.getuid()}"
    monkeypatch.setattr(watch_folder, "MEMORY", tmp_path)
    return path


def taken_by_another(base: Path) -> None:
    """Another user's folder; as others may write there, it is as good as one."""
    base.mkdir()
    base.chmod(0o777)


TAKEN: list[Callable[[Path], object]] = [
    taken_by_another,
    lambda base: base.write_text("a file"),
    lambda base: base.symlink_to(base.parent),
    lambda base: base.symlink_to("/nowhere"),
]


@pytest.mark.parametrize("take", TAKEN)
def test_a_foreign_folder_in_its_place_stops_no_job(
    base: Path, take: Callable[[Path], object]
) -> None:
    take(base)
    folder = make_private_folder("a job")
    assert folder.path.parent.parent == base.parent
    assert folder.path.parent.name.startswith(f"{base.name}-")
    assert folder.path.parent.stat().st_mode & 0o777 == 0o700
    another = make_private_folder("another")
    assert another.path.parent == folder.path.parent, "all jobs and watchers find the same one"
    assert [each.path for each in private_folders()] == [folder.path, another.path]


def test_folders_of_others_beside_it_are_not_taken_for_it(base: Path) -> None:
    taken_by_another(base)
    taken_by_another(base.with_name(f"{base.name}-a"))
    own = make_private_folder("a job").path.parent
    assert own.name not in (base.name, f"{base.name}-a")
    assert private_base() == own


def test_a_job_goes_on_where_no_folder_can_be_made(
    base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken_by_another(base)

    def refuse(**options: object) -> str:
        raise PermissionError

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    (backend,) = SimulatedBackend.create_group(1)
    environ = {"PHALANX_WATCH": "127.0.0.1:1", "PHALANX_TOKEN": "k" * 32}
    with backend, caplog.at_level("WARNING", "phalanx"):
        begin(backend, World(0, 1), environ)
        backend.barrier()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "rank 0 cannot be watched" in line
    assert str(base) in line


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MisuseError, match=r"no state can be published in .*file"):
        open_folder(tmp_path / "file" / "folder")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"rank": 0}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"name":"x","world_size":2,"time":0,"ranks":"no"}',
        b" " * (MOST_BYTES + 1),
    ],
    ids=["empty", "torn", "other", "no text", "nested", "wrong types", "too long"],
)
def test_what_is_no_state_is_left_out(tmp_path: Path, content: bytes) -> None:
    folder = WatchFolder(tmp_path)
    folder.write("rank-1.json", job(RankState(rank=1)))
    (tmp_path / "rank-0.json").write_bytes(content)
    read = folder.read()
    assert read is not None
    assert [state.rank for state in read.ranks] == [1]


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    folder, elsewhere = WatchFolder(tmp_path), tmp_path / "elsewhere"
    folder.write("elsewhere", job(RankState(rank=0)))
    (tmp_path / "rank-0.json").symlink_to(elsewhere)
    os.mkfifo(tmp_path / "rank-1.json")
    assert folder.read() is None


def test_hostile_states_are_bounded() -> None:
    hostile = RankState(
        rank=0,
        log="\x1b[31mred\x1b[0m \x1b]0;title\x07 \u202eback\r\n" + "x" * 10_000,
        waits_for=list(range(100_000)),
        values={f"{i}\x1b[2J": "\x1b[2J" for i in range(1000)},
        waiting=1e9,
        communicating=-1.0,
    )
    state = bounded(hostile)
    assert state.log.startswith("red  ]0;title")
    assert state.log.isprintable()
    assert len(state.log) <= LONGEST_TEXT
    assert len(state.waits_for) < 100
    assert len(state.values) < 100
    assert all(name.isprintable() for name in state.values)
    assert (state.waiting, state.communicating) == (1.0, 0.0)


def test_numbers_that_json_has_not_are_text() -> None:
    assert [number(x) for x in (1.5, math.nan, math.inf, -math.inf)] == [1.5, "nan", "inf", "-inf"]
    assert plain("a\tb\n") == "a b "


def test_ranks_outside_of_the_world_are_left_out(tmp_path: Path) -> None:
    folder = WatchFolder(tmp_path)
    folder.write("rank-0.json", job(RankState(rank=0), RankState(rank=4), RankState(rank=-1)))
    read = folder.read()
    assert read is not None
    assert [state.rank for state in read.ranks] == [0]


def test_the_launcher_knows_better_how_a_rank_is(tmp_path: Path) -> None:
    folder = WatchFolder(tmp_path)
    folder.write("rank-0.json", job(RankState(rank=0, step=7)))
    dead = RankState(rank=0, status="dead", reason="killed by signal 9", log="the last line")
    folder.write("node-0.json", job(dead, RankState(rank=1, status="starting")))
    read = folder.read()
    assert read is not None
    first, second = read.ranks
    assert (first.status, first.reason, first.log, first.step) == (
        "dead",
        "killed by signal 9",
        "the last line",
        7,
    )
    assert second.status == "starting"


def test_states_of_an_earlier_start_are_left_out(tmp_path: Path) -> None:
    folder = WatchFolder(tmp_path)
    folder.write("rank-0.json", job(RankState(rank=0, step=7, generation=0)))
    folder.write("node-0.json", job(RankState(rank=0, status="starting"), generation=1))
    read = folder.read()
    assert read is not None
    assert (read.generation, read.ranks[0].step) == (1, None)


def test_a_process_that_is_gone_is_dead() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert process_status(child)[0] == "dead"
    assert process_status(os.getpid()) == ("running", "")


# ------------------------------------------------------------------------------
# Over the network.


def serve(folder: Path) -> WatchServer:
    return WatchServer(WatchFolder(folder), socket.create_server(("127.0.0.1", 0)), TOKEN)


def test_who_holds_the_token_sees_the_folder_to_the_end(tmp_path: Path) -> None:
    folder = WatchFolder(tmp_path)
    folder.write("rank-0.json", job(RankState(rank=0, step=3)))
    server = serve(tmp_path)
    remote = RemoteNode("", server.endpoint, TOKEN)
    remote.take()
    assert remote.latest is not None
    assert remote.latest.ranks[0].step == 3
    assert folder.is_watched()
    folder.write("node-0.json", job(RankState(rank=0), ended="it has ended well"))
    server.finish()
    while not remote.over:
        remote.take()
        assert not remote.problem
    remote.close()


def test_without_the_token_nothing_is_seen(tmp_path: Path) -> None:
    server = serve(tmp_path)
    with pytest.raises(AuthenticationError, match="do not hold the same token"):
        RemoteNode("", server.endpoint, b"another token of the tests").take()
    server.finish()


def test_where_nobody_listens_or_answers_it_says_so(tmp_path: Path) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, pytest.raises(BackendUnavailableError, match="is it not stopped"):
        RemoteNode("", Endpoint(*silent.getsockname()), TOKEN).take()
    server = serve(tmp_path)
    server.close()
    with pytest.raises(BackendUnavailableError, match=r"no job can be watched at 127\.0\.0\.1"):
        RemoteNode("", server.endpoint, TOKEN).take()


def test_addresses_and_folders_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_address("node1:9500") == Endpoint("node1", 9500)
    assert as_address("[::1]:9500") == Endpoint("::1", 9500)
    assert as_address("runs/a") is None
    assert as_address("/runs/a:1") is None
    with pytest.raises(MisuseError, match="PHALANX_WATCH=node1:99999"):
        as_address("node1:99999")
    monkeypatch.delenv("PHALANX_TOKEN", raising=False)
    monkeypatch.delenv("PHALANX_TOKEN_FILE", raising=False)
    with pytest.raises(MisuseError, match="only who holds the job's token may look"):
        token_for_watchers("node1:9500")
