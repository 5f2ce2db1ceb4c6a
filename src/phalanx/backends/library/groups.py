"""How process groups of torch's are made: ranks meet at a store, and form groups through it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple

import torch.distributed

from phalanx.backends.library.kinds import GLOO, KINDS
from phalanx.backends.library.library import Library
from phalanx.backends.library.process_group import ProcessGroupLibrary
from phalanx.backends.library.store import PatientStore
from phalanx.backends.library.works import FOREVER
from phalanx.backends.tcp.address import listen_as_master
from phalanx.backends.tcp.host import host_id
from phalanx.errors import BackendUnavailableError, CollectiveTimeoutError
from phalanx.wire.address import Endpoint, parse_address

dist: Any = torch.distributed  # of which builds of torch have more or less
ProcessGroup = Any
Store = Any


class Made(NamedTuple):
    """What a backend over a library needs."""

    collectives: Library
    messages: Library | None
    topology: tuple[int, ...]


def meet(
    rank: int,
    world_size: int,
    master_addr: str,
    timeout: float,
    listener: socket.socket | None = None,
) -> Store:
    """The store through which the ranks meet; rank 0 holds it at `master_addr`."""
    if world_size == 1:
        if listener is not None:
            listener.close()
        return dist.HashStore()
    endpoint = parse_address(master_addr)
    if rank == 0:
        return hold(listener or listen_as_master(endpoint), endpoint, timeout)
    if listener is not None:
        listener.close()
    return connect(endpoint, rank, timeout)


def hold(listener: socket.socket, endpoint: Endpoint, timeout: float) -> Store:
    """A store of this process, at a socket that listens already, which becomes the store's."""
    port = listener.getsockname()[1]
    return dist.TCPStore(
        endpoint.host,
        port,
        is_master=True,
        timeout=_seconds(timeout),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def connect(endpoint: Endpoint, rank: int, timeout: float) -> Store:
    """The store that rank 0 holds there, or will soon."""
    try:
        return dist.TCPStore(
            endpoint.host,
            endpoint.port,
            is_master=False,
            timeout=_seconds(timeout),
            wait_for_workers=False,
        )
    except (RuntimeError, OSError) as error:
        raise BackendUnavailableError(
            f"rank {rank} cannot reach rank 0 at {endpoint} within {timeout:g} s ({error}): has "
            "rank 0 started, and may this host connect to it?",
            rank=rank,
        ) from error


def made(kind: str, rank: int, world_size: int, store: Store, prefix: str, timeout: float) -> Made:
    """Groups of all ranks: one of this kind for collectives, one of Gloo's for messages.

    Blocks until all ranks have come; `CollectiveTimeoutError` if they do not.
    """
    ranks = range(world_size)
    deadline = monotonic() + timeout
    topology = topology_of(PatientStore(store, prefix, timeout), rank, world_size, timeout)
    hostname = interface_for(topology)
    kinds = {device: row for (name, device), row in KINDS.items() if name == kind}
    former = Former(kind, rank, store, prefix, hostname)
    try:
        group = former.form(ranks, 0, deadline - monotonic())
    except RuntimeError as error:
        raise nobody_came(rank, timeout, error) from error
    return Made(
        ProcessGroupLibrary(group, kinds, owned=True, former=former),
        messages_for(rank, world_size, store, prefix, topology, deadline - monotonic()),
        topology,
    )


def messages_for(
    rank: int,
    world_size: int,
    store: Store,
    prefix: str,
    topology: tuple[int, ...],
    timeout: float,
) -> Library:
    """A Gloo group of all ranks, for messages. Blocks until all have come."""
    former = Former("gloo", rank, store, f"{prefix}/messages", interface_for(topology))
    try:
        group = former.form(range(world_size), 0, timeout)
    except RuntimeError as error:
        raise nobody_came(rank, timeout, error) from error
    return ProcessGroupLibrary(group, {"cpu": GLOO}, owned=True)


def interface_for(topology: tuple[int, ...]) -> str | None:
    """The address at which Gloo listens on this host; None: that of the host's name."""
    return "127.0.0.1" if len(set(topology)) == 1 else None


class Former:
    """Makes groups of some of the ranks, of one kind."""

    def __init__(
        self, kind: str, rank: int, store: Store, prefix: str, hostname: str | None
    ) -> None:
        self._kind = kind
        self._rank = rank
        self._store = store
        self._prefix = prefix
        self._hostname = hostname
        self._stop = threading.Event()

    def form(self, members: Sequence[int], ident: int, timeout: float) -> ProcessGroup:
        """The group of these ranks; `ident` says which. Blocks until all of them form it."""
        place, size = list(members).index(self._rank), len(members)
        prefix = f"{self._prefix}/{ident:x}"
        if self._kind == "gloo":
            store = PatientStore(self._store, prefix, timeout, self._stop)
            return _gloo(store, place, size, timeout, self._hostname)
        # Threads of these libraries' own use the store later on: a connection of its own.
        own = dist.PrefixStore(prefix, self._store.clone())
        own.set_timeout(_seconds(timeout))
        if self._kind == "nccl":
            return _nccl(own, place, size)
        return dist.ProcessGroupUCC(own, place, size, _seconds(timeout))

    def stop(self) -> None:
        """Let go whoever waits for others to form a group."""
        self._stop.set()


def _gloo(store: Store, rank: int, size: int, timeout: float, hostname: str | None) -> ProcessGroup:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = _seconds(timeout)
    create = dist.ProcessGroupGloo.create_device
    device = (
        create(hostname=hostname) if hostname else dist.ProcessGroupGloo.create_default_device()
    )
    options._devices = [device]
    group = dist.ProcessGroupGloo(store, rank, size, options)
    group.set_timeout(FOREVER)  # the engine sees to deadlines
    return group


def _nccl(store: Store, rank: int, size: int) -> ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = FOREVER
    return dist.ProcessGroupNCCL(store, rank, size, options)


def topology_of(store: Store, rank: int, world_size: int, timeout: float) -> tuple[int, ...]:
    """For each rank the number of its host: that of the first rank there."""
    store.set(f"hosts/{rank}", host_id())
    try:
        hosts = [bytes(store.get(f"hosts/{other}")) for other in range(world_size)]
    except RuntimeError as error:
        raise nobody_came(rank, timeout, error) from error
    return tuple(hosts.index(host) for host in hosts)


def nobody_came(rank: int, timeout: float, error: Exception) -> CollectiveTimeoutError:
    """The error where not all ranks come to form a group."""
    return CollectiveTimeoutError(
        f"rank {rank} waited {timeout:g} s for the other ranks to form a group ({error}): have "
        "all of them started, with the same address and number of ranks?",
        rank=rank,
        op="init",
        seconds=timeout,
    )


def _seconds(seconds: float) -> timedelta:
    """A timeout for torch, which knows no infinity."""
    return timedelta(seconds=min(max(seconds, 1e-3), FOREVER.total_seconds()))
