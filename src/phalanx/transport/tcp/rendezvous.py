"""The rendezvous: ranks that know only rank 0's address connect, all with all.

    rank k  -- calls, proves itself -->  rank 0
    rank k  -- ADDRESS: I listen there -->          (on the interface by which it reached rank 0)
            <-- TABLE: everyone's address --        when the last one has come
    rank k  -- calls, proves itself -->  ranks 1 to k-1
    rank k  -- MEMORY: I have attached my local peers' -->  all         (where memory is shared)

Done when every connection is open, and everyone has said the last. Nobody else may come then, and
nobody comes back: the acceptor is closed, and this rank listens nowhere until it ends.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Callable
from time import monotonic

from typing_extensions import override

from phalanx.core.failure import Failure
from phalanx.errors import (
    AuthenticationError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    DistributedError,
    PeerLostError,
)
from phalanx.transport.tcp.admission import Handshaking, listen_at, resolve
from phalanx.transport.tcp.connection import Connection
from phalanx.transport.tcp.heartbeat import host_id, process_id
from phalanx.transport.tcp.mesh import Formation, Mesh
from phalanx.wire.control import Address, Attached, Endpoint, Table, decode, encode, is_loopback
from phalanx.wire.frame import FrameError, Header, Kind
from phalanx.wire.handshake import DialerHandshake, Refused

log = logging.getLogger("phalanx")

GRACE = 1.0  # seconds that a rank waits longer than rank 0, which knows who is missing

Drive = Callable[["Rendezvous", float], None]
Attach = Callable[[list[Address]], str]  # all addresses -> what went wrong, or ""


class Rendezvous(Formation):
    """One rank's part. Done when it is connected to all others, or has failed with `error`."""

    def __init__(self, mesh: Mesh, endpoint: Endpoint, attach: Attach | None = None) -> None:
        self.mesh = mesh
        self.problems: dict[
            int, str
        ] = {}  # by rank: why it could not attach its local peers' memory, or ""
        self.endpoint = endpoint
        self.over = False
        self.error: DistributedError | None = None
        self._known: dict[int, Address] = {}
        self._connected: set[int] = set()
        self._dials: dict[int, Dial] = {}
        self._went: dict[int, str] = {}  # ranks that were connected, and why they are not any more
        self._attach = attach
        mesh.rendezvous = self

    def run(self, timeout: float, drive: Drive) -> list[Address]:
        """Block until all ranks are connected; return the address of each. Lock held.

        `drive(until, deadline)` moves bytes until `until.over`.
        """
        mesh = self.mesh
        try:
            if mesh.rank == 0:
                assert mesh.acceptor is not None
                self._learn(0, self._here(mesh.acceptor.listener))
            else:
                self._call(0, self.endpoint, patient=True)
            drive(self, monotonic() + timeout)
            if not self.over and 0 in mesh.connections:
                # Rank 0 knows which ranks are missing, and tells when its own time is over.
                drive(self, monotonic() + GRACE)
            if not self.over:
                self.error = self._too_late(timeout)
            if mesh.rank == 0 and self.error is not None:
                self._tell(self.error)
        finally:
            mesh.rendezvous = None
            for dial in self._dials.values():
                dial.drop()
        if self.error is not None:
            raise self.error
        if mesh.acceptor is not None:
            mesh.acceptor.close()
            mesh.acceptor = None
        return [self._known[rank] for rank in range(mesh.world_size)]

    # Called by the mesh ---------------------------------------------------------------------

    @override
    def link_opened(self, connection: Connection) -> None:
        """A peer is authenticated."""
        self._dials.pop(connection.peer, None)
        self._connected.add(connection.peer)
        if connection.peer == 0:
            # Only on the interface that rank 0 reaches.
            name = connection.sock.getsockname()
            try:
                listener = listen_at(connection.sock.family, (name[0], 0, *name[2:]))
            except OSError as error:
                reason = f"this rank cannot listen at {name[0]}: {error.strerror or error}"
                self._fail(BackendUnavailableError, None, reason)
                return
            self.mesh.open_acceptor(listener)
            connection.send_control(Kind.ADDRESS, encode(self._here(listener)))
        self._check_done()

    @override
    def link_lost(self, connection: Connection, reason: str) -> None:
        """A peer is gone before all are connected. Rank 0 lets it return until it has the table."""
        if self.mesh.rank == 0 and len(self._known) < self.mesh.world_size:
            self._known.pop(connection.peer, None)
            self._connected.discard(connection.peer)
            self._went[connection.peer] = reason
            log.warning("rank 0: rank %d came and was lost: %s", connection.peer, reason)
        else:
            self._lost(connection.peer, reason)

    @override
    def told(self, failure: Failure) -> None:
        """Rank 0 has given up, and says why. Once all are known, the first call raises it."""
        if len(self._known) < self.mesh.world_size:
            self._fail(failure.error, failure.culprit, failure.reason)

    def _tell(self, error: DistributedError) -> None:
        culprit = 0 if error.peer is None else error.peer
        notice = Failure(type(error), culprit, 0, str(error)).notice()
        for connection in list(self.mesh.connections.values()):
            connection.send_control(Kind.FAILURE, encode(notice))

    @override
    def control_came(self, connection: Connection, header: Header, payload: bytes) -> None:
        """An address, or the table of all."""
        kind = header.channel.kind
        if kind is Kind.ADDRESS and self.mesh.rank == 0 and connection.peer not in self._known:
            address = decode(payload, Address)
            _check_number(connection.peer, address)
            self._learn(connection.peer, address)
        elif kind is Kind.TABLE and connection.peer == 0 and not self._known:
            table = decode(payload, Table).addresses
            if len(table) != self.mesh.world_size:
                raise FrameError(f"a table of {len(table)} ranks")
            for peer, address in enumerate(table[1:], 1):
                _check_number(peer, address)
            self._known = dict(enumerate(table))
            for peer in range(1, self.mesh.rank):
                self._call(peer, Endpoint(table[peer].host, table[peer].port), patient=False)
            self._check_done()
        elif kind is Kind.MEMORY and connection.peer not in self.problems:
            self.problems[connection.peer] = decode(payload, Attached).problem
            self._check_done()
        else:
            raise FrameError(f"a {kind.name} frame from rank {connection.peer}")

    # ----------------------------------------------------------------------------------------

    def _here(self, listener: socket.socket) -> Address:
        name = listener.getsockname()
        mesh = self.mesh
        domain = mesh.domain
        return Address(
            str(name[0]),
            int(name[1]),
            mesh.host or host_id(),
            process_id(),
            domain.memory if domain is not None else -1,
            domain.wakeup_end if domain is not None else -1,
        )

    def _learn(self, rank: int, address: Address) -> None:
        """On rank 0: where another rank listens. When all are known, send the table."""
        mesh = self.mesh
        self._known[rank] = address
        if len(self._known) == mesh.world_size:
            table = encode(Table([self._known[rank] for rank in range(mesh.world_size)]))
            for connection in list(mesh.connections.values()):
                connection.send_control(Kind.TABLE, table)
            self._check_done()

    def _check_done(self) -> None:
        mesh = self.mesh
        everyone = mesh.world_size
        if self.over or len(self._known) < everyone or len(self._connected) < everyone - 1:
            return
        if self._attach is not None:
            if mesh.rank not in self.problems:
                problem = self._attach([self._known[rank] for rank in range(everyone)])
                self.problems[mesh.rank] = problem
                for connection in list(mesh.connections.values()):
                    connection.send_control(Kind.MEMORY, encode(Attached(problem)))
            # One that has said it may be gone already: the others are to be heard all the same.
            if any(peer not in self.problems for peer in mesh.connections):
                return
        self.over = True

    def _call(self, peer: int, endpoint: Endpoint, *, patient: bool) -> None:
        """Connect to a peer; `patient`: it may not have started yet."""
        mesh = self.mesh
        addresses = resolve(endpoint, numeric=peer != 0)  # only what the user gave may be a name
        if mesh.loopback_only and not all(is_loopback(str(a[0])) for _, a in addresses):
            self._fail(
                AuthenticationError,
                peer,
                f"rank {peer} at {endpoint} is another host, and without a token only this host "
                "is trusted; set PHALANX_TOKEN to the same secret on every rank",
            )
            return

        def failed(refusal: Refused) -> None:
            if refusal.final:
                by = "turned it away" if refusal.by_peer else "was turned away"
                reason = f"rank {peer} at {endpoint} {by}: {refusal.reason}"
                self._fail(AuthenticationError, peer, reason)
            else:
                self._lost(peer, refusal.reason)

        self._dials[peer] = Dial(mesh, peer, addresses, failed, patient=patient)

    def _lost(self, peer: int, reason: str) -> None:
        """A peer is gone: without rank 0 the rendezvous fails, else the first call raises it."""
        if len(self._known) < self.mesh.world_size:
            self._fail(PeerLostError, peer, f"rank {peer} was lost: {reason}")
        else:
            self.mesh.engine.peer_lost(peer, f"rank {peer} was lost: {reason}")
            self._connected.add(peer)
            self._check_done()

    def _fail(self, kind: type[DistributedError], peer: int | None, reason: str) -> None:
        rank = self.mesh.rank
        message = f"rank {rank}: rendezvous at {self.endpoint}: {reason}"
        self.error = self.error or kind(message, rank=rank, peer=peer, op="rendezvous")
        self.over = True

    def _too_late(self, timeout: float) -> CollectiveTimeoutError:
        mesh = self.mesh
        unknown = [rank for rank in range(mesh.world_size) if rank not in self._known]
        unconnected = {*range(mesh.world_size)} - self._connected - {mesh.rank}
        if mesh.rank == 0 and unknown:
            missing = unknown
            what = f"{_ranks(missing)} of {mesh.world_size} did not come"
            if mesh.last_rejection:
                what += f" (last turned away: {mesh.last_rejection})"
            gone = [rank for rank in missing if rank in self._went]
            what += "".join(f"; rank {rank} came and was lost: {self._went[rank]}" for rank in gone)
            never = [rank for rank in missing if rank not in self._went]
            peer = (never or missing)[0]
        elif 0 in unconnected:
            what, peer = f"rank 0 cannot be reached: {self._dials[0].trouble}", 0
            if self._dials[0].refused:
                what += " (it has not started, or its group has formed without this rank)"
        elif unknown:
            what, peer = "rank 0 is there, but other ranks did not come (its error names them)", 0
        elif not unconnected:
            silent = [rank for rank in range(mesh.world_size) if rank not in self.problems]
            what = f"{_ranks(silent)} did not say whether the memory of all can be attached"
            peer = silent[0]
        else:
            what, peer = f"no connection with {_ranks(sorted(unconnected))}", min(unconnected)
            if peer in self._dials:
                what += f" (rank {peer}: {self._dials[peer].trouble})"
            elif mesh.last_rejection:
                what += f" (last turned away: {mesh.last_rejection})"
        return CollectiveTimeoutError(
            f"rank {mesh.rank}: rendezvous at {self.endpoint}: {what}, within {timeout:g} s",
            rank=mesh.rank,
            peer=peer,
            op="rendezvous",
            seconds=timeout,
        )


def _check_number(rank: int, address: Address) -> None:
    """What a rank says about itself is called as it stands: a number, never a name."""
    try:
        ipaddress.ip_address(address.host.partition("%")[0])
    except ValueError:
        raise FrameError(f"rank {rank} listens at a host that is no number") from None
    if not 0 < address.port < 65536:
        raise FrameError(f"rank {rank} listens at port {address.port}")


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# ------------------------------------------------------------------------------
# Dialing a peer: again and again, until it accepts this rank.
#
# the peer does not answer the call      call again: it has not started (patient), or its queue
#                                        is full of other callers
# it refuses the connection              patient: call again. Else it was there, and is gone
# it hangs up during the handshake       call again: it had to make room, or this rank was slow
# it turns this rank away, with reason   that is final

FIRST_RETRY, LAST_RETRY = 0.02, 0.25  # seconds between attempts to reach a peer
FIRST_WAIT, LAST_WAIT = 0.5, 8.0  # seconds for a connection: the kernel tries again too seldom

# Neither means that nobody listens: this host lacks a resource, or the peer hung up at once.
_MAY_PASS = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.EADDRNOTAVAIL,
        errno.ECONNRESET,
        errno.EPIPE,
        errno.ETIMEDOUT,
    }
)
_IDLE, _CALLING, _TALKING = range(3)

SocketAddress = tuple[int, tuple[object, ...]]  # family, socket address


class Dial(Handshaking):
    """A call to `peer`. `patient`: it may not have started yet, so a refusal means nothing.

    `failed` is told, once, if there is no hope; `drop()` ends it. `trouble` is what the last
    attempt met. All methods are called with the engine's lock held; none blocks.
    """

    __slots__ = (
        "_addresses",
        "_attempt",
        "_failed",
        "_over",
        "_patient",
        "_refusals",
        "_retry",
        "_stage",
        "_wait",
        "peer",
        "trouble",
    )

    def __init__(
        self,
        mesh: Mesh,
        peer: int,
        addresses: list[SocketAddress],
        failed: Callable[[Refused], None],
        *,
        patient: bool,
    ) -> None:
        self.mesh = mesh
        self.peer = peer
        self.trouble = "no answer yet"
        self._addresses = addresses
        self._failed = failed
        self._patient = patient
        self._attempt = 0
        self._refusals = 0  # connections refused, one after the other
        self._retry = FIRST_RETRY
        self._stage = _IDLE
        self._wait = FIRST_WAIT
        self._over = False
        self._connect()

    @property
    def refused(self) -> bool:
        """Whether the last attempt found nobody listening."""
        return self._refusals > 0

    def drop(self) -> None:
        """Hang up, and do not call again."""
        self._over = True
        self._leave_connection()

    def _connect(self) -> None:
        family, address = self._addresses[self._attempt % len(self._addresses)]
        try:
            super().__init__(self.mesh, socket.socket(family, socket.SOCK_STREAM))
        except OSError as error:
            self._connection_failed(error.errno or 0)
            return
        self._stage = _CALLING
        self.handshake = DialerHandshake(self.mesh.identity, self.mesh.token, self.peer)
        code = self.sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            self._connection_failed(code)
            return
        self.mesh.reactor.watch(self.sock, self._on_connected, read=False, write=True)
        sock = self.sock
        self.mesh.reactor.call_later(self._wait, lambda: self._check_connected(sock))

    def _check_connected(self, sock: socket.socket) -> None:
        if self._stage == _CALLING and self.sock is sock:
            self._wait = min(2 * self._wait, LAST_WAIT)
            self._try_again("calls are not answered")

    def _on_connected(self, readable: bool, writable: bool) -> None:
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if not code and self.sock.getsockname() == self.sock.getpeername():
                # Calling a free local port, the kernel may pick that very port as ours.
                code = errno.ECONNREFUSED
        except OSError:
            code = errno.ECONNRESET
        if code:
            self._connection_failed(code)
            return
        handshake = self.handshake
        assert isinstance(handshake, DialerHandshake)
        self._stage = _TALKING
        self._refusals = 0
        self.trouble = "it accepts connections but does not answer"
        self.mesh.reactor.watch(self.sock, self._on_ready)
        try:
            self.send(handshake.start())
        except Refused as refusal:
            self._try_again(refusal.reason)

    def _on_ready(self, readable: bool, writable: bool) -> None:
        handshake = self.handshake
        try:
            data = self.read(handshake.room)
            if data is not None:
                self.send(handshake.receive(data))
        except Refused as refusal:
            self.say_farewell()
            if refusal.final:
                self._give_up(refusal)
            else:
                self._try_again(refusal.reason)
            return
        if handshake.complete:
            self._over = True
            self._stage = _IDLE  # the socket belongs to the mesh now
            self.open()

    def _connection_failed(self, code: int) -> None:
        reason = os.strerror(code)
        if code not in _MAY_PASS:
            self._refusals += 1
            if not self._patient and self._refusals >= len(self._addresses):
                self._give_up(Refused(reason, peer=self.peer, final=False))
                return
        self._try_again(reason)

    def _try_again(self, reason: str) -> None:
        self.trouble = reason
        self._leave_connection()
        self._attempt += 1
        self.mesh.reactor.call_later(self._retry, self._call_again)
        self._retry = min(2 * self._retry, LAST_RETRY)

    def _call_again(self) -> None:
        if not self._over:
            self._connect()

    def _give_up(self, refusal: Refused) -> None:
        self.drop()
        self._failed(refusal)

    def _leave_connection(self) -> None:
        if self._stage != _IDLE:
            self._stage = _IDLE
            self.hang_up()
