"""How process groups of torch's are made: ranks meet at a store, and form groups through it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor
from xxhash import xxh3_64_intdigest

from phalanx.errors import BackendUnavailableError, CollectiveTimeoutError, MisuseError
from phalanx.native.base import Library
from phalanx.native.torch_calls import FOREVER, ProcessGroupLibrary
from phalanx.native.torch_group import GLOO, KINDS, GroupKind, kinds_of
from phalanx.transport.tcp.admission import listen_as_master, listen_at
from phalanx.transport.tcp.heartbeat import host_id
from phalanx.wire.control import Endpoint, parse_address

dist: Any = torch.distributed  # of which builds of torch have more or less
ProcessGroup = Any
Store = Any


class Made(NamedTuple):
    """What a backend over a library needs."""

    collectives: Library
    messages: Library | None
    topology: tuple[int, ...]


def epoch(
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


# ------------------------------------------------------------------------------
# How a backend comes to stand on a process group that exists already.

Kinds = Mapping[str, GroupKind]

_ELSEWHERE = ("192.0.2.1", 9)  # nobody's (RFC 5737): the way there is the default route
_LONGEST = 256  # bytes of an address


def over(group: ProcessGroup, timeout: float) -> Made:
    """A given process group, which stays as it is; None: that of `init_process_group`.

    Beside it a Gloo group is formed, for messages. Blocks until all ranks have come.
    """
    group = _checked(group)
    kinds = kinds_of(group)
    topology = _ask_hosts(group, kinds)
    if not dist.is_gloo_available():
        return Made(ProcessGroupLibrary(group, kinds, owned=False), None, topology)
    store, prefix = _store_of(group) or (_store_over(group, kinds, topology, timeout), "phalanx")
    messages: Library = messages_for(group.rank(), group.size(), store, prefix, topology, timeout)
    kind = _only_kind(kinds)
    former = None
    if kind is not None:
        former = Former(kind, group.rank(), store, prefix, interface_for(topology))
    return Made(ProcessGroupLibrary(group, kinds, owned=False, former=former), messages, topology)


def _checked(group: ProcessGroup) -> ProcessGroup:
    if group is None:
        if not dist.is_initialized():
            raise MisuseError(
                "TorchBackend() is over the group of init_process_group(), which was not called; "
                "call it, give a process group, or use GlooBackend or NcclBackend"
            )
        return dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise MisuseError("this process is not a member of that process group")
    return group


def _store_of(group: ProcessGroup) -> tuple[Store, str] | None:
    """The store through which a group was formed, and what is to be before our keys in it."""
    with suppress(AttributeError, RuntimeError):
        store = group.get_group_store()
        visit = store.add(f"phalanx/visits/{group.rank()}", 1)  # one more backend over it
        return store, f"phalanx/{visit}"
    return None


def _store_over(
    group: ProcessGroup, kinds: Kinds, topology: tuple[int, ...], timeout: float
) -> Store:
    """A new store, held by rank 0, which tells the others where by a collective of the group."""
    device = next(iter(kinds))
    where = torch.zeros(_LONGEST, dtype=torch.uint8, device=device)
    listener = None
    if group.rank() == 0:
        host = interface_for(topology) or _own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = listen_at(family, (host, 0))
        text = str(Endpoint(host, listener.getsockname()[1])).encode()
        where[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([where], options).wait()
    endpoint = parse_address(bytes(where.tolist()).rstrip(b"\0").decode())
    if listener is not None:
        return hold(listener, endpoint, timeout)
    return connect(endpoint, group.rank(), timeout)


def _own_address() -> str:
    """This host's address on the interface of the default route. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ELSEWHERE)
        return str(probe.getsockname()[0])


def _only_kind(kinds: Kinds) -> str | None:
    """By torch's name, the one kind of group that this is, if such groups can be made here."""
    names = {name for (name, device), kind in KINDS.items() if kinds.get(device) is kind}
    return names.pop() if len(names) == 1 and len(kinds) == 1 else None


def _ask_hosts(group: ProcessGroup, kinds: Kinds) -> tuple[int, ...]:
    """For each rank the number of its host, by a collective of the group."""
    device = next(iter(kinds))
    hosts = torch.zeros(group.size(), dtype=torch.int64, device=device)
    hosts[group.rank()] = xxh3_64_intdigest(host_id().encode()) >> 1
    group.allreduce([hosts]).wait()
    return _first_places(hosts)


def _first_places(hosts: Tensor) -> tuple[int, ...]:
    numbers: list[int] = hosts.tolist()
    return tuple(numbers.index(number) for number in numbers)


# ------------------------------------------------------------------------------
# A store through which several groups can be formed at a time, over one that is waited in.

FIRST_PAUSE, LONGEST_PAUSE = 1e-4, 1e-2  # seconds between two looks


class PatientStore(dist.Store):  # type: ignore[misc]
    """A part of `store`, under `prefix`, that is asked again and again instead of waited in.

    While a thread waits inside one of torch's stores no other thread can use it, nor does it hear a
    signal. A connection of its own for each thread is no way out: torch looks up the name of the
    address for each, which may take seconds where the name server is slow.
    """

    def __init__(
        self, store: Store, prefix: str, seconds: float, stop: threading.Event | None = None
    ) -> None:
        super().__init__()
        self._store = store
        self._prefix = f"{prefix}/"
        self._seconds = seconds
        self._stop = stop or threading.Event()  # set: nobody waits any more

    def set(self, key: str, value: str | bytes) -> None:
        """Set `key` for every rank."""
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """The value of `key`. Blocks until it is there, as `wait`."""
        self.wait([key])
        value: bytes = self._store.get(self._prefix + key)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are there. RuntimeError, which torch expects, after the timeout."""
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        pause = FIRST_PAUSE
        while not self.check(keys):
            if time.monotonic() > deadline:
                missing = [key for key in keys if not self.check([key])]
                raise RuntimeError(f"nobody has set {', '.join(missing)} in {seconds:g} s")
            if self._stop.wait(pause):
                raise RuntimeError("this rank has closed its backend")
            pause = min(2 * pause, LONGEST_PAUSE)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._store.check([self._prefix + key for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """Add to the count `key`, from 0; what it is now."""
        return int(self._store.add(self._prefix + key, amount))

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return bool(self._store.delete_key(self._prefix + key))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `wait` waits, unless it is told otherwise."""
        self._seconds = timeout.total_seconds()
