"""The rendezvous of a group's ranks through torch's store: see native/store_rendezvous.py.

Ranks that are all on one host meet on loopback.
"""

from __future__ import annotations

import os
from typing import Any

from phalanx.core.backend import Backend
from phalanx.launch.environment import World
from phalanx.launch.init import make_backend
from phalanx.native.store_rendezvous import (
    Entries,
    StoreRendezvous,
    route_by,
    trust_in_torchs_store,
)
from phalanx.wire.control import Endpoint, is_loopback, parse_address

Store = Any  # torch.distributed.Store
OP = "init_process_group"


def count_rendezvous(store: Store, rank: int, *, more: int = 0) -> int:
    """Add `more` to the count of this rank's rendezvous here, the same on all ranks; return it."""
    return int(store.add(f"phalanx/count/{rank}", more))


def meet(
    store: Store, rank: int, world_size: int, timeout: float, *, op: str = OP, group: str = ""
) -> Backend:
    """Return the backend of this rank among those that meet through `store`.

    `group` names it among groups that have the store in common. Blocks until all have come:
    `CollectiveTimeoutError` names the absent ranks after `timeout` seconds. `InvalidWorldSizeError`
    if ranks disagree on their number; `AuthenticationError` if only some have a token, or the ranks
    are on several hosts and have none; `MisuseError` if two processes are one rank;
    `BackendUnavailableError` for a store that is gone.
    """
    if world_size == 1:
        return make_backend("auto", World(rank=0, world_size=1), timeout)
    environ = os.environ
    scope = environ.get("TORCHELASTIC_RUN_ID", ""), environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    entries = Entries(store, (*scope, group), trust_in_torchs_store())
    part = StoreRendezvous(entries, rank, world_size, timeout, op)
    met = part.run(_route_to_ranks(store))
    count_rendezvous(store, rank, more=1)
    one_host = is_loopback(parse_address(met.address).host)
    world = World(
        rank=rank,
        world_size=world_size,
        local_world_size=world_size if one_host else 1,
        address=met.address,
        token=met.token,
        listener=met.listener,
    )
    backend = make_backend("auto", world, max(part.left(), 1.0))
    backend.timeout = timeout
    return backend


def _route_to_ranks(store: Store) -> Endpoint:
    """Return an address on the route to the other ranks: the store's host, or MASTER_ADDR."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "host") and hasattr(store, "port"):
        return Endpoint(store.host, store.port)
    return route_by()
