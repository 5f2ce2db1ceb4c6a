"""Formation of torch's process groups: through a store that all ranks know."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from xxhash import xxh3_64_intdigest

from phalanx.errors import BackendUnavailableError, CollectiveTimeoutError
from phalanx.native.store_rendezvous import (
    Entries,
    RendezvousResult,
    StoreRendezvous,
    connect_torchs_store,
    rendezvous_by,
    route_by,
    trust_in_torchs_store,
)
from phalanx.transport.tcp.addresses import (
    address_on_interface,
    chosen_interfaces,
    listen_as_master,
)
from phalanx.transport.tcp.dial import await_name
from phalanx.transport.tcp.heartbeat import host_id
from phalanx.wire.control import parse_address

dist: Any = torch.distributed  # of which builds of torch have more or less
ProcessGroup = Any  # torch.distributed.ProcessGroup, or one of its backends
Store = Any
FOREVER = timedelta(days=3650)
FORMED = ("gloo", "nccl", "ucc")  # the kinds that `GroupFormer` makes


class GroupFormer:
    """Makes groups of some of the ranks, of one kind.

    kind   torch's name for it
    rank   this one, in the store
    stop   if set, the threads that wait for other ranks to form a group end
    """

    def __init__(
        self, kind: str, rank: int, store: Store, prefix: str, topology: tuple[int, ...]
    ) -> None:
        self.stop = threading.Event()
        self.kind = kind
        self.rank = rank
        self._store = store
        self._prefix = prefix
        self._on_one_host = len(set(topology)) == 1

    def form(self, members: Sequence[int], ident: int, timeout: float) -> ProcessGroup:
        """Return the group of these ranks; `ident` says which. Blocks until all of them form it."""
        rank, size = list(members).index(self.rank), len(members)
        prefix, seconds = f"{self._prefix}/{ident:x}", _seconds(timeout)
        if self.kind == "gloo":
            gloo = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = seconds
            options._devices = self._devices_of_gloo()
            store = PatientStore(self._store, prefix, timeout, self.stop)
            group = gloo(store, rank, size, options)
            group.set_timeout(FOREVER)  # the engine sees to deadlines
            return group
        # Threads of these libraries' own use the store later on: a connection of its own.
        own = dist.PrefixStore(prefix, self._store.clone())
        own.set_timeout(seconds)
        if self.kind == "nccl":
            if (chosen := chosen_interfaces()) and not self._on_one_host:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={chosen[0].name}")
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = FOREVER
            return dist.ProcessGroupNCCL(own, rank, size, options)
        return dist.ProcessGroupUCC(own, rank, size, seconds)

    def _devices_of_gloo(self) -> list[Any]:
        """Return Gloo's devices, as PHALANX_INTERFACE or GLOO_SOCKET_IFNAME names them."""
        gloo = dist.ProcessGroupGloo
        own = "127.0.0.1" if self._on_one_host else address_on_interface()
        names = os.environ.get("GLOO_SOCKET_IFNAME", "")
        if own:
            return [gloo.create_device(hostname=own)]
        if names:
            return [gloo.create_device(interface=name) for name in names.split(",")]
        return [gloo.create_default_device()]  # at the address of the host's name


def store_at(
    rank: int, world_size: int, master_addr: str, timeout: float, listener: socket.socket | None
) -> Store:
    """Return the store through which the ranks find each other; rank 0 holds it at `master_addr`.

    On rank 0 it takes over the listening socket.
    """
    if listener is not None and (rank != 0 or world_size == 1):
        listener.close()
    if world_size == 1:
        return dist.HashStore()
    endpoint = parse_address(master_addr)
    if listener is None:
        await_name(endpoint, timeout)
    if rank == 0:
        listener = listener or listen_as_master(endpoint)
        return dist.TCPStore(
            endpoint.host,
            listener.getsockname()[1],
            is_master=True,
            timeout=_seconds(timeout),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
    try:
        return connect_torchs_store(endpoint, time.monotonic() + timeout)
    except (RuntimeError, OSError) as error:
        raise BackendUnavailableError(
            f"rank {rank} cannot reach rank 0 at {endpoint} within {timeout:g} s ({error}): has "
            "rank 0 started, and may this host connect to it?",
            rank=rank,
        ) from error


def nobody_came(rank: int, timeout: float, error: Exception) -> CollectiveTimeoutError:
    """Return the error for ranks that do not come to form a group."""
    return CollectiveTimeoutError(
        f"rank {rank} waited {timeout:g} s for the other ranks to form a group ({error}): have "
        "all of them started, with the same address and number of ranks?",
        rank=rank,
        op="init",
        seconds=timeout,
    )


def _seconds(seconds: float) -> timedelta:
    """Return a timeout for torch, which has no infinity."""
    return timedelta(seconds=min(max(seconds, 1e-3), FOREVER.total_seconds()))


def store_of(group: ProcessGroup) -> tuple[Store, str] | None:
    """Return the store of a given group, and the prefix there of one more backend over it.

    None for a group that does not know its store.
    """
    with suppress(AttributeError, RuntimeError):
        store = group.get_group_store()
        return store, f"phalanx/{store.add(f'phalanx/visits/{group.rank()}', 1)}"
    return None


def meet_over(
    group: ProcessGroup, place: tuple[Store, str] | None, device: str, timeout: float
) -> RendezvousResult:
    """Let the ranks of a given group meet.

    By its store; if it has none, by its own collectives of tensors on `device`.
    """
    rank, size = group.rank(), group.size()
    if place is not None:
        store, prefix = place
        scope = (f"{getattr(group, 'group_name', '')}/{prefix}",)
        entries = Entries(store, scope, trust_in_torchs_store())
        return StoreRendezvous(entries, rank, size, timeout, "TorchBackend").run(route_by())
    numbers = torch.zeros(size, dtype=torch.int64, device=device)
    numbers[rank] = xxh3_64_intdigest(host_id().encode()) >> 1
    group.allreduce([numbers]).wait()

    def broadcast(block: bytearray) -> None:
        there = torch.frombuffer(block, dtype=torch.uint8).to(device)
        group.broadcast(there, 0).wait()
        block[:] = bytes(there.tolist())

    return rendezvous_by(broadcast, rank, route_by(), one_host=len(set(numbers.tolist())) == 1)


# ------------------------------------------------------------------------------
# A store that is polled, so that several groups can be formed through one connection at a time.

FIRST_PAUSE, LONGEST_PAUSE = 1e-4, 1e-2  # seconds between two looks


class PatientStore(dist.Store):  # type: ignore[misc]
    """A part of `store`, under `prefix`, that is polled: its `wait` does not block the store.

    While a thread waits inside one of torch's stores, no other thread can use it, and no signal is
    handled. A connection for each thread would not help: torch looks up the name of the address for
    each, which may take seconds with a slow name server.
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
        """Return the value of `key`. Blocks until it is there, as `wait`."""
        self.wait([key])
        return bytes(self._store.get(self._prefix + key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are there. RuntimeError after the timeout, as torch expects."""
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
        """Return whether all keys are there."""
        return bool(self._store.check([self._prefix + key for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """Add to the count `key`, from 0; return its new value."""
        return int(self._store.add(self._prefix + key, amount))

    def delete_key(self, key: str) -> bool:
        """Forget a key; return whether it was there."""
        return bool(self._store.delete_key(self._prefix + key))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `wait` waits by default."""
        self._seconds = timeout.total_seconds()
