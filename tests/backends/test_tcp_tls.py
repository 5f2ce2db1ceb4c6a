"""TLS between ranks that count as being on different hosts, in one process over loopback."""

from __future__ import annotations

import errno
import hashlib
import logging
import socket
import ssl
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from acceptor_step import drive_until, lonely_transport
from clusters import TIMEOUT, TOKEN, Tcp, loopback_listener
from raw_peer import message
from test_tcp_rendezvous import Start, place, start, works  # noqa: F401

import phalanx
from phalanx import (
    AuthenticationError,
    Backend,
    BackendUnavailableError,
    MisuseError,
    PeerLostError,
    TcpBackend,
)
from phalanx.transport.backends import MeshBackend
from phalanx.transport.tcp.admission import speak
from phalanx.transport.tcp.connection import TlsConnection
from phalanx.transport.tcp.tls import Tls, TlsSocket, on_other_host
from phalanx.wire.frame import Channel, Kind, pack_header
from phalanx.wire.handshake import AcceptorHandshake, DialerHandshake, Identity, Stance


def far(_: socket.socket) -> bool:
    """Every connection leads to another host."""
    return True


class FarTls(Tls):
    environ: ClassVar[Mapping[str, str]] = {}
    able: ClassVar[bool] = True

    def __init__(self, token: bytes) -> None:
        super().__init__(token, self.environ, apart=far, able=self.able)


class OffTls(FarTls):
    environ: ClassVar = {"PHALANX_TLS": "off"}


class UnableTls(FarTls):
    able = False


class FarBackend(TcpBackend):
    """Each rank is on a host of its own."""

    security = FarTls


class OffBackend(TcpBackend):
    security = OffTls


class UnableBackend(TcpBackend):
    security = UnableTls


class WideFarBackend(FarBackend):
    each_with_each = 1


class Far(Tcp):
    name = "tcp with TLS"
    kind = FarBackend


class WideFar(Tcp):
    name = "wide with TLS"
    kind = WideFarBackend


class Unable(Tcp):
    name = "without TLS"
    kind = UnableBackend


def connections(backend: Backend) -> list[TlsConnection]:
    assert isinstance(backend, MeshBackend)
    found = list(backend._transport.mesh.connections.values())
    assert all(isinstance(each, TlsConnection) for each in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_collectives_over_tls(size: int) -> None:
    def reduce(backend: Backend) -> str:
        connections(backend)
        for count in (0, 1, 3, 1000, 70_000, 1_500_001):
            tensor = torch.arange(count) + backend.rank
            phalanx.all_reduce_(tensor, backend)
            assert torch.equal(tensor, torch.arange(count) * size + size * (size - 1) // 2)
        return backend.describe() if isinstance(backend, MeshBackend) else ""

    assert all("TLS 1.3, with a token" in words for words in Far().run(reduce, size))


def test_seventeen_ranks_call_each_other_when_they_send_something() -> None:
    def around(backend: Backend) -> int:
        rank, size = backend.rank, backend.world_size
        for step in (1, 5, 8):
            into = torch.empty(40_000, dtype=torch.int64)
            mine = torch.full_like(into, rank)
            backend.sendrecv(mine, (rank + step) % size, into, (rank - step) % size)
            assert into.unique().tolist() == [(rank - step) % size]
        return len(connections(backend))

    assert min(WideFar().run(around, 17)) >= 6


def test_messages_that_nobody_waits_for_stay_where_they_are_and_come_in_order() -> None:
    """Back-pressure, in both directions: more than any buffer, of sizes that cross records."""
    sizes = [1, 7, 40, 16_384, 16_385, 65_536, 100_003, 3, 5_000_000, 2, 700_001]

    def flood(backend: Backend) -> None:
        backend.engine.matching.limit = 1 << 20
        other = 1 - backend.rank
        sent = [
            backend.isend(torch.full((size,), number, dtype=torch.uint8), other)
            for number, size in enumerate(sizes * 3)
        ]
        backend.barrier()
        for number, size in enumerate(sizes * 3):
            into = torch.zeros(size, dtype=torch.uint8)
            backend.recv(into, other)
            assert into.unique().tolist() == [number]
        for work in sent:
            work.wait()

    Far().run(flood, 2)


def test_a_rank_that_computes_between_two_messages_finds_the_second_one() -> None:
    """Both came in one record: no socket becomes readable for the second."""

    def two(backend: Backend) -> None:
        if backend.rank == 0:
            with backend.engine.lock:
                (connection,) = connections(backend)
                frames = [recorded(backend, number) for number in range(300)]
                frames[100:100] = [message(bytes(100_003), tag=8)]  # read into place, in part
                connection.sock.sendall(b"".join(frames))
            backend.barrier()
        else:
            into = torch.ones(100_003, dtype=torch.uint8)
            backend.recv(into, 0, tag=8)
            assert not into.any()
            for number in range(300):
                into = torch.zeros(4, dtype=torch.uint8)
                backend.recv(into, 0, tag=7)
                assert into.tolist() == [number % 256] * 4
            backend.barrier()

    Far().run(two, 2)


def recorded(backend: Backend, number: int) -> bytes:
    """The frame of a small message, as `send` would send it."""
    from framing import framed

    from phalanx.core.call import WORLD_ID

    return framed(Channel(WORLD_ID, Kind.POINT_TO_POINT, 7), bytes([number % 256] * 4))


def test_the_end_of_a_record_is_read_although_no_socket_is_readable() -> None:
    transport, (one, other) = lonely_transport(0, 2), pair()
    with one:
        leave = pack_header(Channel(0, Kind.LEAVE, 0), length=0, total=0)
        one.sendall(message(bytes(100_003)) + leave)
        other.setblocking(False)
        with transport.engine.lock:
            transport.mesh.link_opened(1, other, b"")
        drive_until(transport, lambda: 1 in transport.engine.left)
        with transport.engine.lock:
            transport.shut()


def test_close_waits_until_all_is_sent_and_an_abort_is_a_lost_peer() -> None:
    def leave(backend: Backend) -> None:
        if backend.rank == 0:
            backend.send(torch.ones(3_000_000), 1)
            assert isinstance(backend, MeshBackend)
            backend.close()
        else:
            into = torch.zeros(3_000_000)
            backend.recv(into, 0)
            assert into.sum() == 3_000_000

    Far().run(leave, 2)

    def die(backend: Backend) -> None:
        backend.barrier()
        if backend.rank == 0:
            assert isinstance(backend, MeshBackend)
            backend.abort()
        else:
            with pytest.raises(PeerLostError, match="rank 0 was lost: its connection ended"):
                backend.recv(torch.zeros(1), 0)

    Far().run(die, 2)


# Who cannot, or does not want to ------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ((FarBackend, UnableBackend), "rank 1 lacks TLS .pip install 'phalanx.tls.'., and rank 0"),
        ((UnableBackend, FarBackend), "rank 0 lacks TLS .pip install 'phalanx.tls.'., and rank 1"),
        ((FarBackend, OffBackend), "rank 1 has PHALANX_TLS=off, and rank 0"),
    ],
)
def test_where_only_some_ranks_have_it_the_job_does_not_start_and_one_is_named(
    kinds: tuple[type[TcpBackend], type[TcpBackend]], words: str
) -> None:
    listener = loopback_listener()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(kinds[0], 0, 2, address, token=TOKEN, timeout=1.0, listener=listener)
        with pytest.raises(AuthenticationError, match=words):
            kinds[1](1, 2, address, token=TOKEN, timeout=TIMEOUT)
        with pytest.raises(phalanx.CollectiveTimeoutError, match=words):
            zero.result()


def test_where_none_has_it_one_line_says_that_bytes_are_readable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Unable().run(lambda backend: backend.barrier(), 3)
    (line,) = (r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
    assert "can be read on its way: pip install 'phalanx[tls]' on every host" in line


def test_what_the_environment_says() -> None:
    token = TOKEN.encode()
    assert Tls(token, {}, able=True).stance is Stance.ABLE
    assert Tls(token, {}, able=False).stance is Stance.CANNOT
    assert Tls(token, {"PHALANX_TLS": "off"}, able=True).stance is Stance.OFF
    assert Tls(b"", {"PHALANX_TLS": "require"}, able=False).stance is Stance.OFF, "of this host"
    with pytest.raises(BackendUnavailableError, match=r"PHALANX_TLS=require.*phalanx.tls"):
        Tls(token, {"PHALANX_TLS": "require"}, able=False)
    with pytest.raises(MisuseError, match="on, off or require, not 'yes'"):
        Tls(token, {"PHALANX_TLS": "yes"})
    with pytest.raises(MisuseError, match="given together"):
        Tls(token, {"PHALANX_TLS_CERT": "a"})


def test_two_addresses_of_loopback_are_one_host() -> None:
    with socket.create_server(("127.0.0.2", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        assert caller.getsockname()[0] != caller.getpeername()[0]
        assert not on_other_host(caller)
        caller.close()
        assert not on_other_host(caller), "which is noticed elsewhere"


# One's own certificates ---------------------------------------------------------------------


def openssl(*words: str, folder: Path) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, and a certificate of each."""
    made = tmp_path_factory.mktemp("certificates")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for name in ("ours", "theirs"):
        openssl(
            *("req", "-x509", *key, "-keyout", f"{name}-ca.key", "-out", f"{name}-ca.pem"),
            *("-subj", f"/CN={name}", "-days", "2"),
            folder=made,
        )
        openssl(
            *("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=rank"),
            folder=made,
        )
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{name}-ca.pem", "-days", "2"),
            *("-CAkey", f"{name}-ca.key", "-CAcreateserial", "-out", f"{name}.pem"),
            folder=made,
        )
        (made / f"{name}.key").chmod(0o600)
    return made


def own(folder: Path, name: str, ca: str = "ours") -> dict[str, str]:
    return {
        "PHALANX_TLS_CERT": str(folder / f"{name}.pem"),
        "PHALANX_TLS_KEY": str(folder / f"{name}.key"),
        "PHALANX_TLS_CA": str(folder / f"{ca}-ca.pem"),
    }


def test_own_certificates_of_one_authority_let_each_other_in(folder: Path) -> None:
    class Own(FarTls):
        environ = own(folder, "ours")
        able = False  # they need no package

    one, other = pair(Own, Own)
    der = ssl.PEM_cert_to_DER_cert((folder / "ours.pem").read_text())
    assert one.due == other.due == hashlib.sha256(der).digest()
    one.close()
    other.close()


def test_a_certificate_of_another_authority_is_refused_by_either_side(folder: Path) -> None:
    class Ours(FarTls):
        environ = own(folder, "ours")

    class Theirs(FarTls):
        environ = own(folder, "theirs", ca="theirs")

    with pytest.raises(OSError, match=r"certificate does not hold.*PHALANX_TLS_CA|it ended TLS"):
        pair(Ours, Theirs)


def test_files_that_do_not_fit_or_that_others_can_read_are_named(folder: Path) -> None:
    token = TOKEN.encode()
    with pytest.raises(AuthenticationError, match="are not a certificate, its key"):
        Tls(token, own(folder, "ours") | {"PHALANX_TLS_KEY": str(folder / "theirs.key")})
    (folder / "open.key").write_bytes((folder / "ours.key").read_bytes())
    (folder / "open.key").chmod(0o644)
    with pytest.raises(AuthenticationError, match=r"open.key .PHALANX_TLS_KEY. is open to others"):
        Tls(token, own(folder, "ours") | {"PHALANX_TLS_KEY": str(folder / "open.key")})
    with pytest.raises(AuthenticationError, match=r"nothing.pem .PHALANX_TLS_CERT. cannot be read"):
        Tls(token, own(folder, "ours") | {"PHALANX_TLS_CERT": str(folder / "nothing.pem")})


# The socket ---------------------------------------------------------------------------------

IDENTITY = Identity("", 0, 0, 2)


def raw_pair() -> tuple[socket.socket, socket.socket]:
    with loopback_listener() as listener:
        listener.setblocking(True)
        caller = socket.create_connection(listener.getsockname())
        return caller, listener.accept()[0]


def pair(dialers: type[Tls] = FarTls, acceptors: type[Tls] = FarTls) -> list[TlsSocket]:
    """Two ends of a connection within TLS: the dialer's and the acceptor's. Raises OSError."""
    token, (left, right) = TOKEN.encode(), raw_pair()
    one, other = dialers(token), acceptors(token)
    caller = DialerHandshake(IDENTITY._replace(rank=1), token, 0, one.offer(left))
    called = AcceptorHandshake(IDENTITY, token, lambda _: None, other.offer(right))
    with ThreadPoolExecutor(2) as pool:
        made = [
            pool.submit(speak, left, caller, caller.start(), TIMEOUT, one),
            pool.submit(speak, right, called, b"", TIMEOUT, other),
        ]
        errors = [error for each in made if (error := each.exception()) is not None]
    words = [error for error in errors if getattr(error, "errno", 0) == errno.EBADMSG]
    if errors:
        raise (words or errors)[0]
    return [each.result() for each in made]  # type: ignore[misc]


def test_a_blocking_socket_says_all_and_hears_all() -> None:
    one, other = pair()
    with one, other, ThreadPoolExecutor(1) as pool:
        said = bytes(range(256)) * 20_000
        sending = pool.submit(one.sendall, said)
        heard = b""
        while len(heard) < len(said):
            heard += other.recv(100_000)
        sending.result()
        assert heard == said
        one.close()
        assert other.recv(10) == b""


def test_what_openssl_has_and_the_kernel_has_not_is_not_sent_twice_nor_reported_as_sent() -> None:
    """OpenSSL wants the same bytes again when a socket is full: a sender goes on where it was."""
    said = bytes(range(251)) * 12_000
    for step in (1, 2, 3, 70_001):
        one, other = pair()
        with one, other:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
            one.setblocking(False)
            other.setblocking(False)
            sent, heard, blocked = 0, b"", 0
            for _ in range(50_000):
                try:
                    while sent < len(said):
                        first = memoryview(said)[sent : sent + step]
                        count = one.sendmsg([first, memoryview(said)[sent + step :]])
                        assert count > 0
                        sent += count
                except BlockingIOError:
                    blocked += 1
                    assert sent < len(said), "or nobody would come back"
                with suppress(BlockingIOError):  # half of a record, say
                    while True:
                        heard += other.recv(1 << 20)
                if len(heard) >= len(said):
                    break
            assert blocked
            assert heard == said


def test_reading_less_than_a_record_leaves_the_rest_pending() -> None:
    one, other = pair()
    with one, other:
        one.sendall(b"a record")
        into = bytearray(3)
        assert other.recv_into(memoryview(into)) == 3
        assert other.pending() == 5
        other.setblocking(False)
        assert other.recv(100) == b"ecord"
        with pytest.raises(BlockingIOError):
            other.recv(100)


def test_a_flipped_byte_is_damage_and_both_sides_hear_of_it() -> None:
    one, other = pair()
    with one, other:
        raw = socket.socket(fileno=one.detach())
        with raw, pytest.raises(OSError, match=r"its bytes were changed on the way") as info:
            other.recv(raw.send(b"\x17\x03\x03\x00\x20" + bytes(32)))
        assert info.value.errno == errno.EBADMSG


def test_a_certificate_that_was_not_proved_is_refused() -> None:
    """It is of this job, but not of the process that has proved itself."""
    token, (left, right) = TOKEN.encode(), raw_pair()
    one, other, between = FarTls(token), FarTls(token), FarTls(token)
    caller = DialerHandshake(IDENTITY._replace(rank=1), token, 0, one.offer(left))
    called = AcceptorHandshake(IDENTITY, token, lambda _: None, other.offer(right))
    called.receive(caller.receive(called.receive(caller.start())))
    with ThreadPoolExecutor(1) as pool, between.wrap(right, called) as there:
        pool.submit(there.do_handshake)
        left.settimeout(TIMEOUT)
        with one.wrap(left, caller) as here, pytest.raises(OSError, match="not the one that it"):
            here.recv(1)


# Who goes on in plain text ------------------------------------------------------------------


def call_in_plain_text(address: tuple[str, int], words: bytes) -> socket.socket:
    """Rank 1, which agrees on TLS, and goes on without it."""
    sock = socket.create_connection(address, timeout=TIMEOUT)
    tls = FarTls(TOKEN.encode())
    caller = DialerHandshake(IDENTITY._replace(rank=1), TOKEN.encode(), 0, tls.offer(sock))
    sock.sendall(caller.start())
    while not caller.begins_tls:
        sock.sendall(caller.receive(sock.recv(caller.room)))
    sock.sendall(words)
    return sock


@pytest.mark.parametrize(
    "words",
    [b"PHLX" + bytes(60), b"PHX?\x06\x20\x00" + bytes(32), b"GET / "],
    ids=["frame", "seal", "http"],
)
def test_a_caller_that_goes_on_in_plain_text_is_turned_away_by_name(
    words: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    listener = loopback_listener()
    address = listener.getsockname()
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(
            FarBackend, 0, 2, f"127.0.0.1:{address[1]}", token=TOKEN, timeout=TIMEOUT,
            listener=listener,
        )  # fmt: skip
        with call_in_plain_text(address, words) as sock, suppress(ConnectionError):
            while sock.recv(100):
                pass
        FarBackend(1, 2, f"127.0.0.1:{address[1]}", token=TOKEN, timeout=TIMEOUT).close()
        zero.result().close()
    assert "turned away 127.0.0.1, as rank 1: it speaks plain text where TLS was agreed" in (
        caplog.text
    )


def test_an_acceptor_that_goes_on_in_plain_text_is_refused_by_name() -> None:
    tls = FarTls(TOKEN.encode())
    with loopback_listener() as listener, ThreadPoolExecutor(1) as pool:
        listener.setblocking(True)

        def accept() -> None:
            sock, _ = listener.accept()
            with sock:
                called = AcceptorHandshake(
                    IDENTITY, TOKEN.encode(), lambda _: None, tls.offer(sock)
                )
                while not called.begins_tls:
                    sock.sendall(called.receive(sock.recv(called.room)))
                sock.sendall(b"PHX?\x04\x00\x00")
                while sock.recv(4096):
                    pass

        pool.submit(accept)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(AuthenticationError, match=r"rank 0 .*plain text where TLS was agreed"):
            FarBackend(1, 2, address, token=TOKEN, timeout=TIMEOUT)


def test_a_caller_that_is_silent_within_tls_is_given_up() -> None:
    from acceptor_step import acceptor_step

    with acceptor_step(tick=0.002) as step:
        step._transport.mesh.tls = FarTls(TOKEN.encode())
        with (
            call_in_plain_text(step._address, b"")
            if False
            else socket.create_connection(step._address) as sock
        ):
            tls = FarTls(TOKEN.encode())
            caller = DialerHandshake(
                Identity("", 0, 1, step.world_size), TOKEN.encode(), 0, tls.offer(sock)
            )
            sock.sendall(caller.start())
            step.drive_until(lambda: [k.auth_state for k in step.acceptor.pending] == [2])
            sock.sendall(caller.receive(sock.recv(4096)))
            step.drive_until(lambda: [k.auth_state for k in step.acceptor.pending] == [3])
            step.drive_until(lambda: not step.acceptor.pending)
            assert "did not prove itself" in step.acceptor.last_rejection
