"""How process groups of torch's are met, made, and taken as they are."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple

import torch
import torch.distributed
from xxhash import xxh3_64_intdigest

from phalanx.backends.library.kinds import GLOO, KINDS, GroupKind, kinds_of
from phalanx.backends.library.library import Library
from phalanx.backends.library.process_group import Former, ProcessGroupLibrary
from phalanx.backends.library.store import PatientStore
from phalanx.backends.library.works import FOREVER
from phalanx.backends.tcp.address import listen_as_master
from phalanx.backends.tcp.host import host_id
from phalanx.errors import BackendUnavailableError, CollectiveTimeoutError, MisuseError
from phalanx.wire.address import Endpoint, parse_address

dist: Any = torch.distributed  # of which builds of torch have more or less
ProcessGroup = Any
Store = Any


class Made(NamedTuple):
    """What a backend over a library needs."""

    collectives: Library
    messages: Library | None
    topology: tuple[int, ...]


# ------------------------------------------------------------------------------ groups made here


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
    held: dict[str, Any] = {}
    if rank == 0:
        if listener is None:
            listener = listen_as_master(endpoint)
        endpoint = Endpoint(endpoint.host, listener.getsockname()[1])
        held = {"master_listen_fd": listener.detach(), "multi_tenant": True}
    elif listener is not None:
        listener.close()
    try:
        return dist.TCPStore(
            endpoint.host,
            endpoint.port,
            is_master=rank == 0,
            timeout=_seconds(timeout),
            wait_for_workers=False,
            **held,
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
    topology = _topology(PatientStore(store, prefix, timeout), rank, world_size, timeout)
    hostname = "127.0.0.1" if len(set(topology)) == 1 else None
    kinds = {device: row for (name, device), row in KINDS.items() if name == kind}
    form = _former(kind, rank, store, prefix, hostname)
    form_messages = _former("gloo", rank, store, f"{prefix}/messages", hostname)
    try:
        collectives = form(ranks, 0, deadline - monotonic())
        messages = form_messages(ranks, 0, deadline - monotonic())
    except RuntimeError as error:
        raise _nobody_came(rank, timeout, error) from error
    return Made(
        ProcessGroupLibrary(collectives, kinds, owned=True, form=form),
        ProcessGroupLibrary(messages, {"cpu": GLOO}, owned=True),
        topology,
    )


def _former(kind: str, rank: int, store: Store, prefix: str, hostname: str | None) -> Former:
    """What makes groups of some ranks: `ident` says which, the same on all members."""

    def form(members: Sequence[int], ident: int, timeout: float) -> ProcessGroup:
        place, size = list(members).index(rank), len(members)
        prefix_here = f"{prefix}/{ident:x}"
        if kind == "gloo":
            return _gloo(PatientStore(store, prefix_here, timeout), place, size, timeout, hostname)
        # Threads of these libraries' own use the store later on: a connection of its own.
        own = dist.PrefixStore(prefix_here, store.clone())
        own.set_timeout(_seconds(timeout))
        if kind == "nccl":
            return _nccl(own, place, size)
        return dist.ProcessGroupUCC(own, place, size, _seconds(timeout))

    return form


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


def _topology(store: Store, rank: int, world_size: int, timeout: float) -> tuple[int, ...]:
    """For each rank the number of its host: that of the first rank there."""
    store.set(f"hosts/{rank}", host_id())
    try:
        hosts = [bytes(store.get(f"hosts/{other}")) for other in range(world_size)]
    except RuntimeError as error:
        raise _nobody_came(rank, timeout, error) from error
    return tuple(hosts.index(host) for host in hosts)


def _nobody_came(rank: int, timeout: float, error: Exception) -> CollectiveTimeoutError:
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


# --------------------------------------------------------------------------------- given groups


def over(group: ProcessGroup, timeout: float) -> Made:
    """A given process group; None: that of `init_process_group`."""
    if not dist.is_available():
        raise BackendUnavailableError("this build of torch has no torch.distributed")
    if group is None:
        if not dist.is_initialized():
            raise MisuseError(
                "TorchBackend() is over the group of init_process_group(), which was not called; "
                "call it, give a process group, or use GlooBackend or NcclBackend"
            )
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise MisuseError("this process is not a member of that process group")
    kinds = kinds_of(group)
    rank, size = group.rank(), group.size()
    own = _store_of(group, rank)
    if own is None:
        library = ProcessGroupLibrary(group, kinds, owned=False)
        return Made(library, library if "cpu" in kinds else None, _ask_hosts(group, kinds))
    store, prefix = own
    topology = _topology(PatientStore(store, prefix, timeout), rank, size, timeout)
    hostname = "127.0.0.1" if len(set(topology)) == 1 else None
    messages: Library | None = None
    if dist.is_gloo_available():
        form = _former("gloo", rank, store, f"{prefix}/messages", hostname)
        try:
            made_here = form(range(size), 0, timeout)
        except RuntimeError as error:
            raise _nobody_came(rank, timeout, error) from error
        messages = ProcessGroupLibrary(made_here, {"cpu": GLOO}, owned=True)
    kind = _single_kind(kinds)
    form_more = _former(kind, rank, store, prefix, hostname) if kind is not None else None
    collectives = ProcessGroupLibrary(group, kinds, owned=False, form=form_more)
    return Made(collectives, messages, topology)


def _store_of(group: ProcessGroup, rank: int) -> tuple[Store, str] | None:
    """The store through which a group was formed, and what is to be before our keys in it."""
    with suppress(AttributeError, RuntimeError):
        store = group.get_group_store()
        visit = store.add(f"phalanx/visits/{rank}", 1)  # how many backends this rank had over it
        return store, f"phalanx/{visit}"
    return None


def _single_kind(kinds: dict[str, GroupKind] | Any) -> str | None:
    """By torch's name, the kind of group of which sub-groups can be made here."""
    names = {name for (name, device), kind in KINDS.items() if kinds.get(device) is kind}
    return names.pop() if len(names) == 1 and len(kinds) == 1 else None


def _ask_hosts(group: ProcessGroup, kinds: Any) -> tuple[int, ...]:
    """The topology, by a collective of the group."""
    device = next(iter(kinds))
    mine = torch.tensor([xxh3_64_intdigest(host_id().encode()) >> 1], device=device)
    hosts = torch.empty(group.size(), dtype=torch.int64, device=device)
    group._allgather_base(hosts, mine).wait()
    numbers: list[int] = hosts.tolist()
    return tuple(numbers.index(number) for number in numbers)
