"""The rendezvous: ranks that know only rank 0's address connect, each with each.

    rank k  -- calls, proves itself -->  rank 0
    rank k  -- ADDRESS: I listen there -->          (on the interface by which it reached rank 0)
            <-- TABLE: everyone's address --        when the last one has come
    rank k  -- calls, proves itself -->  ranks 1 to k-1
    rank k  -- MEMORY: I have attached my local peers' -->  all         (where memory is shared)

Done when every connection is open, and everyone has said the last. Nobody else may come then, and
nobody comes back: the acceptor is closed, and this rank listens nowhere until it ends.

Of a wide mesh, rank k calls only those of its neighbours whose number is lower, and says MEMORY to
rank 0 alone, which sums it up for all. The last word of rank 0, TABLE or MEMORY, ends its
connections with ranks that are not its neighbours. Everyone goes on listening, rank 0 at another
port than that at which it was called. So rank 0 has to do with each rank for less than a
millisecond, a handshake and two messages, and nobody with all others.
"""

from __future__ import annotations

import ipaddress
import logging
import resource
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import monotonic

import msgspec

from phalanx.core.failure import Failure
from phalanx.errors import (
    AuthenticationError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    DistributedError,
    InvalidWorldSizeError,
    PeerLostError,
    name_ranks,
)
from phalanx.transport.tcp.addresses import address_on_interface, listen_on, resolve
from phalanx.transport.tcp.admission import Acceptor
from phalanx.transport.tcp.dial import Dial
from phalanx.transport.tcp.flooding import Flooding
from phalanx.transport.tcp.heartbeat import host_id, process_id
from phalanx.transport.tcp.mesh import Mesh
from phalanx.wire.control import (
    Address,
    AllAttached,
    Attached,
    CompactTable,
    Endpoint,
    FailureNotice,
    Table,
    decode,
    encode,
    is_loopback,
)
from phalanx.wire.frame import FrameError, Kind

log = logging.getLogger("phalanx")

OWN_FILES = 64  # that rank 0 may need beside its connections
GRACE = 1.0  # seconds that a rank waits longer than rank 0, which knows who is missing

Drive = Callable[[Callable[[], bool], float], None]
Attach = Callable[[list[Address]], str]  # all addresses -> the problem, or ""


class Rendezvous:
    """One rank's part: `run` connects it to all others, or to its neighbours.

    attach     attaches the memory of local peers, where memory is shared
    listener   of rank 0
    wide       of a wide mesh
    problems   by rank: why it could not attach its local peers' memory, or ""
    """

    def __init__(
        self,
        mesh: Mesh,
        endpoint: Endpoint,
        attach: Attach | None = None,
        listener: socket.socket | None = None,
        wide: Flooding | None = None,
    ) -> None:
        self.mesh = mesh
        self.wide = wide
        self.endpoint = endpoint
        self.problems: dict[int, str] = {}
        self._attach = attach
        self._listener = listener
        self._acceptor: Acceptor | None = None
        self._dials: dict[int, Dial] = {}

    def run(self, timeout: float, drive: Drive) -> list[Address]:
        """Block until this rank is connected; return the address of each rank. Lock held.

        `drive(over, deadline)` moves bytes until `over()`.
        """
        mesh, deadline = self.mesh, monotonic() + timeout
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
            self._exchange_addresses(until)
            until(lambda: not self._unconnected())
            everyone = [mesh.addresses[rank] for rank in range(mesh.world_size)]
            if self._attach is not None:
                self.problems[mesh.rank] = self._attach(everyone)
                self._tell_problem()
                # One that has said it may be gone already: the others are to be heard all the same.
                until(lambda: all(peer in self.problems for peer in self._reporters()))
            if self.wide is not None:
                if mesh.rank or self._attach is not None:
                    self._part(self.wide)
                until(self.wide.all_parted)
        except DistributedError as error:
            if mesh.rank == 0:
                culprit = 0 if error.peer is None else error.peer
                self._tell_all(Kind.FAILURE, Failure(type(error), culprit, 0, str(error)).notice())
            raise
        finally:
            mesh.rendezvous = None
            for dial in self._dials.values():
                dial.drop()
            if self._acceptor is not None and not (
                self.wide is not None and self._acceptor is self.wide.acceptor
            ):
                self._acceptor.close()
        return everyone

    def _exchange_addresses(self, until: Callable[[Callable[[], bool]], None]) -> None:
        """Learn all addresses by way of rank 0; begin to call the peers of lower rank."""
        mesh, addresses = self.mesh, self.mesh.addresses
        if mesh.rank == 0:
            assert self._listener is not None
            addresses[0] = self._listen_as_rank_0(self._listener)
            until(lambda: mesh.all_known)
            self._tell_addresses()
            return
        self._call(0, self.endpoint)
        until(lambda: 0 in mesh.connections)
        here = self._listen(self._listener_beside(mesh.connections[0].sock))
        mesh.connections[0].send_control(Kind.ADDRESS, encode(here))
        until(lambda: mesh.all_known)
        for peer in self._peers():
            if 0 < peer < mesh.rank:
                self._call(peer, Endpoint(addresses[peer].host, addresses[peer].port))

    def _peers(self) -> Sequence[int]:
        """Return the ranks with which this one has to be connected."""
        if self.wide is None:
            return range(self.mesh.world_size)
        return self.wide.neighbours if self.mesh.all_known else [0]

    def _reporters(self) -> Iterable[int]:
        """Return the ranks that have to report whether they attached memory."""
        connections = self.mesh.connections
        return connections if self.wide is None or self.mesh.rank == 0 else {0} & connections.keys()

    def _tell_addresses(self) -> None:
        """Tell everyone, as rank 0, the address of each rank."""
        addresses = [self.mesh.addresses[rank] for rank in range(self.mesh.world_size)]
        if self.wide is None:
            self._tell_all(Kind.TABLE, Table(addresses))
            return
        self._tell_all(Kind.TABLE, CompactTable.of(addresses))
        if self._attach is None:
            self._part(self.wide)

    def _tell_problem(self) -> None:
        """Tell all whether this rank has attached memory; of a wide mesh, tell only rank 0."""
        if self.mesh.rank == 0 and self.wide is not None:
            return
        attached = encode(Attached(self.problems[self.mesh.rank]))
        for peer in self._reporters():
            self.mesh.connections[peer].send_control(Kind.MEMORY, attached)

    def _part(self, wide: Flooding) -> None:
        """Say rank 0's last word to all: it and most others have met only for that."""
        mesh = self.mesh
        if mesh.rank:
            if 0 in mesh.connections and 0 not in wide.neighbours:
                mesh.connections.pop(0).close()
            return
        if self._attach is not None:
            blamed = min((rank for rank, why in self.problems.items() if why), default=0)
            self._tell_all(Kind.MEMORY, AllAttached(blamed, self.problems[blamed]))
        for peer in mesh.connections.keys() - set(wide.neighbours):
            wide.part(peer)

    def _is_over(self, met: Callable[[], bool]) -> bool:
        """Return whether `met()` holds. Raises if the ranks cannot meet any more."""
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
                if refusal.world_size:
                    remedy = "; start every rank with the same number of ranks"
                    raise self._error(InvalidWorldSizeError, peer, reason + remedy)
                raise self._error(AuthenticationError, peer, reason)
            del self._dials[peer]  # it was there: the first call raises that it is gone
            mesh.rank_lost(peer, refusal.reason)
        return met()

    def _error(
        self, kind: type[DistributedError], peer: int | None, reason: str
    ) -> DistributedError:
        rank = self.mesh.rank
        message = f"rank {rank}: rendezvous at {self.endpoint}: {reason}"
        return kind(message, rank=rank, peer=peer, op="rendezvous")

    def _unconnected(self) -> set[int]:
        """Return the peers without an open connection that are not known to be gone."""
        mesh = self.mesh
        known = {mesh.rank, *mesh.connections, *mesh.engine.left, *mesh.engine.lost}
        return set(self._peers()) - known

    def _listener_beside(self, sock: socket.socket) -> socket.socket:
        """Return a listener only on the interface that rank 0 reaches, or on PHALANX_INTERFACE."""
        own, _, *scope = sock.getsockname()
        host = own if is_loopback(self.endpoint.host) else address_on_interface(own)
        try:
            return listen_on(host, *(scope if host == own else ()))
        except (OSError, BackendUnavailableError) as error:
            why = getattr(error, "strerror", None) or error
            reason = f"this rank cannot listen at {host}: {why}"
            raise self._error(BackendUnavailableError, None, reason) from error

    def _listen_as_rank_0(self, listener: socket.socket) -> Address:
        """Accept peers at rank 0's address; return the endpoint of later calls, for the table."""
        mesh, wide = self.mesh, self.wide
        if wide is None:
            return self._listen(listener)
        first = self._acceptor = Acceptor(mesh, listener)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY and files < mesh.world_size + OWN_FILES:
            raise self._error(
                BackendUnavailableError,
                None,
                f"this process may have {files} open files, and rank 0 needs one for each of "
                f"{mesh.world_size} ranks until they have met, and {OWN_FILES} for itself: raise "
                "the limit (ulimit -n)",
            )
        here = self._listen(self._listener_beside(listener))
        self._acceptor = first
        return here

    def _listen(self, listener: socket.socket) -> Address:
        """Accept peers at this socket; return its address for the others."""
        mesh, name = self.mesh, listener.getsockname()
        log.debug("rank %d listens at %s", mesh.rank, Endpoint(*name[:2]))
        domain = mesh.domain
        self._acceptor = Acceptor(mesh, listener)
        if self.wide is not None:
            self.wide.acceptor = self._acceptor
        return Address(
            str(name[0]),
            int(name[1]),
            mesh.host or host_id(),
            process_id(),
            domain.memory if domain is not None else -1,
            domain.wakeup_end if domain is not None else -1,
        )

    def _tell_all(
        self, kind: Kind, message: Table | CompactTable | Attached | AllAttached | FailureNotice
    ) -> None:
        payload = encode(message)
        for connection in list(self.mesh.connections.values()):
            connection.send_control(kind, payload)

    def _control_came(self, peer: int, kind: Kind, payload: bytes) -> None:
        """Handle a control frame. Raises `FrameError` if it makes no sense."""
        mesh = self.mesh
        if kind is Kind.ADDRESS and mesh.rank == 0 and peer not in mesh.addresses:
            address = decode(payload, Address)
            _check_numbers({peer: address})
            mesh.addresses[peer] = address
        elif kind is Kind.TABLE and peer == 0 and not mesh.addresses:
            table = self._table(payload)
            if len(table) != mesh.world_size:
                raise FrameError(f"a table of {len(table)} ranks")
            _check_numbers(dict(enumerate(table[1:], 1)))
            mesh.addresses.update(enumerate(table))
        elif kind is Kind.MEMORY and peer not in self.problems:
            if self.wide is not None and mesh.rank:
                whole = decode(payload, AllAttached)
                self.problems |= {peer: "", whole.rank: whole.problem}
            else:
                self.problems[peer] = decode(payload, Attached).problem
        else:
            raise FrameError(f"a {kind.name} frame from rank {peer}")

    def _table(self, payload: bytes) -> list[Address]:
        """Return every rank's address, as rank 0 says. Raises `FrameError`."""
        if self.wide is None:
            return decode(payload, Table).addresses
        addresses = decode(payload, CompactTable).addresses()
        # Rank 0 may not know by which of its own addresses it is reached.
        host = str(self.mesh.connections[0].sock.getpeername()[0])
        return [msgspec.structs.replace(each, host=host) for each in addresses[:1]] + addresses[1:]

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
            what = f"{name_ranks(unknown)} of {mesh.world_size} did not come{turned_away}"
            what += "".join(f"; rank {rank} came and was lost: {mesh.gone[rank]}" for rank in gone)
            peer = (never or unknown)[0]
        elif 0 in unconnected:
            what, peer = f"rank 0 cannot be reached: {self._dials[0].trouble}", 0
            if self._dials[0].refusals:
                what += " (it has not started, or its group has formed without this rank)"
        elif unknown:
            what, peer = "rank 0 is there, but other ranks did not come (its error names them)", 0
        elif not unconnected:
            silent = [rank for rank in self._reporters() if rank not in self.problems]
            what = f"{name_ranks(silent)} did not say whether the memory of all can be attached"
            peer = silent[-1]  # some of them may wait for each other: the last has come last
        else:
            what, peer = f"no connection with {name_ranks(sorted(unconnected))}", min(unconnected)
            dial = self._dials.get(peer)
            what += f" (rank {peer}: {dial.trouble})" if dial is not None else turned_away
        return CollectiveTimeoutError(
            f"rank {mesh.rank}: rendezvous at {self.endpoint}: {what}, within {timeout:g} s",
            rank=mesh.rank,
            peer=peer,
            op="rendezvous",
            seconds=timeout,
        )


def _check_numbers(addresses: Mapping[int, Address]) -> None:
    """Raise `FrameError` unless ranks' addresses are numbers, not names: they are called as is."""
    numbers: set[str] = set()
    for rank, address in addresses.items():
        if address.host not in numbers:
            try:
                ipaddress.ip_address(address.host.partition("%")[0])
            except ValueError:
                raise FrameError(f"rank {rank} listens at a host that is no number") from None
            numbers.add(address.host)
        if not 0 < address.port < 65536:
            raise FrameError(f"rank {rank} listens at port {address.port}")
