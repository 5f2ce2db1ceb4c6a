"""`MeshBackend`: backends whose ranks are processes, connected over TCP; and how they differ."""

from __future__ import annotations

import atexit
import hmac
import logging
import math
import os
import socket
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar, Literal

from phalanx.core.backend import DEFAULT_TIMEOUT, Backend
from phalanx.core.call import check_timeout, check_world_size, whole_number
from phalanx.core.device import device_kinds
from phalanx.core.engine import Engine
from phalanx.core.transport import IN_SHARED_MEMORY
from phalanx.errors import BackendUnavailableError, DistributedError, InvalidRankError
from phalanx.transport.crowding import Crowding
from phalanx.transport.shm.domain import HostDomain
from phalanx.transport.tcp.addresses import check_listening, listen_as_master, with_interface
from phalanx.transport.tcp.admission import check_token, find_token
from phalanx.transport.tcp.dial import await_name
from phalanx.transport.tcp.heartbeat import check_heartbeat
from phalanx.transport.tcp.rendezvous import Rendezvous
from phalanx.transport.tcp.tls import Tls
from phalanx.transport.tcp.transport import EACH_WITH_EACH, TcpTransport
from phalanx.wire.control import Address, Endpoint, parse_address
from phalanx.wire.handshake import Identity

log = logging.getLogger("phalanx")

FAREWELL = 5.0  # seconds that close() waits at most for sent bytes to leave


class MeshBackend(Backend):
    """One rank of a group whose ranks are processes, connected over TCP: the common base.

    sharing   the ranks that have memory in common: none; those of each host; all, which have to be
              on one host
    each_with_each  ranks up to which all are connected from the start
    security  the TLS settings, made of the token
    """

    sharing: ClassVar[Literal["none", "hosts", "all"]] = "none"
    each_with_each: ClassVar[int] = EACH_WITH_EACH
    security: ClassVar[type[Tls]] = Tls

    def __init__(
        self,
        rank: int,
        world_size: int,
        master_addr: str,
        *,
        token: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        job: str = "",
        generation: int = 0,
        listener: socket.socket | None = None,
        heartbeat: float | None = None,
        host: str = "",
        fall_back: bool = False,
    ) -> None:
        check_rank(rank, world_size)
        check_timeout(timeout)
        endpoint = parse_address(master_addr)
        seconds = check_heartbeat(heartbeat)
        secret = find_token() if token is None else token and check_token(token, "token=")
        engine = Engine(rank, world_size)
        transport = TcpTransport(
            engine,
            Identity(job, generation, rank, world_size),
            secret.encode(),
            heartbeat=seconds,
            each_with_each=self.each_with_each,
            tls=self.security(secret.encode()),
        )
        super().__init__(engine, timeout=timeout)
        self._transport = transport
        self.devices = device_kinds()
        self.links = self.links._replace(processors=os.cpu_count() or math.inf)
        if self.sharing == "hosts":
            self.links = self.links._replace(inside=IN_SHARED_MEMORY)
        mesh = transport.mesh
        mesh.host = host
        try:
            if world_size > 1:
                self._meet(endpoint, listener, fall_back=fall_back)
        except BaseException:
            with engine.lock:
                transport.shut()
            raise
        finally:
            if listener is not None and (rank != 0 or world_size == 1):
                listener.close()
            if mesh.domain is not None and transport.domain is None:  # it came to nothing
                mesh.domain.close()
        # A process that ends without close() says goodbye all the same, so that its last messages
        # are not lost with it.
        self._at_exit = CloseAtExit(self)

    def _meet(self, endpoint: Endpoint, listener: socket.socket | None, *, fall_back: bool) -> None:
        """Connect to all other ranks, and attach the memory of those of this host.

        Each rank tells the others the place of its directory, attaches the directories of its host,
        and then reports success or failure. No rank goes on before all have reported. So either all
        succeed, or all know which rank did not, and why.
        """
        rank, transport, mesh = self.rank, self._transport, self._transport.mesh
        domain, why_not = None, ""
        check_listening()
        if listener is None:
            await_name(endpoint, self.timeout)
        if self.sharing != "none":
            try:
                domain = self._new_domain()
            except (OSError, AttributeError) as error:  # of a system that has no memfd_create
                why_not = str(error)
        mesh.domain = domain

        def attach(addresses: list[Address]) -> str:
            if domain is None:
                return f"it has no memory to share ({why_not}): that needs Linux (memfd, /proc)"
            return domain.attach(addresses, one_host=self.sharing == "all" and not fall_back)

        if rank == 0:
            listener = listener or listen_as_master(endpoint)
        with self.engine.lock:
            attached = attach if self.sharing != "none" else None
            rendezvous = Rendezvous(mesh, endpoint, attached, listener, transport.wide)
            addresses = rendezvous.run(self.timeout, transport.drive)
            here = addresses[rank].host_id
            transport.heartbeat.begin(  # of processes of this host that can be looked at
                {
                    peer: address.process
                    for peer, address in enumerate(addresses)
                    if peer != rank and address.host_id == here and address.process
                }
            )
        hosts = [address.host_id for address in addresses]
        self.topology = tuple(hosts.index(host) for host in hosts)
        if hosts.count(here) <= self.links.processors:
            mesh.crowding = Crowding()
        if self._all_attached(rendezvous.problems, fall_back=fall_back) and domain is not None:
            with self.engine.lock:
                transport.share(domain)
                self.share(transport.shared(self.group))

    def _new_domain(self) -> HostDomain:
        who, token = self._transport.mesh.identity, self._transport.mesh.token
        text = f"phalanx memory {who.generation} {who.job}".encode()
        return HostDomain(self.rank, self.world_size, hmac.digest(token, text, "sha256")[:8])

    def _all_attached(self, problems: Mapping[int, str], *, fall_back: bool) -> bool:
        """Return whether every rank has attached the memory of its host.

        If not, raises `BackendUnavailableError`; or, with `fall_back`, rank 0 logs a warning.
        """
        for blamed, problem in sorted(problems.items()):
            if not problem:
                continue
            rank, what = self.rank, f"the ranks do not share memory: rank {blamed} says: {problem}"
            if fall_back:
                level = logging.WARNING if rank == 0 else logging.DEBUG
                log.log(level, "%s; all goes over TCP", what)
                return False
            raise BackendUnavailableError(
                f"rank {rank}: {what}; use backend='hybrid' for several hosts, 'tcp' where "
                "processes may not see each other",
                rank=rank,
                peer=None if blamed == rank else blamed,
            )
        return True

    def describe(self) -> str:
        """Return a line for the log: the group's ranks, their connections and hosts."""
        mesh, ranks = self._transport.mesh, Counter(self.topology).values()
        hosts = f"{len(ranks)} host{'s' if len(ranks) > 1 else ''}"
        if len(ranks) > 1:
            few, many = min(ranks), max(ranks)
            hosts += f" ({few} each)" if few == many else f" ({few} to {many} each)"
        how = "TCP"
        if self._transport.domain is not None and max(ranks) > 1:
            how = "shared memory" if len(ranks) == 1 else "shared memory inside a host, TCP between"
        place = with_interface(mesh.addresses[self.rank].host)
        token = "TLS 1.3, with" if mesh.speaks_tls else "with" if mesh.token else "without"
        return (
            f"{self.world_size} ranks on {hosts}: {how}; rank {self.rank} at {place}; "
            f"{token} a token"
        )

    def close(self) -> None:
        """Leave: peers that wait for this rank get a `PeerLostError` that says that it left.

        Waits until the bytes of completed sends have reached the peers' hosts, 5 seconds at most.
        If the ranks disagreed and no call of this rank has raised it, the log says so.
        """
        self._leave(farewell=FAREWELL)

    def abort(self) -> None:
        """Leave as if this rank had died: the groups that it is in are broken."""
        self._leave(farewell=0.0)

    def _leave(self, *, farewell: float) -> None:
        engine, transport = self.engine, self._transport
        if engine.forked:
            return
        with engine.lock:
            if engine.closed:
                return
            if farewell:
                transport.look()  # word of a failure may be waiting
            for group in list(engine.groups.values()):
                group.close()
            engine.run_ready()
            if farewell:
                transport.say_goodbye(farewell)
            transport.shut()
            engine.copies.clear()
        self._at_exit.cancel()
        for callback in engine.at_close:
            callback()


def check_rank(rank: int, world_size: int) -> None:
    """Raise `InvalidWorldSizeError` or `InvalidRankError` unless there can be such a rank."""
    if not 0 <= whole_number(rank, "rank") < check_world_size(world_size):
        raise InvalidRankError(
            f"rank {rank} is not one of the {world_size} ranks 0 to {world_size - 1}", peer=rank
        )


# ------------------------------------------------------------------------------
# `TcpBackend`: ranks are processes, on any hosts.


class TcpBackend(MeshBackend):
    """One rank of a group whose ranks talk over TCP, IPv4 or IPv6.

        backend = TcpBackend(rank, world_size, "10.0.0.1:29500")    # where rank 0 listens

    Blocks until all ranks have met and are connected, each with each; those that start early try
    again until the others are there.

    rank, world_size  which one this is, of how many
    master_addr       `"host:port"` (`"[::1]:29500"` for IPv6) where rank 0 listens; the host is one
                      of its own addresses, and it listens there only
    token             the job's secret, the same on every rank, of 16 bytes at least; by default
                      that of PHALANX_TOKEN, or of the file PHALANX_TOKEN_FILE, which only its owner
                      may read. Without one (or with ""), only ranks on this host are let in
    timeout           seconds that a call waits at most, the rendezvous of the ranks included
    job, generation   ranks of another job, or of an earlier start of it, are turned away
    listener          for rank 0: a socket that listens at `master_addr` already
    heartbeat         seconds within which a call that waits knows of a peer that is stopped or
                      cannot be reached: 3, or PHALANX_HEARTBEAT. `math.inf`: never, but for the
                      timeout. One that holds Python's interpreter for longer than 2/3 of that, on
                      another host, is taken for stopped

    # Notes
    Once all are connected nobody listens any more. A message is sent when the kernel has taken it;
    those of each peer that nobody has asked for are kept by this process, in up to 256 MiB of
    memory (0.4 to 1.8 KiB a message, and its content), whenever it is in a call of this backend,
    those of collectives that the peer has issued ahead among them. Beyond that the peer waits, and
    so does what it sends behind.

    Of more than 16 ranks, each is connected with 1 + log2(world_size) others at most when this
    returns. The first message to another one waits for a new connection. By way of the first few
    every rank hears of ranks that died or left. A thread of each rank passes that on, and takes
    connections, while the rank is in no call; it listens until it closes. A connection takes
    64 KiB, and the kernel's memory for a socket.

    Raises `InvalidWorldSizeError` (also if rank 0 has another one), `InvalidRankError`,
    `BackendUnavailableError` (the port is in use, the address is not this host's, rank 0 may open
    fewer files than there are ranks), `AuthenticationError` (another token or job; a token of less
    than 128 bits, or in a file that others can read), `CollectiveTimeoutError` (naming the ranks
    that did not come).
    """


# ------------------------------------------------------------------------------
# `SharedMemoryBackend` and `HybridBackend`: ranks that have memory in common.


class SharedMemoryBackend(MeshBackend):
    """One rank of a group whose ranks are processes of one host, and share memory.

    Collectives are done in it: each rank reads what it needs straight from its peers' memory, after
    a look at a flag, and writes in its own only. Tensors from `empty` are in that memory and are
    read where they are; others are staged, in pieces of bounded size. Messages, words of failure
    and signs of life go over TCP, as with `TcpBackend`, whose arguments these are; so a dead or
    stopped peer is known as soon.

    A rank that waits looks at the flags for a short while, in which it offers the processor to
    others, and then sleeps until a peer wakes it. The memory has no name: when the last process
    ends, in whatever way, it is free.

    With `fall_back`, ranks that cannot share memory do all over TCP, and rank 0's log says why;
    `init("auto")` asks for that.

    Raises what `TcpBackend` does, and `BackendUnavailableError` if the ranks are not on one host,
    are not one user's, or this is not Linux.
    """

    sharing = "all"


class HybridBackend(MeshBackend):
    """One rank of a group on several hosts: shared memory inside a host, TCP between.

    Collectives of ranks that are all on one host are those of `SharedMemoryBackend`. Of others, a
    host's ranks first do in their memory what they can, so that each host sends its data once.

    The arguments are `TcpBackend`'s. `host` says what this rank's host counts as, where it is not
    the machine that decides: two names on one machine are two hosts.
    """

    sharing = "hosts"


# ------------------------------------------------------------------------------
# Closing a backend that is still open when the interpreter ends.


class CloseAtExit:
    """Closes a backend when the interpreter ends, without keeping it alive."""

    def __init__(self, backend: Backend) -> None:
        self._backend = weakref.ref(backend)
        atexit.register(self)

    def __call__(self) -> None:
        backend = self._backend()
        if backend is not None:
            with suppress(DistributedError, OSError):
                backend.close()

    def cancel(self) -> None:
        """Do nothing at exit: the backend is closed."""
        atexit.unregister(self)
