"""TCP: how ranks meet, and what they are told if they do not."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from acceptor_step import lonely_transport
from clusters import TOKEN, loopback_listener
from raw_peer import RawPeer

import phalanx
from phalanx import (
    AuthenticationError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    InvalidRankError,
    InvalidWorldSizeError,
    TcpBackend,
)
from phalanx.transport.tcp.rendezvous import Rendezvous
from phalanx.wire.control import Address, Attached, Endpoint, Table, encode
from phalanx.wire.frame import Channel, Kind, pack_header
from phalanx.wire.handshake import AcceptorHandshake, Identity

PATIENT = 20.0
Start = Callable[..., "Future[TcpBackend]"]


@pytest.fixture(autouse=True)
def _no_token_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PHALANX_TOKEN", "PHALANX_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(rank, size, address, ...)`: makes a backend in a thread; all are closed afterwards."""
    made: list[Future[TcpBackend]] = []

    def start_one(rank: int, size: int, address: str, **options: object) -> Future[TcpBackend]:
        options = {"token": TOKEN, "timeout": PATIENT, **options}
        made.append(pool.submit(TcpBackend, rank, size, address, **options))  # type: ignore[arg-type]
        return made[-1]

    with ThreadPoolExecutor(8) as pool:
        yield start_one
        backends = [f.result() for f in made if f.exception() is None]
        for closing in [pool.submit(backend.close) for backend in backends]:
            closing.result()


def place() -> tuple[socket.socket, str]:
    """A listener for rank 0, and its address."""
    listener = loopback_listener()
    return listener, f"127.0.0.1:{listener.getsockname()[1]}"


def works(*futures: Future[TcpBackend]) -> None:
    """The group that came to be is one in which every rank can talk to every other."""
    backends = [future.result() for future in futures]
    with ThreadPoolExecutor(len(backends)) as pool:
        call = lambda b: phalanx.all_reduce(torch.ones(1), b, algorithm="direct").item()  # noqa: E731
        assert list(pool.map(call, backends)) == [len(backends)] * len(backends)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_of_rank_0_that_comes_late_is_waited_for(
    start: Start, rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of a pod does; `rank` is the one that waits."""
    listener, address = place()
    listener.close()
    real, asked = socket.getaddrinfo, []

    def late(host: str, *args: object, **options: object) -> object:
        if host != "train-0.train":
            return real(host, *args, **options)  # type: ignore[call-overload]
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return real("127.0.0.1", *args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(socket, "getaddrinfo", late)
    name = address.replace("127.0.0.1", "train-0.train")
    places = [name if each == rank else address for each in (0, 1)]
    works(*[start(each, 2, places[each]) for each in (0, 1)])
    assert len(asked) >= 3
    [told] = [one.getMessage() for one in caplog.records if "resolved" in one.getMessage()]
    assert told.startswith(f"the host name in {name} (MASTER_ADDR) cannot be resolved")
    assert told.endswith("Temporary failure in name resolution; it is tried for 20 s")


def test_ranks_may_come_in_any_order_long_before_rank_0(start: Start) -> None:
    with socket.socket() as reserved:  # bound, but not listening: callers are refused
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(CollectiveTimeoutError, match="rank 0 cannot be reached") as info:
            start(2, 3, address, timeout=0.2).result()
        assert (info.value.rank, info.value.peer, info.value.seconds) == (2, 0, 0.2)
        assert "refused" in str(info.value)
        early = [start(rank, 3, address) for rank in (2, 1)]
        reserved.listen()
        reserved.setblocking(False)
        works(start(0, 3, address, listener=reserved.dup()), *early)


def test_a_listener_may_be_an_ordinary_blocking_socket(start: Start) -> None:
    """ "A socket that listens there already" is what `socket.create_server` gives."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    zero = start(0, 2, address, listener=listener, timeout=15)
    one = start(1, 2, address, timeout=15)
    try:
        works(zero, one)
    finally:
        if not zero.done():  # it is in accept(): let it go
            socket.create_connection(listener.getsockname()).close()
            listener.setblocking(False)


def test_rank_0_may_be_given_just_an_address(start: Start) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    works(start(1, 2, address), start(0, 2, address))


def test_ranks_connect_over_ipv6(start: Start) -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this host has no IPv6")
    listener.setblocking(False)
    address = f"[::1]:{listener.getsockname()[1]}"
    ranks = [
        start(rank, 3, address, listener=listener if rank == 0 else None) for rank in (2, 0, 1)
    ]
    works(*ranks)


def test_names_are_addresses_too(start: Start) -> None:
    listener, address = place()
    name = address.replace("127.0.0.1", "localhost")
    works(start(1, 2, name), start(0, 2, address, listener=listener))


def test_the_ranks_that_did_not_come_are_named(start: Start) -> None:
    listener, address = place()
    two = start(2, 4, address)  # it is at the acceptor, or soon will be, when rank 0 opens it
    zero = start(0, 4, address, listener=listener, timeout=1.5)
    with pytest.raises(CollectiveTimeoutError, match=r"ranks 1, 3 of 4 did not come") as info:
        zero.result()
    assert (info.value.rank, info.value.peer, info.value.seconds) == (0, 1, 1.5)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 2: .*ranks 1, 3 of 4 did") as info:
        two.result()  # rank 0, which knows, has told it
    assert info.value.peer == 1


def rank_0_by_hand(listener: socket.socket, size: int) -> socket.socket:
    """Let one rank in, as rank 0 of a job of this size does, and say nothing yet."""
    listener.setblocking(True)
    sock, _ = listener.accept()
    handshake = AcceptorHandshake(Identity("", 0, 0, size), TOKEN.encode(), lambda _: None)
    while not handshake.complete:
        sock.sendall(handshake.receive(sock.recv(1 << 16)))
    return sock


def test_who_has_reached_rank_0_and_hears_of_nobody_else_points_to_its_error(start: Start) -> None:
    listener, address = place()
    one = start(1, 3, address, timeout=1.0)
    words = r"rank 1: .* rank 0 is there, but other ranks did not come \(its error names them\)"
    with listener, rank_0_by_hand(listener, 3):
        with pytest.raises(CollectiveTimeoutError, match=words) as info:
            one.result()
        assert info.value.peer == 0


def test_a_rank_that_is_there_and_takes_no_calls_is_named(start: Start) -> None:
    listener, address = place()
    two = start(2, 3, address, timeout=1.0)
    with listener, rank_0_by_hand(listener, 3) as sock, loopback_listener() as silent:
        ports = [listener.getsockname()[1], silent.getsockname()[1], 1]
        table = encode(Table([Address("127.0.0.1", port, "a host") for port in ports]))
        size = len(table)
        sock.sendall(pack_header(Channel(0, Kind.TABLE, 0), length=size, total=size) + table)
        with pytest.raises(
            CollectiveTimeoutError, match=r"rank 2: .* no connection with rank 1 \(rank 1: "
        ) as info:
            two.result()
        assert info.value.peer == 1


def test_a_port_in_use_says_so() -> None:
    listener, address = place()
    with listener, pytest.raises(BackendUnavailableError, match="port is in use") as info:
        TcpBackend(0, 2, address, token=TOKEN, timeout=1)
    assert address in str(info.value)
    assert "MASTER_PORT" in str(info.value)


def test_an_address_of_another_host_says_so() -> None:
    with pytest.raises(BackendUnavailableError, match="one of the host on which rank 0 runs"):
        TcpBackend(0, 2, "192.0.2.1:29500", token=TOKEN, timeout=1)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost",
        ":29500",
        "localhost:",
        "localhost:0",
        "localhost:65536",
        "localhost:-1",
        "localhost:http",
        "::1:29500",
        "[::1]",
        "[]:29500",
        "http://localhost:29500",
        "localhost:\uff12\uff19\uff15\uff10\uff10",
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_no_address_says_what_one_looks_like(address: str, rank: int) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        TcpBackend(rank, 2, address, token=TOKEN, timeout=1)


@pytest.mark.parametrize("size", [0, -1])
def test_a_world_of_nobody_is_refused(size: int) -> None:
    with pytest.raises(InvalidWorldSizeError, match="at least one rank"):
        TcpBackend(0, size, "127.0.0.1:1")


@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(InvalidRankError, match="not one of the 2 ranks 0 to 1") as info:
        TcpBackend(rank, 2, "127.0.0.1:1")
    assert (info.value.rank, info.value.peer) == (None, rank)


@pytest.mark.parametrize("number", ["1", 1.0, None])
def test_a_rank_and_a_world_size_are_whole_numbers(number: Any) -> None:
    with pytest.raises(TypeError, match=r"^rank is a whole number, not "):
        TcpBackend(number, 2, "127.0.0.1:1")
    for call in (
        lambda: TcpBackend(0, number, "127.0.0.1:1"),
        lambda: phalanx.SimulatedBackend.create_group(number),
        lambda: phalanx.spawn(print, number),
    ):
        with pytest.raises(TypeError, match=r"^world_size is a whole number, not "):
            call()


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_that_is_not_positive_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        TcpBackend(0, 2, "127.0.0.1:1", timeout=timeout)
    gc.collect()  # a socket that was left open would be an error here


def test_a_world_of_one_touches_no_network() -> None:
    """Nobody could listen at, or reach, this address."""
    with TcpBackend(0, 1, "192.0.2.1:1", timeout=5) as backend:
        backend.barrier()
        assert phalanx.all_reduce(torch.ones(2), backend).tolist() == [1, 1]
        assert phalanx.async_all_gather(torch.ones(2), backend).wait().tolist() == [1, 1]
        assert backend.topology == (0,)


def test_without_a_token_only_this_host_is_trusted(start: Start) -> None:
    with pytest.raises(AuthenticationError, match=r"is another host.*set PHALANX_TOKEN") as info:
        TcpBackend(1, 2, "192.0.2.1:29500", timeout=5)
    assert isinstance(info.value, PermissionError)
    listener, address = place()
    works(start(0, 2, address, token=None, listener=listener), start(1, 2, address, token=None))


def test_the_token_of_the_environment_is_the_default(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)
    listener, address = place()
    works(start(0, 2, address, token=None, listener=listener), start(1, 2, address, token=TOKEN))


def test_the_token_may_be_in_a_file(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    monkeypatch.setenv("PHALANX_TOKEN_FILE", str(path))
    listener, address = place()
    works(start(0, 2, address, token=None, listener=listener), start(1, 2, address, token=TOKEN))
    path.chmod(0o644)
    with pytest.raises(AuthenticationError, match="chmod 600"):
        TcpBackend(0, 2, address, timeout=5)


def test_a_token_that_can_be_tried_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AuthenticationError, match=r"token= has 6 bytes.*phalanx token"):
        TcpBackend(0, 2, "127.0.0.1:1", token="secret", timeout=5)
    monkeypatch.setenv("PHALANX_TOKEN", "secret")
    with pytest.raises(AuthenticationError, match=r"PHALANX_TOKEN has 6 bytes"):
        TcpBackend(0, 2, "127.0.0.1:1", timeout=5)


def test_a_rank_that_is_gone_does_not_stand_for_one_that_has_not_said_that_it_attached() -> None:
    """Rank 1 says so and is gone; rank 0 waits for the word of rank 2 all the same."""
    listener = loopback_listener()
    port = listener.getsockname()[1]
    transport = lonely_transport(0, 3)
    rendezvous = Rendezvous(transport.mesh, Endpoint("127.0.0.1", port), lambda _: "", listener)
    peers: dict[int, RawPeer] = {}
    heard: list[set[int]] = []  # who had spoken when rank 1 was gone

    def drive(over: Callable[[], bool], deadline: float) -> None:
        gone = lambda: 1 in transport.engine.lost  # noqa: E731
        transport.drive(lambda: over() or gone(), deadline)
        if gone() and not heard:
            heard.append(set(rendezvous.problems))
            assert not over()
            peers[2].send_control(Kind.MEMORY, encode(Attached("rank 2 has none")))
            transport.drive(over, deadline)

    def meet() -> None:
        with transport.engine.lock:
            rendezvous.run(PATIENT, drive)

    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(meet)
        peers.update({rank: RawPeer(port, rank, 3) for rank in (1, 2)})
        for peer in peers.values():
            peer.expect(Kind.TABLE)
            peer.expect(Kind.MEMORY)
        peers[1].send_control(Kind.MEMORY, encode(Attached("")))
        peers[1].sock.close()
        met.result()
    peers[2].sock.close()
    with transport.engine.lock:
        transport.shut()
    assert heard == [{0, 1}]
    assert rendezvous.problems == {0: "", 1: "", 2: "rank 2 has none"}
