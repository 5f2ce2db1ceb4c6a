"""How the ranks of a group of torch's meet through its store: see native/meeting.py.

Ranks that are all on one host meet on loopback.
"""

from __future__ import annotations

import os
from typing import Any

from phalanx.core.backend import Backend
from phalanx.launch.environment import World
from phalanx.launch.init import make_backend
from phalanx.native.meeting import Meeting, Words, by_way_of, trust_in_torchs_store
from phalanx.wire.control import Endpoint, is_loopback, parse_address

Store = Any  # torch.distributed.Store
OP = "init_process_group"


def times_met(store: Store, rank: int, *, more: int = 0) -> int:
    """Return how often this rank has met here, and now `more` often: the same on all ranks."""
    return int(store.add(f"phalanx/count/{rank}", more))


def meet(
    store: Store, rank: int, world_size: int, timeout: float, *, op: str = OP, group: str = ""
) -> Backend:
    """Return the backend of this rank among those that meet through `store`.

    `group` names it among groups that have the store in common. Blocks until all have come:
    `CollectiveTimeoutError` names who has not in `timeout` seconds. `InvalidWorldSizeError` if
    ranks disagree on their number; `AuthenticationError` if only some have a token, or the ranks
    are on several hosts and have none; `MisuseError` if two processes are one rank;
    `BackendUnavailableError` for a store that is gone.
    """
    if world_size == 1:
        return make_backend("auto", World(rank=0, world_size=1), timeout)
    environ = os.environ
    scope = environ.get("TORCHELASTIC_RUN_ID", ""), environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    words = Words(store, (*scope, group), trust_in_torchs_store())
    meeting = Meeting(words, rank, world_size, timeout, op)
    met = meeting.meet(_toward(store))
    times_met(store, rank, more=1)
    one_host = is_loopback(parse_address(met.address).host)
    world = World(
        rank=rank,
        world_size=world_size,
        local_world_size=world_size if one_host else 1,
        address=met.address,
        token=met.token,
        listener=met.listener,
    )
    backend = make_backend("auto", world, max(meeting.left(), 1.0))
    backend.timeout = timeout
    return backend


def _toward(store: Store) -> Endpoint:
    """Return what lies in the direction of the other ranks: the store's host, or MASTER_ADDR."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "host") and hasattr(store, "port"):
        return Endpoint(store.host, store.port)
    return by_way_of()
