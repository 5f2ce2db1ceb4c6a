"""The rendezvous: how ranks that know only rank 0's address come to know everyone's.

    rank k  -- dials, proves itself -->  rank 0
    rank k  -- ADDRESS: I listen there -->          (on the interface by which it reached rank 0)
            <-- TABLE: everyone's address --        when the last one has come

The connections to rank 0 stay and are the ones that messages use later.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from phalanx.backends.tcp.address import listen_at, resolve
from phalanx.backends.tcp.host import host_id
from phalanx.backends.tcp.link import Link
from phalanx.errors import (
    AuthenticationError,
    CollectiveTimeoutError,
    DistributedError,
    PeerLostError,
)
from phalanx.wire.address import Endpoint, is_loopback
from phalanx.wire.frame import FrameError, Header, Kind
from phalanx.wire.handshake import Refused
from phalanx.wire.messages import Address, Table, decode, encode

if TYPE_CHECKING:
    from phalanx.backends.tcp.mesh import Mesh


Drive = Callable[["Rendezvous", float], None]


class Rendezvous:
    """One rank's part. Done when it knows every address, or has failed with `error`."""

    def __init__(self, mesh: Mesh, endpoint: Endpoint) -> None:
        self.mesh = mesh
        self.endpoint = endpoint
        self.done = False
        self.error: DistributedError | None = None
        self._known: dict[int, Address] = {}
        mesh.rendezvous = self

    def run(self, timeout: float, drive: Drive) -> tuple[int, ...]:
        """Block until all ranks have met; return the number of the host of each. Lock held.

        `drive(until, deadline)` moves bytes until `until.done`.
        """
        mesh = self.mesh
        if mesh.rank == 0:
            assert mesh.door is not None
            self._learn(0, self._here(mesh.door.listener))
        else:
            addresses = resolve(self.endpoint)
            if mesh.loopback_only and not all(is_loopback(str(a[0])) for _, a in addresses):
                raise AuthenticationError(
                    f"rank {mesh.rank}: {self.endpoint} is another host, and without a token "
                    "only this host is trusted; set PHALANX_TOKEN to the same secret on every rank",
                    rank=mesh.rank,
                    peer=0,
                )
            mesh.dial(0, addresses, self._refused, patient=True)
        drive(self, monotonic() + timeout)
        if self.error is not None:
            raise self.error
        if not self.done:
            raise self._too_late(timeout)
        mesh.rendezvous = None
        hosts = [self._known[rank].host_id for rank in range(mesh.world_size)]
        return tuple(hosts.index(host) for host in hosts)

    # Called by the mesh ---------------------------------------------------------------------

    def link_opened(self, link: Link) -> None:
        """A peer has proved itself."""
        if self.mesh.rank != 0 and link.peer == 0:
            # Only where rank 0 reaches us: not on other interfaces.
            name = link.sock.getsockname()
            listener = listen_at(link.sock.family, (name[0], 0, *name[2:]))
            self.mesh.open_door(listener)
            link.send_control(Kind.ADDRESS, encode(self._here(listener)))

    def link_lost(self, link: Link, reason: str) -> None:
        """A peer is gone before all have met. Rank 0 lets it come again."""
        if self.mesh.rank == 0:
            self._known.pop(link.peer, None)
        elif link.peer == 0:
            self.error = PeerLostError(
                f"rank {self.mesh.rank}: rank 0 at {self.endpoint} was lost during the "
                f"rendezvous: {reason}",
                rank=self.mesh.rank,
                peer=0,
                op="rendezvous",
            )
            self.done = True

    def control_came(self, link: Link, header: Header, payload: bytes) -> None:
        """An address, or the table of all."""
        kind = header.channel.kind
        if kind is Kind.ADDRESS and self.mesh.rank == 0:
            self._learn(link.peer, decode(payload, Address))
        elif kind is Kind.TABLE and link.peer == 0:
            table = decode(payload, Table).addresses
            if len(table) != self.mesh.world_size:
                raise FrameError(f"a table of {len(table)} ranks")
            for rank, address in enumerate(table):
                self._learn(rank, address)
        else:
            raise FrameError(f"a {kind.name} frame from rank {link.peer}")

    # ----------------------------------------------------------------------------------------

    def _here(self, listener: socket.socket) -> Address:
        name = listener.getsockname()
        return Address(str(name[0]), int(name[1]), host_id())

    def _learn(self, rank: int, address: Address) -> None:
        mesh = self.mesh
        self._known[rank] = address
        if rank not in (0, mesh.rank):
            mesh.addresses[rank] = resolve(Endpoint(address.host, address.port))
        if len(self._known) == mesh.world_size:
            if mesh.rank == 0:
                table = encode(Table([self._known[rank] for rank in range(mesh.world_size)]))
                for link in list(mesh.links.values()):
                    link.send_control(Kind.TABLE, table)
            self.done = True

    def _refused(self, refusal: Refused) -> None:
        by = "rank 0 turned it away" if refusal.by_peer else "it turned rank 0 away"
        self.error = AuthenticationError(
            f"rank {self.mesh.rank}: rendezvous at {self.endpoint}: {by}: {refusal.reason}",
            rank=self.mesh.rank,
            peer=0,
            op="rendezvous",
        )
        self.done = True

    def _too_late(self, timeout: float) -> CollectiveTimeoutError:
        mesh = self.mesh
        if mesh.rank == 0:
            missing = [rank for rank in range(mesh.world_size) if rank not in self._known]
            what = f"{_ranks(missing)} of {mesh.world_size} did not come"
            if mesh.last_rejection:
                what += f" (last turned away: {mesh.last_rejection})"
            peer = missing[0]
        elif 0 in mesh.links:
            what, peer = "rank 0 is there, but other ranks did not come (its error names them)", 0
        else:
            what, peer = f"rank 0 cannot be reached: {mesh.trouble_with(0)}", 0
        return CollectiveTimeoutError(
            f"rank {mesh.rank}: rendezvous at {self.endpoint}: {what}, within {timeout:g} s",
            rank=mesh.rank,
            peer=peer,
            op="rendezvous",
            seconds=timeout,
        )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
