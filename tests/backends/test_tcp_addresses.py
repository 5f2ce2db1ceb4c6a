"""PHALANX_INTERFACE and PHALANX_PORTS: where ranks listen, and what is said when they cannot."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from listening import let_mean_loopback, listening, needs_proc
from ports import unused_port
from test_tcp_acceptor_listeners import new_places
from test_tcp_rendezvous import (  # noqa: F401
    Start,
    _no_token_in_the_environment,
    place,
    start,
    works,
)

from phalanx.errors import BackendUnavailableError, MisuseError
from phalanx.launch.run import Job
from phalanx.launch.store import listen_for_store
from phalanx.native.store_rendezvous import rendezvous_by, route_by
from phalanx.native.torch_formation import GroupFormer
from phalanx.transport.tcp.addresses import (
    ELSEWHERE,
    address_on_interface,
    address_toward,
    allowed_ports,
    chosen_interfaces,
    interfaces,
    listen_as_master,
    listen_on,
    listen_toward,
)
from phalanx.wire.control import Endpoint, is_loopback, parse_address

LOOPBACK = next(one for one in interfaces() if one.address == "127.0.0.1")
OTHERS = [one for one in interfaces() if not is_loopback(one.address) and ":" not in one.address]
needs_network = pytest.mark.skipif(not OTHERS, reason="needs a network beside loopback")


@pytest.fixture(autouse=True)
def _not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PHALANX_INTERFACE", "PHALANX_PORTS", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def range_of_ports(monkeypatch: pytest.MonkeyPatch) -> range:
    """A range with free ports in it, which PHALANX_PORTS names."""
    first = min(unused_port(), 65500)
    monkeypatch.setenv("PHALANX_PORTS", f"{first}-{first + 30}")
    return range(first, first + 31)


def test_the_system_lists_its_interfaces_with_their_addresses() -> None:
    assert LOOPBACK.name in [name for _, name in socket.if_nameindex()]
    assert not [one for one in interfaces() if one.address.startswith("fe80:")]


@pytest.mark.parametrize("text", [LOOPBACK.name, "127.0.0.0/8", "127.0.0.1", "127.3.2.1/8"])
def test_a_name_a_network_or_an_address_says_which(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_INTERFACE", text)
    assert LOOPBACK in chosen_interfaces()
    assert address_on_interface() == "127.0.0.1"
    assert address_toward("node1.invalid", 1, one_host=False) == "127.0.0.1"


def test_the_address_in_use_stays_if_the_interface_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_on_interface("192.0.2.77") == "192.0.2.77"
    monkeypatch.setenv("PHALANX_INTERFACE", LOOPBACK.name)
    chosen = [one.address for one in chosen_interfaces()]
    assert [address_on_interface(own) for own in chosen] == chosen
    assert address_on_interface("192.0.2.77") == "127.0.0.1"
    assert address_on_interface("fd00::77") == ("::1" if "::1" in chosen else "127.0.0.1")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("no-such", "no interface 'no-such'"),
        ("198.51.100.0/24", "no address in 198.51.100.0/24"),
        ("2001:db8::/32", "no address in 2001:db8::/32"),
    ],
)
def test_what_this_host_has_not_is_named_beside_what_it_has(
    text: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_INTERFACE", text)
    with pytest.raises(BackendUnavailableError) as caught:
        listen_as_master(Endpoint("0.0.0.0", 0))
    assert f"PHALANX_INTERFACE={text}: the host {socket.gethostname()} has {what}" in str(
        caught.value
    )
    assert f"it has {', '.join(map(str, interfaces()))}. Set PHALANX_INTERFACE to" in str(
        caught.value
    )


def test_what_is_neither_is_said_to_be_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_INTERFACE", "10.0.0.0/33")
    with pytest.raises(MisuseError, match="neither the name of an interface, such as eth1, nor a"):
        chosen_interfaces()


@pytest.mark.parametrize("text", ["x", "0", "30100-30000", "30000-", "1-65536", "3-4-5", "-7", "٣"])
def test_what_is_no_range_of_ports_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_PORTS", text)
    with pytest.raises(MisuseError, match=r"PHALANX_PORTS=.* is no range of ports: .*30000-30100"):
        allowed_ports()


def test_the_first_free_port_of_the_range_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as held:
        taken = held.enter_context(listen_on("127.0.0.1")).getsockname()[1]
        monkeypatch.setenv("PHALANX_PORTS", str(taken))
        with pytest.raises(BackendUnavailableError) as caught:
            listen_on("127.0.0.1")
        assert f"PHALANX_PORTS={taken}: every port of it is in use at 127.0.0.1" in str(
            caught.value
        )
        assert "give more ports, or end what holds them" in str(caught.value)
        if taken < 65500:
            monkeypatch.setenv("PHALANX_PORTS", f"{taken}-{taken + 30}")
            found = held.enter_context(listen_on("127.0.0.1")).getsockname()[1]
            assert taken < found <= taken + 30


def test_fewer_ports_than_ranks_are_refused_before_any_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").touch()
    monkeypatch.setenv("PHALANX_PORTS", "30000-30001")
    Job(2, str(tmp_path / "script.py")).check()
    with pytest.raises(MisuseError, match="has fewer ports than this host has ranks, 3"):
        Job(3, str(tmp_path / "script.py")).check()


@needs_proc
def test_every_rank_of_a_host_listens_in_the_range(
    start: Start,  # noqa: F811
    range_of_ports: range,
) -> None:
    before = listening()
    listener, address = place()
    early = [start(rank, 3, address, listener=None if rank else listener) for rank in (0, 1)]
    found = new_places(before, 2) - {("127.0.0.1", parse_address(address).port)}
    works(*early, start(2, 3, address))
    assert [(host, port in range_of_ports) for host, port in found] == [("127.0.0.1", True)]


@needs_proc
@needs_network
def test_ranks_listen_on_the_interface_and_not_where_rank_0_is(
    start: Start,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 was given a listener, as a launcher's store has it made."""
    before = listening()
    listener = listen_on(OTHERS[0].address)
    address = str(Endpoint(*listener.getsockname()[:2]))
    monkeypatch.setenv("PHALANX_INTERFACE", LOOPBACK.name)
    early = [start(rank, 3, address, listener=None if rank else listener) for rank in (0, 1)]
    found = new_places(before, 2)
    works(*early, start(2, 3, address))
    assert {host for host, _ in found} == {OTHERS[0].address, "127.0.0.1"}


@needs_network
def test_rank_0_that_is_called_at_another_interface_is_told_both(
    start: Start,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PHALANX_INTERFACE", LOOPBACK.name)
    address = f"{OTHERS[0].address}:{unused_port()}"
    with pytest.raises(BackendUnavailableError) as caught:
        start(0, 2, address, timeout=5).result()
    assert f"called at {address} (MASTER_ADDR)" in str(caught.value)
    assert f"PHALANX_INTERFACE={LOOPBACK.name} says that it listens at 127.0.0.1" in str(
        caught.value
    )


def test_a_wrong_interface_is_told_before_anything_is_sent(
    start: Start,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PHALANX_INTERFACE", "no-such")
    with pytest.raises(BackendUnavailableError, match="no interface 'no-such'"):
        start(1, 2, f"127.0.0.1:{unused_port()}").result()


def test_all_interfaces_stand_for_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_INTERFACE", LOOPBACK.name)
    with listen_as_master(Endpoint("0.0.0.0", 0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_name_that_means_loopback_to_its_own_host_stands_for_the_interface(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    let_mean_loopback("node1", monkeypatch)
    monkeypatch.setenv("PHALANX_INTERFACE", "127.0.0.1")
    for listener in (listen_as_master(Endpoint("node1", 0)), listen_for_store("node1", 0)):
        with listener:
            assert listener.getsockname()[0] == "127.0.0.1"
    assert not caplog.text


@pytest.mark.parametrize("toward", [ELSEWHERE, Endpoint("node1.invalid", 1)])
def test_what_rank_0_says_of_itself_follows_both_variables(
    toward: Endpoint, range_of_ports: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the launcher's store, by torch's, or by MPI; and what a library tells of its mesh."""
    monkeypatch.setenv("PHALANX_INTERFACE", LOOPBACK.name)
    monkeypatch.setenv("MASTER_ADDR", toward.host)
    listener, said = listen_toward(toward, one_host=False)
    by_library = rendezvous_by(lambda block: None, 0, route_by(), one_host=False)
    assert by_library.listener is not None
    with listener, by_library.listener:
        for address in (said, parse_address(by_library.address)):
            assert address.host == "127.0.0.1"
            assert address.port in range_of_ports


@needs_proc
@needs_network
@pytest.mark.parametrize("variable", ["PHALANX_INTERFACE", "GLOO_SOCKET_IFNAME"])
def test_gloo_between_hosts_listens_there_too(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, OTHERS[0].name)
    before = listening()
    former = GroupFormer("gloo", 0, None, "", topology=(0, 1))
    devices = former._devices_of_gloo()
    assert {host for host, _ in listening() - before} == {OTHERS[0].address}
    del devices


def test_ranks_of_one_host_stay_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_toward("node1.invalid", 29500, one_host=True) == "127.0.0.1"
    if OTHERS:
        monkeypatch.setenv("PHALANX_INTERFACE", OTHERS[0].name)
    assert address_toward("node1.invalid", 29500, one_host=True) == "127.0.0.1"
    with listen_as_master(Endpoint("127.0.0.1", 0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_without_a_way_to_others_rank_0_says_what_to_set() -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        listen_toward(Endpoint("node1.invalid", 1), one_host=False)
    assert "by way of 'node1.invalid'" in str(caught.value)
    assert "PHALANX_INTERFACE says which one to take" in str(caught.value)
