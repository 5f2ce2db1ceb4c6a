"""A server of the launcher: an error inside costs one caller, and not the port."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from typing_extensions import override

from phalanx.errors import BackendUnavailableError
from phalanx.launch.server import DoorServer
from phalanx.launch.store import StoreReply, StoreRequest, StoreServer, connect_store
from phalanx.ops.observe.watch.folder import WatchFolder
from phalanx.ops.observe.watch.nodes import RemoteNode, WatchServer
from phalanx.ops.observe.watch.state import JobState

TOKEN = "a token of the tests of servers"
PATIENCE = 20.0


class Faulty(DoorServer):
    """A server in which letting callers in, or answering them, fails while a test wants it."""

    letting_in = answering = False  # whether that fails

    @override
    def link_opened(self, peer: int, sock: socket.socket, surplus: bytes) -> None:
        if self.letting_in:
            sock.close()
            raise RuntimeError("can't start new thread")
        super().link_opened(peer, sock, surplus)


class FaultyStore(Faulty, StoreServer):
    @override
    def answer(self, request: StoreRequest) -> StoreReply:
        if self.answering:
            raise KeyError(request.op)
        return super().answer(request)


class FaultyWatchServer(Faulty, WatchServer):
    pass


def store_of(folder: Path) -> FaultyStore:
    return FaultyStore(socket.create_server(("127.0.0.1", 0)), TOKEN.encode())


def watch_server_of(folder: Path) -> FaultyWatchServer:
    watched = WatchFolder(folder)
    watched.write("node-0.json", JobState(name="", world_size=0, time=time.time(), ranks=[]))
    return FaultyWatchServer(watched, socket.create_server(("127.0.0.1", 0)), TOKEN.encode())


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
    make: Callable[[Path], Faulty],
    answers: Callable[[DoorServer], bool],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(make(tmp_path)) as server:
        server.letting_in = True
        assert not answers(server)
        server.letting_in = False
        assert answers(server)
        assert "can't start new thread" in caplog.text


@pytest.mark.parametrize("make", [store_of, watch_server_of], ids=["store", "watch"])
def test_after_an_error_callers_that_say_nothing_still_have_to_leave(
    make: Callable[[Path], DoorServer], tmp_path: Path
) -> None:
    """The clock by which they leave goes on, also if the error was in its tick: in its log here."""
    failed: list[str] = []

    def fail_once(record: logging.LogRecord) -> bool:
        if not failed and "turned away" in record.getMessage():
            failed.append(record.getMessage())
            raise RuntimeError("in a tick")
        return True

    with closing(make(tmp_path)) as server, ExitStack() as undone:
        server._acceptor.tick = 0.001
        log = logging.getLogger("phalanx")
        log.addFilter(fail_once)
        undone.callback(log.removeFilter, fail_once)
        for _ in range(2):
            with socket.create_connection(server.endpoint, PATIENCE) as silent:
                assert silent.recv(1) == b""  # hung up on
        assert failed


def test_an_error_in_a_request_costs_its_client_only(tmp_path: Path) -> None:
    with closing(store_of(tmp_path)) as server:
        deadline = time.monotonic() + PATIENCE
        with closing(connect_store(server.endpoint, TOKEN, deadline)) as other:
            other.set("key", "value")
            server.answering = True
            assert not ask_store(server)
            server.answering = False
            assert other.get("key") == b"value"
