"""How a backend comes to stand on a process group that exists already."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from xxhash import xxh3_64_intdigest

from phalanx.backends.library.groups import (
    Former,
    Made,
    connect,
    hold,
    interface_for,
    messages_for,
)
from phalanx.backends.library.kinds import KINDS, GroupKind, kinds_of
from phalanx.backends.library.library import Library
from phalanx.backends.library.process_group import ProcessGroupLibrary
from phalanx.backends.tcp.address import listen_at
from phalanx.backends.tcp.host import host_id
from phalanx.errors import MisuseError
from phalanx.wire.address import Endpoint, parse_address

dist: Any = torch.distributed  # of which builds of torch have more or less
ProcessGroup = Any
Store = Any
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
