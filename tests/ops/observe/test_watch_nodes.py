"""A job of several launchers: `phalanx watch` on any node shows all ranks."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from ports import unused_port
from typing_extensions import override

from phalanx.errors import AuthenticationError, BackendUnavailableError
from phalanx.launch.nodes import Nodes
from phalanx.launch.observer import NodePlace, OtherNodes
from phalanx.ops.observe.watch.folder import OTHERS, WatchFolder
from phalanx.ops.observe.watch.gather import find_job, follow, snapshot
from phalanx.ops.observe.watch.launcher import NodeWatch
from phalanx.ops.observe.watch.nodes import MOST_WATCHERS, RemoteNode, WatchServer
from phalanx.ops.observe.watch.state import MOST_BYTES, JobState, RankState
from phalanx.wire.control import Endpoint, parse_address

PATIENCE = 30.0
TOKEN = "the token of the tests of several launchers"


class Node:
    """What the launcher of one node does for those who watch, in a thread; it has one rank."""

    def __init__(self, stack: ExitStack, master: str, node: int) -> None:
        self.rank = node
        self.watch = NodeWatch("train.py", node, {})
        self.nodes = Nodes(
            ranks=1, nodes=2, node_rank=node, master=master, listen=self.watch.listen
        )
        self.watch.nodes = self.nodes
        self.folder = WatchFolder(Path(self.watch.private))
        self.begun = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while self.nodes.placement is None and not self._over.wait(0.01):
            self.nodes.check()
        self.watch.begin(0, 2)
        state = RankState(rank=self.rank, pid=os.getpid(), step=7 + self.rank)
        self.folder.write(f"rank-{self.rank}.json", job(state))
        self.begun.set()
        while not self._over.wait(0.01):
            self.watch.look([])

    def end(self, how: str) -> None:
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            self.watch.end(how)

    def vanish(self) -> None:
        """As if it was killed: nobody listens, and its reaper removes the folder."""
        self._over.set()
        self._thread.join()
        for server in self.watch._servers:
            server.close()
        self.remove()

    def remove(self) -> None:
        shutil.rmtree(self.watch.private, ignore_errors=True)


def job(*ranks: RankState) -> JobState:
    return JobState(name="train.py", world_size=2, time=1.0, ranks=list(ranks))


def two_nodes(stack: ExitStack) -> list[Node]:
    master = f"127.0.0.1:{unused_port()}"
    found = [Node(stack, master, node) for node in (0, 1)]
    for node in found:
        stack.callback(node.nodes.close, PATIENCE)
        stack.callback(node.remove)
        stack.callback(node.end, "it has ended well")
    # The others leave before node 0, whose store they need, waits for them.
    stack.callback(lambda: [node.nodes._closing.set() for node in found])
    assert all(node.begun.wait(PATIENCE) for node in found)
    return found


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def nodes(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)
    return two_nodes(stack)


def states_of(node: Node) -> Iterator[JobState]:
    return follow(find_job(node.watch.private), period=0.02)


def first(states: Iterator[JobState], fits: Callable[[JobState], bool]) -> JobState:
    deadline = time.monotonic() + PATIENCE
    for state in states:
        if fits(state):
            return state
        assert time.monotonic() < deadline, state
    raise AssertionError("the states have ended")


def steps(state: JobState) -> list[int | None]:
    return [rank.step for rank in state.ranks]


def others_of(node: Node) -> OtherNodes:
    first(states_of(node), lambda state: steps(state) == [7, 8])
    found = node.folder.others()
    assert found is not None
    return found


def test_nobody_listens_until_somebody_watches_then_either_node_shows_all_ranks(
    nodes: list[Node],
) -> None:
    assert [node.watch._servers for node in nodes] == [[], []]
    assert [node.folder.others() for node in nodes] == [None, None]
    for node in nodes:
        assert first(states_of(node), lambda state: steps(state) == [7, 8])


def test_one_state_waits_for_all_nodes(nodes: list[Node]) -> None:
    state = snapshot(find_job(nodes[1].watch.private))
    assert state is not None
    assert steps(state) == [7, 8]


def test_only_who_holds_the_token_may_look_and_the_job_s_own_is_not_told(
    nodes: list[Node],
) -> None:
    others = others_of(nodes[0])
    assert others.token != TOKEN
    (place,) = others.nodes
    assert (place.node, place.first_rank, place.ranks) == (1, 1, 1)
    endpoint = parse_address(place.address)
    for wrong in (TOKEN, "another token of the tests of several"):
        with pytest.raises(AuthenticationError, match="do not hold the same token"):
            watcher(endpoint, wrong)
    watcher(endpoint, others.token).close()


def watcher(endpoint: Endpoint, token: str = TOKEN) -> RemoteNode:
    """One who watches there, and has a state."""
    node = RemoteNode("", endpoint, token.encode())
    node.take()
    return node


@contextmanager
def served(
    folder: WatchFolder, kind: Callable[..., WatchServer] = WatchServer
) -> Iterator[WatchServer]:
    server = kind(folder, socket.create_server(("127.0.0.1", 0)), TOKEN.encode())
    yield server
    server.close()


def test_callers_that_prove_nothing_take_no_watchers_place(tmp_path: Path) -> None:
    folder = WatchFolder(tmp_path)
    folder.write("node-0.json", job(RankState(rank=0, pid=1)))
    with served(folder) as server, ExitStack() as strangers:
        for number in range(3 * MOST_WATCHERS):
            sock = strangers.enter_context(socket.create_connection(server.endpoint, PATIENCE))
            if number % 2:
                sock.sendall(b"PHX?")
        owner = watcher(server.endpoint)
        assert owner.latest is not None
        owner.close()


def test_one_watcher_too_many_is_told_why_and_comes_in_when_another_has_left(
    tmp_path: Path,
) -> None:
    folder = WatchFolder(tmp_path)
    folder.write("node-0.json", job(RankState(rank=0, pid=1)))
    with served(folder) as server:
        watchers = [watcher(server.endpoint) for _ in range(MOST_WATCHERS)]
        with pytest.raises(BackendUnavailableError, match="8 watch this job already"):
            watcher(server.endpoint)
        watchers.pop().close()
        deadline = time.monotonic() + PATIENCE
        while len(watchers) < MOST_WATCHERS:
            assert time.monotonic() < deadline
            with suppress(BackendUnavailableError):
                watchers.append(watcher(server.endpoint))
        for each in watchers:
            each.close()


@pytest.mark.parametrize(
    "said", [b"{}\n", b"[" * 100_000 + b"\n", b"\xff\n", b"x" * (3 * MOST_BYTES)]
)
def test_a_node_that_says_no_state_is_hung_up_on(tmp_path: Path, said: bytes) -> None:
    class Talks(WatchServer):
        @override
        def link_opened(self, peer: int, sock: socket.socket, surplus: bytes) -> None:
            sock.settimeout(PATIENCE)
            with sock, suppress(OSError):
                sock.sendall(said)

    with served(WatchFolder(tmp_path), Talks) as server:
        node = watcher(server.endpoint)
    assert node.latest is None
    assert node.problem.startswith(("it says what is no state", "it has closed the connection"))


def test_where_the_job_was_given_no_token_its_nodes_draw_one(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PHALANX_TOKEN", "PHALANX_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    nodes = two_nodes(stack)
    assert others_of(nodes[0]).token == others_of(nodes[1]).token


def test_a_node_that_is_gone_is_named_and_the_others_go_on(nodes: list[Node]) -> None:
    states = states_of(nodes[0])
    name = str(others_of(nodes[0]).nodes[0])
    nodes[1].vanish()
    gone = first(states, lambda state: "does not answer" in state.ranks[1].reason)
    assert gone.ranks[1].status == "unreachable"
    assert gone.ranks[1].reason.startswith(f"{name}: ")
    assert (gone.ranks[0].status, gone.ended) == ("running", "")


def test_the_last_state_has_what_all_nodes_say_of_the_end(nodes: list[Node]) -> None:
    states = states_of(nodes[0])
    first(states, lambda state: steps(state) == [7, 8])
    for node in nodes:
        node.end("rank 1 was killed")
    last = first(states, lambda state: bool(state.ended))
    assert (last.ended, steps(last)) == ("rank 1 was killed", [7, 8])


def test_a_node_without_a_port_for_watchers_says_so(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_PORTS", "30000")
    state = first(states_of(nodes[0]), lambda state: state.ranks[1].status == "unreachable")
    assert "it cannot listen: PHALANX_PORTS=30000 has a port for each of its 1 ranks" in (
        state.ranks[1].reason
    )


def test_ranks_of_a_node_that_has_not_said_where_it_listens_are_there(tmp_path: Path) -> None:
    folder = WatchFolder(tmp_path)
    place = NodePlace(node=1, host="host1", first_rank=1, ranks=1)
    folder.write(OTHERS, OtherNodes(token=TOKEN, nodes=[place]))
    folder.write("node-0.json", job(RankState(rank=0, pid=1)))
    state = next(follow(find_job(str(tmp_path))))
    second = state.ranks[1]
    assert (second.host, second.status) == ("host1", "starting")
    assert second.reason == "node 1 (host1): it has not said where it listens"
