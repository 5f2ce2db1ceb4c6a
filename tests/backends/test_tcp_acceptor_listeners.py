"""Where ranks and launchers listen: on the interface in use, and not for longer than needed."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from listening import everywhere, let_mean_loopback, listening, needs_proc
from ports import unused_port
from test_tcp_rendezvous import (  # noqa: F401
    Start,
    _no_token_in_the_environment,
    place,
    start,
    works,
)
from waiting import wait_until

from phalanx.launch.store import StoreServer, connect_store, listen_for_store

pytestmark = needs_proc


def new_places(before: set[tuple[str, int]], count: int) -> set[tuple[str, int]]:
    """Where this process listens in addition, once there are so many places."""

    def found() -> set[tuple[str, int]]:
        places = listening() - before
        return places if len(places) >= count else set()

    return wait_until(found, f"it listens at {count} places")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_every_rank_listens_on_one_interface_during_the_rendezvous_and_nowhere_afterwards(
    start: Start,  # noqa: F811
    host: str,
) -> None:
    if host == "[::1]" and not _has_ipv6():
        pytest.skip("this host has no IPv6")
    before = listening()
    address = f"{host}:{unused_port()}"
    early = [start(rank, 3, address) for rank in (0, 1)]
    found = new_places(before, 2)
    assert len(found) == 2, "rank 0 and rank 1"
    assert everywhere(found) == set()
    assert {place[0] for place in found} <= {"127.0.0.1", "::1"}
    works(*early, start(2, 3, address))
    assert listening() - before == set()


def test_rank_0_listens_on_all_interfaces_only_if_it_is_told_to(start: Start) -> None:  # noqa: F811
    before = listening()
    port = unused_port()
    zero = start(0, 2, f"0.0.0.0:{port}")
    assert new_places(before, 1) == {("0.0.0.0", port)}
    one = start(1, 2, f"127.0.0.1:{port}")
    works(zero, one)
    assert listening() - before == set()


def test_a_given_listener_is_closed_too(start: Start) -> None:  # noqa: F811
    before = listening()
    listener, address = place()
    works(start(0, 2, address, listener=listener), start(1, 2, address))
    assert listener.fileno() == -1
    assert listening() - before == set()


@pytest.fixture
def held() -> Iterator[set[tuple[str, int]]]:
    """What a launcher's store on this host listens at."""
    before = listening()
    with closing(StoreServer(listen_for_store("127.0.0.1", 0), b"")) as store:
        client = connect_store(store.endpoint, "", time.monotonic() + 10.0)
        client.set("key", "value")
        assert client.get("key") == b"value"
        yield listening() - before
        client.close()


def test_the_store_of_the_launcher_listens_on_loopback(held: set[tuple[str, int]]) -> None:
    assert [host for host, _ in held] == ["127.0.0.1"]


def test_a_store_that_has_to_listen_on_all_interfaces_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    let_mean_loopback("node1", monkeypatch)
    before = listening()
    listener = listen_for_store("node1", 0)
    found = listening() - before
    listener.close()
    assert everywhere(found) == found != set()
    assert "node1 means 127.0.1.1 on this host" in caplog.text
    assert "all of its interfaces" in caplog.text


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
