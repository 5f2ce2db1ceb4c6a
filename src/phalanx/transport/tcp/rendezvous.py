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
import math
import os
import socket
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from time import monotonic

from phalanx.core.failure import Failure
from phalanx.errors import (
    AuthenticationError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    DistributedError,
    PeerLostError,
)
from phalanx.transport.tcp.admission import OUT_OF, Acceptor, listen_at, receive, resolve, send
from phalanx.transport.tcp.connection import Mesh
from phalanx.transport.tcp.heartbeat import host_id, process_id
from phalanx.transport.tcp.loop import READ, WRITE
from phalanx.wire.control import (
    Address,
    Attached,
    Endpoint,
    FailureNotice,
    Table,
    decode,
    encode,
    is_loopback,
)
from phalanx.wire.frame import FrameError, Kind
from phalanx.wire.handshake import DialerHandshake, Refused

GRACE = 1.0  # seconds that a rank waits longer than rank 0, which knows who is missing

Drive = Callable[[Callable[[], bool], float], None]
Attach = Callable[[list[Address]], str]  # all addresses -> what went wrong, or ""


class Rendezvous:
    """One rank's part: `run` connects it to all others.

    attach     attaches the memory of local peers, where memory is shared
    listener   of rank 0
    problems   by rank: why it could not attach its local peers' memory, or ""
    """

    def __init__(
        self,
        mesh: Mesh,
        endpoint: Endpoint,
        attach: Attach | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self.mesh = mesh
        self.endpoint = endpoint
        self.problems: dict[int, str] = {}
        self._attach = attach
        self._listener = listener
        self._acceptor: Acceptor | None = None
        self._dials: dict[int, Dial] = {}

    def run(self, timeout: float, drive: Drive) -> list[Address]:
        """Block until all ranks are connected; return the address of each. Lock held.

        `drive(over, deadline)` moves bytes until `over()`.
        """
        mesh, addresses, deadline = self.mesh, self.mesh.addresses, monotonic() + timeout
        ranks = range(mesh.world_size)
        mesh.rendezvous = self._control_came

        def until(met: Callable[[], bool]) -> None:
            """Move bytes until that is so. Raises if the ranks cannot meet, or not in time."""
            over = partial(self._is_over, met)
            drive(over, deadline)
            if not met() and 0 in mesh.connections:
                # Rank 0 knows which ranks are missing, and tells when its own time is over.
                drive(over, deadline + GRACE)
            if not met():
                raise self._too_late(timeout)

        try:
            if mesh.rank == 0:
                assert self._listener is not None
                addresses[0] = self._listen(self._listener)
                until(lambda: mesh.all_known)
                self._tell_all(Kind.TABLE, Table([addresses[rank] for rank in ranks]))
            else:
                self._call(0, self.endpoint)
                until(lambda: 0 in mesh.connections)
                here = self._listen(self._listener_beside(mesh.connections[0].sock))
                mesh.connections[0].send_control(Kind.ADDRESS, encode(here))
                until(lambda: mesh.all_known)
                for peer in range(1, mesh.rank):
                    self._call(peer, Endpoint(addresses[peer].host, addresses[peer].port))
            until(lambda: not self._unconnected())
            everyone = [addresses[rank] for rank in ranks]
            if self._attach is not None:
                self.problems[mesh.rank] = problem = self._attach(everyone)
                self._tell_all(Kind.MEMORY, Attached(problem))
                # One that has said it may be gone already: the others are to be heard all the same.
                until(lambda: all(peer in self.problems for peer in mesh.connections))
        except DistributedError as error:
            if mesh.rank == 0:
                culprit = 0 if error.peer is None else error.peer
                self._tell_all(Kind.FAILURE, Failure(type(error), culprit, 0, str(error)).notice())
            raise
        finally:
            mesh.rendezvous = None
            for dial in self._dials.values():
                dial.drop()
            if self._acceptor is not None:
                self._acceptor.close()
        return everyone

    def _is_over(self, met: Callable[[], bool]) -> bool:
        """Whether that is so. Raises if the ranks cannot meet any more."""
        mesh = self.mesh
        if mesh.told is not None:  # rank 0 has given up, and says why
            raise self._error(mesh.told.error, mesh.told.culprit, mesh.told.reason)
        if mesh.rank:  # rank 0 lets a peer return until it has sent the table
            for peer, reason in mesh.gone.items():
                raise self._error(PeerLostError, peer, f"rank {peer} was lost: {reason}")
        for peer, dial in list(self._dials.items()):
            refusal = dial.refusal
            if refusal is None:
                continue
            if refusal.final:
                by = "turned it away" if refusal.by_peer else "was turned away"
                reason = f"{dial.name} {by}: {refusal.reason}"
                raise self._error(AuthenticationError, peer, reason)
            del self._dials[peer]  # it was there: the first call raises that it is gone
            mesh.engine.peer_lost(peer, f"rank {peer} was lost: {refusal.reason}")
        return met()

    def _error(
        self, kind: type[DistributedError], peer: int | None, reason: str
    ) -> DistributedError:
        rank = self.mesh.rank
        message = f"rank {rank}: rendezvous at {self.endpoint}: {reason}"
        return kind(message, rank=rank, peer=peer, op="rendezvous")

    def _unconnected(self) -> set[int]:
        """Peers whose connection is not open, and that are not known to be gone."""
        mesh = self.mesh
        known = {mesh.rank, *mesh.connections, *mesh.engine.left, *mesh.engine.lost}
        return set(range(mesh.world_size)) - known

    def _listener_beside(self, sock: socket.socket) -> socket.socket:
        """A listener only on the interface that rank 0 reaches."""
        name = sock.getsockname()
        try:
            return listen_at(sock.family, (name[0], 0, *name[2:]))
        except OSError as error:
            reason = f"this rank cannot listen at {name[0]}: {error.strerror or error}"
            raise self._error(BackendUnavailableError, None, reason) from error

    def _listen(self, listener: socket.socket) -> Address:
        """Accept peers at this socket; where that is, for the others."""
        mesh, name = self.mesh, listener.getsockname()
        domain = mesh.domain
        self._acceptor = Acceptor(mesh, listener)
        return Address(
            str(name[0]),
            int(name[1]),
            mesh.host or host_id(),
            process_id(),
            domain.memory if domain is not None else -1,
            domain.wakeup_end if domain is not None else -1,
        )

    def _tell_all(self, kind: Kind, message: Table | Attached | FailureNotice) -> None:
        for connection in list(self.mesh.connections.values()):
            connection.send_control(kind, encode(message))

    def _control_came(self, peer: int, kind: Kind, payload: bytes) -> None:
        """A control frame came. Raises `FrameError` if it makes no sense."""
        mesh = self.mesh
        if kind is Kind.ADDRESS and mesh.rank == 0 and peer not in mesh.addresses:
            address = decode(payload, Address)
            _check_number(peer, address)
            mesh.addresses[peer] = address
        elif kind is Kind.TABLE and peer == 0 and not mesh.addresses:
            table = decode(payload, Table).addresses
            if len(table) != mesh.world_size:
                raise FrameError(f"a table of {len(table)} ranks")
            for rank, address in enumerate(table[1:], 1):
                _check_number(rank, address)
            mesh.addresses.update(enumerate(table))
        elif kind is Kind.MEMORY and peer not in self.problems:
            self.problems[peer] = decode(payload, Attached).problem
        else:
            raise FrameError(f"a {kind.name} frame from rank {peer}")

    def _call(self, peer: int, endpoint: Endpoint) -> None:
        """Connect to a peer: rank 0 may not have started yet, and may be called by a name."""
        mesh, patient = self.mesh, peer == 0
        addresses = resolve(endpoint, numeric=not patient)
        if not mesh.token and not all(is_loopback(str(a[0])) for _, a in addresses):
            raise self._error(
                AuthenticationError,
                peer,
                f"rank {peer} at {endpoint} is another host, and without a token only this host "
                "is trusted; set PHALANX_TOKEN to the same secret on every rank",
            )
        name = f"rank {peer} at {endpoint}"
        self._dials[peer] = Dial(mesh, peer, addresses, patient=patient, name=name)

    def _too_late(self, timeout: float) -> CollectiveTimeoutError:
        mesh, ranks = self.mesh, range(self.mesh.world_size)
        unknown = [rank for rank in ranks if rank not in mesh.addresses]
        unconnected = self._unconnected()
        rejection = self._acceptor.last_rejection if self._acceptor is not None else ""
        turned_away = f" (last turned away: {rejection})" if rejection else ""
        if mesh.rank == 0 and unknown:
            gone = [rank for rank in unknown if rank in mesh.gone]
            never = [rank for rank in unknown if rank not in mesh.gone]
            what = f"{_ranks(unknown)} of {mesh.world_size} did not come{turned_away}"
            what += "".join(f"; rank {rank} came and was lost: {mesh.gone[rank]}" for rank in gone)
            peer = (never or unknown)[0]
        elif 0 in unconnected:
            what, peer = f"rank 0 cannot be reached: {self._dials[0].trouble}", 0
            if self._dials[0].refusals:
                what += " (it has not started, or its group has formed without this rank)"
        elif unknown:
            what, peer = "rank 0 is there, but other ranks did not come (its error names them)", 0
        elif not unconnected:
            silent = [rank for rank in ranks if rank not in self.problems]
            what = f"{_ranks(silent)} did not say whether the memory of all can be attached"
            peer = silent[0]
        else:
            what, peer = f"no connection with {_ranks(sorted(unconnected))}", min(unconnected)
            dial = self._dials.get(peer)
            what += f" (rank {peer}: {dial.trouble})" if dial is not None else turned_away
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

FIRST_RETRY, LAST_RETRY = 0.02, 0.25  # seconds between attempts to reach a peer
FIRST_WAIT, LAST_WAIT = 0.5, 8.0  # seconds for a connection: the kernel tries again too seldom

# Neither means that nobody listens: this host lacks a resource, or the peer hung up at once.
_MAY_PASS = OUT_OF | {
    errno.EAGAIN,
    errno.EADDRNOTAVAIL,
    errno.ECONNRESET,
    errno.EPIPE,
    errno.ETIMEDOUT,
}


class Dial:
    """A call to `peer`. `patient`: it may not have started yet, so a refused connection means
    nothing.

        the peer does not answer the call      call again: it has not started (patient), or its
                                               queue is full of other callers
        it refuses the connection              patient: call again. Else it was there, and is gone
        it hangs up during the handshake       call again: it had to make room, or this rank was
                                               slow
        it turns this rank away, with reason   that is final

    trouble    what the last attempt met
    refusal    why there is no hope, if there is none
    refusals   connections refused, one after the other

    `drop()` ends it. All methods are called with the engine's lock held; none blocks.
    """

    def __init__(
        self,
        mesh: Mesh,
        peer: int,
        addresses: list[tuple[int, tuple[object, ...]]],  # family, socket address
        *,
        patient: bool,
        name: str = "",
    ) -> None:
        self.mesh = mesh
        self.peer = peer
        self.name = name  # for errors
        self.trouble = "no answer yet"
        self.refusal: Refused | None = None
        self.refusals = self.attempts = 0
        self._addresses = addresses
        self._patient = patient
        self._sock: socket.socket | None = None
        self._waits = 0
        self._course = self._call()
        self._go_on(None)

    def drop(self) -> None:
        """Hang up, and do not call again."""
        self._course.close()
        self._hang_up()

    def _hang_up(self) -> None:
        if self._sock is not None:
            self.mesh.reactor.forget(self._sock)
            self._sock.close()
            self._sock = None

    def _go_on(self, ready: bool | None) -> None:
        """Go on until the call waits: for an event of its socket, or for some time."""
        self._waits += 1
        reactor = self.mesh.reactor
        try:
            events, seconds = self._course.send(ready)
        except StopIteration:
            return
        if self._sock is not None:
            reactor.watch(self._sock, lambda *_: self._go_on(True), events)
        if seconds < math.inf:
            reactor.call_later(seconds, partial(self._waited, self._waits))

    def _waited(self, number: int) -> None:
        if number == self._waits:  # it still does
            self._go_on(False)

    def _call(self) -> Generator[tuple[int, float], bool | None, None]:
        """Yields what it waits for, and for how long at most; is sent whether it has come."""
        mesh, retry, wait = self.mesh, FIRST_RETRY, FIRST_WAIT
        while True:
            family, address = self._addresses[self.attempts % len(self._addresses)]
            handshake = DialerHandshake(mesh.identity, mesh.token, self.peer)
            try:
                self._sock = sock = socket.socket(family, socket.SOCK_STREAM)
                sock.setblocking(False)
                with suppress(BlockingIOError):
                    sock.connect(address)
                if not (yield WRITE, wait):
                    wait = min(2 * wait, LAST_WAIT)
                    raise Refused("calls are not answered", final=False)
                _check_connected(sock)
                self.refusals = 0
                self.trouble = "it accepts connections but does not answer; is it another program?"
                send(sock, handshake.start())
                while not handshake.complete:
                    yield READ, math.inf
                    data = receive(sock, handshake.room)
                    if data is not None:
                        send(sock, handshake.receive(data))
            except OSError as error:
                self.trouble = os.strerror(error.errno or 0)
                self.refusals += error.errno not in _MAY_PASS
                if not self._patient and self.refusals >= len(self._addresses):
                    self.refusal = Refused(self.trouble, final=False)
            except Refused as refusal:
                self.trouble = refusal.reason
                if self._sock is not None:
                    with suppress(OSError):  # it may have gone already
                        self._sock.send(handshake.farewell)
                if refusal.final:
                    self.refusal = refusal
            else:
                self._sock = None  # it is the connection's now
                mesh.link_opened(self.peer, sock, handshake.surplus)
                return
            self._hang_up()
            if self.refusal is not None:
                return
            self.attempts += 1
            yield 0, retry
            retry = min(2 * retry, LAST_RETRY)


def _check_connected(sock: socket.socket) -> None:
    """Raise OSError if a call has failed."""
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    try:
        if not code and sock.getsockname() == sock.getpeername():
            # Calling a free local port, the kernel may pick that very port as ours.
            code = errno.ECONNREFUSED
    except OSError:
        code = errno.ECONNRESET
    if code:
        raise OSError(code, os.strerror(code))
