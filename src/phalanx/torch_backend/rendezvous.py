"""How the ranks of a group meet through a store of torch's.

    every rank   counts how often it has met here; puts its host, its process and the world size
    rank 0       reads what all have put; listens; puts address and token
    the others   read these, and connect

Ranks that are all on one host meet on loopback. Keys carry the count, because a store may outlive
the group: under torchrun a second `init_process_group` finds the keys of the first one.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import replace
from typing import Any

import msgspec

from phalanx import errors
from phalanx.core.backend import Backend
from phalanx.errors import (
    AuthenticationError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    DistributedError,
    InvalidWorldSizeError,
    MisuseError,
)
from phalanx.launch.environment import World
from phalanx.launch.init import listen, make_backend
from phalanx.launch.store import tries
from phalanx.transport.tcp.addresses import ELSEWHERE
from phalanx.transport.tcp.admission import find_token
from phalanx.transport.tcp.heartbeat import host_id
from phalanx.wire.control import Endpoint

Store = Any  # torch.distributed.Store
PREFIX = "phalanx"
FAILED = "! "  # the beginning of rank 0's word, if it could not listen
OP = "init_process_group"


def times_met(store: Store, rank: int, *, more: int = 0) -> int:
    """How often this rank has met here, and now `more` often: a number that all ranks have."""
    return int(store.add(f"{PREFIX}/count/{rank}", more))


class Presence(msgspec.Struct):
    """What a rank puts into the store: where it is, and what it was told.

    token   "" without one; else 16 bits of its hash: they show that two differ, which would be
            known at the deadline only, and are too few to find it by trying
    """

    host: str
    process: int
    world_size: int
    token: str = ""


def meet(store: Store, rank: int, world_size: int, timeout: float, *, op: str = OP) -> Backend:
    """Return the backend of this rank among those that meet through `store`.

    Blocks until all have come: `CollectiveTimeoutError` names who has not in `timeout` seconds.
    `InvalidWorldSizeError` if ranks disagree on their number, `AuthenticationError` on the job's
    token; `MisuseError` if two processes are one rank; `BackendUnavailableError` for a store that
    is gone.
    """
    if world_size == 1:
        return make_backend("auto", World(rank=0, world_size=1), timeout)
    try:
        return _Meeting(store, rank, world_size, timeout, op).meet()
    except DistributedError:
        raise
    except RuntimeError as error:  # of the store
        raise BackendUnavailableError(
            f"rank {rank} cannot use the store through which the ranks meet ({error}): is the "
            "process that holds it alive?",
            rank=rank,
            op=op,
        ) from error


class _Meeting:
    """One rank's part in one meeting."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float, op: str) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.op = op
        self.deadline = time.monotonic() + timeout
        token = find_token().encode()
        self.token = hashlib.blake2b(token, digest_size=2).hexdigest() if token else ""
        self.count = times_met(store, rank, more=1)

    def meet(self) -> Backend:
        """Say that this rank is here, hear of the others, and connect."""
        self._come()
        word = self._key("address")
        if self.rank == 0:
            try:
                world = self._world()
                message, listener = listen(world, _toward(self.store))
            except DistributedError as error:
                peer = self.rank if error.peer is None else error.peer
                self.store.set(word, f"{FAILED}{type(error).__name__} {peer} {error}")
                raise
            self.store.set(word, message)
        else:
            message, listener = self._hear(word, 0), None
            if message.startswith(FAILED):
                kind, culprit, text = message.removeprefix(FAILED).split(" ", 2)
                text = f"rank {self.rank}: rank 0 says: {text}"
                raise getattr(errors, kind)(text, rank=self.rank, peer=int(culprit), op=self.op)
            world = self._world()
        address, _, token = message.partition(" ")
        world = replace(world, address=address, token=token or None, listener=listener)
        left = max(self.deadline - time.monotonic(), 1.0)
        backend = make_backend("auto", world, left)
        backend.timeout = self.timeout
        return backend

    def _key(self, what: object) -> str:
        return f"{PREFIX}/{self.count}/{what}"

    def _come(self) -> None:
        """Put this rank into the store, unless another process that lives is this rank, too."""
        place = f"{PREFIX}/last/{self.rank}"
        mine = Presence(host_id(), os.getpid(), self.world_size, self.token)
        if self.store.check([place]):
            last = _presence(self.store.get(place))
            if last.host == mine.host and last.process != mine.process and _lives(last.process):
                raise MisuseError(
                    f"rank {self.rank} has come to this store already, as process {last.process} "
                    f"of this host, which is alive (this is process {mine.process}): do two jobs "
                    "have one MASTER_PORT, or did two processes get one RANK?",
                    rank=self.rank,
                    op=self.op,
                )
        text = msgspec.json.encode(mine).decode()
        self.store.set(place, text)
        self.store.set(self._key(self.rank), text)

    def _world(self) -> World:
        """The world, when all ranks have come: are they on one host?"""
        hosts = set()
        for rank in range(self.world_size):
            other = _presence(self._hear(self._key(rank), rank).encode())
            if other.world_size != self.world_size:
                raise InvalidWorldSizeError(
                    f"rank {self.rank} was told that there are {self.world_size} ranks, and rank "
                    f"{rank} that there are {other.world_size}: give all the same world_size",
                    rank=self.rank,
                    peer=rank,
                    op=self.op,
                )
            if other.token != self.token:
                raise AuthenticationError(
                    f"rank {self.rank} and rank {rank} do not hold the same token (PHALANX_TOKEN, "
                    "on all or none)",
                    rank=self.rank,
                    peer=rank,
                    op=self.op,
                )
            hosts.add(other.host)
        return World(
            rank=self.rank,
            world_size=self.world_size,
            local_world_size=self.world_size if len(hosts) == 1 else 1,
        )

    def _hear(self, key: str, rank: int) -> str:
        """What `rank` has put there. Blocks until it has."""
        for _ in tries(self.deadline):
            if self.store.check([key]):
                return str(self.store.get(key).decode())
        ranks = range(self.world_size)
        missing = [each for each in ranks if not self.store.check([self._key(each)])] or [rank]
        names = ", ".join(map(str, missing))
        raise CollectiveTimeoutError(
            f"rank {self.rank} waited {self.timeout:g} s in {self.op} for "
            f"rank{'s' if len(missing) > 1 else ''} {names} of {self.world_size}: did "
            f"{'they' if len(missing) > 1 else 'it'} start, with the same address and world size, "
            "and join as many groups before as this rank?",
            rank=self.rank,
            peer=missing[0],
            op=self.op,
            seconds=self.timeout,
        )


def _presence(text: bytes) -> Presence:
    return msgspec.json.decode(text, type=Presence)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True


def _toward(store: Store) -> Endpoint:
    """What lies in the direction of the other ranks: the store's host, or MASTER_ADDR."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "host") and hasattr(store, "port"):
        return Endpoint(store.host, store.port)
    master = os.environ.get("MASTER_ADDR", "")
    return Endpoint(master, 0) if master else ELSEWHERE
