"""`MeshBackend`: what all backends have in common whose ranks are processes of ours."""

from __future__ import annotations

import math
import os
import socket
import weakref
from functools import partial

from phalanx.backends.at_exit import CloseAtExit
from phalanx.backends.base import DEFAULT_TIMEOUT, Backend
from phalanx.backends.engine import WORLD_ID, Group
from phalanx.backends.messages import check_timeout
from phalanx.backends.shm.sharing import Sharing, check
from phalanx.backends.tcp.address import listen_as_master
from phalanx.backends.tcp.engine import TcpEngine
from phalanx.backends.tcp.pulse import check_heartbeat
from phalanx.backends.tcp.rendezvous import Rendezvous
from phalanx.backends.tcp.token import check_token, find_token
from phalanx.errors import InvalidRankError, InvalidWorldSizeError
from phalanx.wire.address import parse_address
from phalanx.wire.handshake import Identity
from phalanx.wire.messages import Address

FAREWELL = 5.0  # seconds that close() waits at most for sent bytes to leave


class MeshBackend(Backend):
    """One rank of a group whose ranks are processes, connected over TCP: what such backends share.

    sharing   which ranks are to have memory in common, once they have met
    """

    sharing = Sharing.NOTHING

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
        if world_size < 1:
            raise InvalidWorldSizeError(f"a group needs at least one rank, not {world_size}")
        if not 0 <= rank < world_size:
            raise InvalidRankError(
                f"rank {rank} is not one of the {world_size} ranks 0 to {world_size - 1}", rank=rank
            )
        check_timeout(timeout)
        endpoint = parse_address(master_addr)
        seconds = check_heartbeat(heartbeat)
        secret = find_token() if token is None else token and check_token(token, "token=")
        engine = TcpEngine(
            Identity(job, generation, rank, world_size),
            secret.encode(),
            loopback_only=not secret,
            heartbeat=seconds,
        )
        super().__init__(engine, Group(engine, WORLD_ID, tuple(range(world_size))), timeout=timeout)
        self._engine = engine
        self.topology = (0,) * world_size
        self.links = self.links._replace(processors=os.cpu_count() or math.inf)
        mesh = engine.mesh
        mesh.host = host
        try:
            if world_size > 1:
                sharing = self.sharing.relaxed() if fall_back else self.sharing
                commons, why_not = sharing.offer(rank, world_size)
                mesh.commons = commons
                attach = partial(sharing.attach, commons, why_not, rank) if sharing.shares else None
                if rank == 0:
                    mesh.open_door(listener or listen_as_master(endpoint))
                with engine.lock:
                    rendezvous = Rendezvous(mesh, endpoint, attach)
                    addresses = rendezvous.run(self.timeout, engine.drive)
                    engine.pulse.begin(_processes_on_host(rank, addresses))
                hosts = [address.host_id for address in addresses]
                self.topology = tuple(hosts.index(host) for host in hosts)
                if check(rank, rendezvous.problems, fall_back=fall_back) and commons is not None:
                    with engine.lock:
                        engine.share(commons)
                        self.group.window = engine.window(self.group)
        except BaseException:
            with engine.lock:
                engine.shut()
            raise
        finally:
            if listener is not None and (rank != 0 or world_size == 1):
                listener.close()
            if mesh.commons is not None and engine.commons is None:  # it came to nothing
                mesh.commons.close()
        # A process that ends without close() says goodbye all the same, so that what it has sent
        # last is not lost with it.
        self._at_exit = CloseAtExit(self)
        os.register_at_fork(after_in_child=_CloseInChild(self))

    def close(self) -> None:
        """Leave: whoever waits for this rank gets a `PeerLostError` that says that it left.

        Waits until the bytes of completed sends have reached the peers' hosts, 5 seconds at most.
        If the ranks disagreed and no call of this rank has raised it, the log says so.
        """
        self._leave(farewell=FAREWELL)

    def abort(self) -> None:
        """Leave as if this rank had died: the groups that it is in are broken."""
        self._leave(farewell=0.0)

    def _leave(self, *, farewell: float) -> None:
        engine = self._engine
        with engine.lock:
            if engine.closed:
                return
            if farewell:
                engine.poll()  # word of a failure may be waiting
            for group in list(engine.groups.values()):
                group.close()
            engine.run_ready()
            if farewell:
                engine.say_goodbye(farewell)
            engine.shut()
        self._at_exit.cancel()


def _processes_on_host(rank: int, addresses: list[Address]) -> dict[int, int]:
    """The processes of the other ranks of this host, where they can be looked at."""
    here = addresses[rank].host_id
    return {
        peer: address.process
        for peer, address in enumerate(addresses)
        if peer != rank and address.host_id == here and address.process
    }


class _CloseInChild:
    """Ends a backend in a child process that was forked, such as a data loader's worker."""

    def __init__(self, backend: MeshBackend) -> None:
        self._backend = weakref.ref(backend)

    def __call__(self) -> None:
        backend = self._backend()
        if backend is not None:
            engine = backend.engine
            assert isinstance(engine, TcpEngine)
            backend.group.closed = engine.closed = True
            engine.mesh.close_in_child()
