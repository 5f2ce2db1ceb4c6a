"""An acceptor that the test drives itself, with unauthenticated callers."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from clusters import TIMEOUT, TOKEN, loopback_listener

from phalanx.core.engine import Engine
from phalanx.transport.tcp.admission import PATIENCE, TICKS, Acceptor
from phalanx.transport.tcp.transport import TcpTransport
from phalanx.wire.handshake import DialerHandshake, Identity


def lonely_transport(rank: int, world_size: int) -> TcpTransport:
    """The transport of a rank that has met nobody."""
    engine = Engine(rank, world_size)
    identity = Identity("", 0, rank, world_size)
    return TcpTransport(engine, identity, TOKEN.encode(), heartbeat=math.inf)


def drive_until(transport: TcpTransport, done: Callable[[], bool]) -> None:
    """Let a transport work until then."""
    with transport.engine.lock:
        transport.drive(done, monotonic() + 3 * TIMEOUT)
    assert done(), "it did not get there"


class Doorstep:
    """Rank 0 of `world_size`, of which only the acceptor is there; `drive_until` lets it work."""

    def __init__(self, world_size: int, tick: float) -> None:
        self.world_size = world_size
        self._listener = loopback_listener()
        self._address = self._listener.getsockname()
        self._transport = lonely_transport(0, world_size)
        self.acceptor = Acceptor(self._transport.mesh, self._listener, tick=tick)
        self._outside: list[socket.socket] = []

    @property
    def connected(self) -> set[int]:
        """The ranks that were let in."""
        return set(self._transport.mesh.connections)

    def call(self, words: bytes = b"") -> socket.socket:
        """Somebody calls, and says that."""
        sock = socket.create_connection(self._address, timeout=TIMEOUT)
        self._outside.append(sock)
        if words:
            sock.sendall(words)
        return sock

    def rank(self, rank: int) -> tuple[socket.socket, DialerHandshake]:
        """A rank calls and says hello, and has said nothing more so far."""
        call_site = DialerHandshake(Identity("", 0, rank, self.world_size), TOKEN.encode(), 0)
        return self.call(call_site.start()), call_site

    def drive_until(self, done: Callable[[], bool]) -> None:
        """Let the acceptor do its work until then."""
        drive_until(self._transport, done)

    def close(self) -> None:
        with self._transport.engine.lock:
            self.acceptor.close()
            self._transport.shut()
        for sock in self._outside:
            sock.close()


@contextmanager
def acceptor_step(world_size: int = 4, tick: float = PATIENCE / TICKS) -> Iterator[Doorstep]:
    step = Doorstep(world_size, tick)
    try:
        yield step
    finally:
        step.close()


def answer(sock: socket.socket, call_site: DialerHandshake) -> bool:
    """The rank hears what the acceptor has said, and answers; whether it is in."""
    words = sock.recv(4096)
    if words:
        reply = call_site.receive(words)
        if reply:
            sock.sendall(reply)
    return call_site.complete


def hung_up(sock: socket.socket) -> bool:
    """Whether the acceptor has closed that connection. Does not wait."""
    sock.setblocking(False)
    try:
        return sock.recv(4096) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
