"""A server of the launcher: an error inside costs one caller, and not the port."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from phalanx.errors import BackendUnavailableError
from phalanx.launch.server import DoorServer
from phalanx.launch.store import StoreServer, connect_store
from phalanx.ops.observe.watch.folder import WatchFolder
from phalanx.ops.observe.watch.nodes import RemoteNode, WatchServer
from phalanx.ops.observe.watch.state import JobState

TOKEN = "a token of the tests of servers"
PATIENCE = 20.0


def store_of(folder: Path) -> DoorServer:
    return StoreServer(socket.create_server(("127.0.0.1", 0)), TOKEN.encode())


def watch_server_of(folder: Path) -> DoorServer:
    watched = WatchFolder(folder)
    watched.write("node-0.json", JobState(name="", world_size=0, time=time.time(), ranks=[]))
    return WatchServer(watched, socket.create_server(("127.0.0.1", 0)), TOKEN.encode())


def ask_store(server: DoorServer) -> bool:
    """Whether it answers."""
    store = connect_store(server.endpoint, TOKEN, time.monotonic() + PATIENCE)
    with closing(store):
        try:
            return store.add("key", 1) > 0
        except BackendUnavailableError:
            return False


def watch(server: DoorServer) -> bool:
    with closing(RemoteNode("", server.endpoint, TOKEN.encode())) as remote:
        remote.take()
        return remote.latest is not None


SERVERS = [(store_of, ask_store), (watch_server_of, watch)]


@pytest.mark.parametrize(("make", "answers"), SERVERS, ids=["store", "watch"])
def test_an_error_inside_does_not_close_the_port(
    make: Callable[[Path], DoorServer],
    answers: Callable[[DoorServer], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(make(tmp_path)) as server:

        def fail(peer: int, sock: socket.socket, surplus: bytes) -> None:
            sock.close()
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(server, "link_opened", fail)
            assert not answers(server)
        assert answers(server)
        assert "can't start new thread" in caplog.text


@pytest.mark.parametrize("make", [store_of, watch_server_of], ids=["store", "watch"])
def test_after_an_error_callers_that_say_nothing_still_have_to_leave(
    make: Callable[[Path], DoorServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock by which they leave goes on, also if the error was in its tick."""
    with closing(make(tmp_path)) as server:
        acceptor = server._acceptor
        acceptor.tick = 0.001

        def fail(*_: object) -> None:
            raise RuntimeError("in a tick")

        for turn_away in (fail, acceptor.turn_away):
            monkeypatch.setattr(acceptor, "turn_away", turn_away)
            with socket.create_connection(server.endpoint, PATIENCE) as silent:
                assert silent.recv(1) == b""  # hung up on


def test_an_error_in_a_request_costs_its_client_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(StoreServer(socket.create_server(("127.0.0.1", 0)), TOKEN.encode())) as server:
        deadline = time.monotonic() + PATIENCE
        with closing(connect_store(server.endpoint, TOKEN, deadline)) as other:
            other.set("key", "value")
            with monkeypatch.context() as patched:
                patched.setattr(server, "answer", lambda request: {}[request.op])
                assert not ask_store(server)
            assert other.get("key") == b"value"
