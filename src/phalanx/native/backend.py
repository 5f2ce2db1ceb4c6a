"""Backends over another library: a mesh, formed by way of the library, and its collectives."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from typing import NamedTuple

from typing_extensions import override

from phalanx.errors import BackendUnavailableError, CollectiveTimeoutError
from phalanx.native.base import Library, Natives
from phalanx.transport.backends import MeshBackend
from phalanx.transport.shm.domain import Sharing
from phalanx.transport.tcp.admission import listen_at
from phalanx.wire.control import Endpoint, parse_address

_ELSEWHERE = ("192.0.2.1", 9)  # no host has it (RFC 5737): it is reached by the default route
WHERE_BYTES = 512  # of what rank 0 tells the others, padded with zeros


class Where(NamedTuple):
    """What rank 0 tells the others: where it listens, and the mesh's token.

    listener   rank 0's socket
    """

    address: str
    token: str
    listener: socket.socket | None = None

    def encode(self) -> bytes:
        """As bytes, of one length."""
        return f"{self.address} {self.token}".encode().ljust(WHERE_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Where:
        """What rank 0 has sent."""
        address, token = data.rstrip(b"\0").decode().split(" ")
        return cls(address, token)


def open_mesh(host: str | None) -> Where:
    """On rank 0: listen for the other ranks; at `host`, or at the address of the default route."""
    if host is None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_ELSEWHERE)  # nothing is sent
            host = str(probe.getsockname()[0])
    listener = listen_at(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, 0))
    address = str(Endpoint(host, listener.getsockname()[1]))
    return Where(address, secrets.token_hex(16), listener)


class LibraryBackend(MeshBackend):
    """A mesh for everything but the library's own collectives.

    where   what rank 0 has told all
    join    gives the library's group of all ranks, once the ranks are connected: called with the
            number of the host that each is on
    all_came  whether the library has brought all ranks together: then those that do not come to
            the mesh cannot connect
    """

    sharing = Sharing.HOSTS

    def __init__(
        self,
        rank: int,
        world_size: int,
        where: Where,
        join: Callable[[tuple[int, ...]], Library],
        *,
        name: str,
        timeout: float,
        all_came: bool = False,
        job: str = "",
        generation: int = 0,
    ) -> None:
        try:
            super().__init__(
                rank,
                world_size,
                where.address,
                token=where.token,
                timeout=timeout,
                job=job,
                generation=generation,
                listener=where.listener,
                fall_back=True,
            )
        except CollectiveTimeoutError as error:
            if not all_came:
                raise
            rank0 = parse_address(where.address)
            raise BackendUnavailableError(
                f"rank {rank} on {socket.gethostname()}: {name} brings the ranks together, but "
                f"they cannot connect over TCP, which messages need, to rank 0 at {rank0} within "
                f"{timeout:g} s ({error.message}): may these hosts connect to each other?",
                rank=rank,
                peer=error.peer,
            ) from error
        try:
            self._library = join(self.topology)
        except BaseException:
            super().abort()
            raise
        self._natives = Natives(self.engine, self._library)
        self.engine.native = self._natives.of
        self.native = None if self.engine.strict else self._natives.of(self.group)
        self.devices = self._library.can.devices | self.devices

    @override
    def _leave(self, *, farewell: float) -> None:
        closed = self.engine.closed
        super()._leave(farewell=farewell)
        if not closed:
            self._natives.close()
