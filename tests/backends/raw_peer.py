"""A peer of a `TcpBackend` that the test plays itself, byte by byte, over a real socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from clusters import TIMEOUT, TOKEN, loopback_listener
from framing import framed

from phalanx import TcpBackend
from phalanx.wire.control import Address, FailureNotice, encode
from phalanx.wire.frame import (
    HEADER_SIZE,
    Channel,
    Header,
    Kind,
    pack_header,
    unpack_header,
)
from phalanx.wire.handshake import DialerHandshake, Identity

WORLD = 0  # the group of all ranks
ELSEWHERE = Address("127.0.0.1", 1, "this host")  # of a process that rank 0 does not see


class RawPeer:
    """A rank that has met rank 0, as a stream of bytes. All of it blocks, for 20 s at most."""

    def __init__(
        self, port: int, rank: int = 1, world_size: int = 2, address: Address = ELSEWHERE
    ) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)
        handshake = DialerHandshake(Identity("", 0, rank, world_size), TOKEN.encode(), 0)
        self.sock.sendall(handshake.start())
        while not handshake.complete:
            self.sock.sendall(handshake.receive(self._some()))
        self._ahead = bytearray(handshake.surplus)
        self.send_control(Kind.ADDRESS, encode(address))

    def expect(self, kind: Kind) -> None:
        """The next frame that came is of that kind."""
        header, _ = self.read_frame()
        assert header.channel.kind is kind

    def send_control(self, kind: Kind, payload: bytes = b"", group: int = WORLD) -> None:
        size = len(payload)
        self.sock.sendall(pack_header(Channel(group, kind, 0), length=size, total=size) + payload)

    def fail(self, notice: FailureNotice) -> None:
        """Tell that the group of all ranks is broken."""
        self.send_control(Kind.FAILURE, encode(notice))

    def read_frame(self) -> tuple[Header, bytes]:
        """The next frame that came, but for heartbeats."""
        while True:
            header = unpack_header(self._take(HEADER_SIZE))
            payload = self._take(header.length)
            if header.channel.kind is not Kind.HEARTBEAT:
                return header, payload

    def _take(self, count: int) -> bytes:
        while len(self._ahead) < count:
            self._ahead += self._some()
        taken = bytes(self._ahead[:count])
        del self._ahead[:count]
        return taken

    def _some(self) -> bytes:
        data = self.sock.recv(1 << 16)
        assert data, "rank 0 has hung up"
        return data


def message(payload: bytes, *, tag: int = 0) -> bytes:
    """The bytes of a message that `send` would have sent."""
    return framed(Channel(WORLD, Kind.POINT_TO_POINT, tag), payload)


@contextmanager
def rank_0_and_a_raw_peer(address: Address = ELSEWHERE) -> Iterator[tuple[TcpBackend, RawPeer]]:
    """A real rank 0 of two, and the other one."""
    listener = loopback_listener()
    port = listener.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(
            TcpBackend, 0, 2, f"127.0.0.1:{port}", token=TOKEN, timeout=TIMEOUT, listener=listener
        )
        peer = RawPeer(port, address=address)
        peer.expect(Kind.TABLE)
        backend = made.result()
    try:
        with peer.sock:
            yield backend, peer
    finally:
        backend.close()
