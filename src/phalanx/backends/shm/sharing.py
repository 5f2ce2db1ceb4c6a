"""How ranks that have met come to share memory.

Everyone has said in the rendezvous where its ledger is. Each rank attaches those of its host, and
says how that went; nobody goes on before all have said so. So either all have what they need, or
all know who has not, and why.
"""

from __future__ import annotations

import enum
import os
import sys
from typing import TYPE_CHECKING

from phalanx.backends.engine import Operation, ReceiveBytes, Round, SendBytes
from phalanx.backends.shm.commons import Commons
from phalanx.errors import BackendUnavailableError
from phalanx.wire.frame import Channel, Kind

if TYPE_CHECKING:
    from phalanx.backends.base import Backend
    from phalanx.backends.tcp.engine import TcpEngine
    from phalanx.wire.messages import Address

_WORDS = 400  # bytes in which a rank says what went wrong
_TAG = 2**31  # of these messages, which no user's has


class Sharing(enum.Enum):
    """Which ranks have memory in common."""

    NOTHING = "none"
    HOSTS = "those of each host"
    ALL = "all, which have to be on one host"

    def offer(self, rank: int) -> Commons | None:
        """What this rank shows to others. Raises `BackendUnavailableError` if it cannot."""
        if self is Sharing.NOTHING:
            return None
        if sys.platform != "linux":
            raise BackendUnavailableError(
                f"rank {rank}: shared memory needs Linux (memfd, /proc), and this is "
                f"{sys.platform}; use backend='tcp'",
                rank=rank,
            )
        try:
            return Commons()
        except OSError as error:
            raise BackendUnavailableError(
                f"rank {rank}: no shared memory can be made here ({error}); use backend='tcp'",
                rank=rank,
            ) from error


def share(
    backend: Backend,
    engine: TcpEngine,
    commons: Commons,
    addresses: list[Address],
    sharing: Sharing,
) -> None:
    """Attach the memory of the ranks of this host. Blocks until all ranks have done so.

    Raises `BackendUnavailableError` on every rank if one could not, or is on another host and
    should not be.
    """
    rank = backend.rank
    here = addresses[rank].host_id
    problem = ""
    with engine.lock:
        for peer, address in enumerate(addresses):
            if peer == rank or problem:
                continue
            if address.host_id == here:
                problem = _attach(commons, peer, address)
            elif sharing is Sharing.ALL:
                problem = f"rank {peer} is on another host"
    blamed, reason = _first(_exchanged(backend, problem))
    if reason:
        raise BackendUnavailableError(
            f"rank {rank}: the ranks do not share memory: rank {blamed} says: {reason}; use "
            "backend='hybrid' for several hosts, 'tcp' where processes may not see each other",
            rank=rank,
            peer=None if blamed == rank else blamed,
        )
    with engine.lock:
        engine.share(commons)
        backend.group.window = engine.window(backend.group)


def _attach(commons: Commons, peer: int, address: Address) -> str:
    """What keeps this rank from a neighbour's memory, or ""."""
    try:
        commons.meet(peer, address.process, address.memory, address.bell)
    except OSError as error:
        user = os.getuid()
        return (
            f"the memory of rank {peer} (process {address.process}) cannot be attached: "
            f"{error.strerror or error} (this is user {user}; ranks of one host have to be "
            "processes of one user, who can see each other in /proc)"
        )
    return ""


def _exchanged(backend: Backend, mine: str) -> list[str]:
    """What each rank says."""
    size, rank = backend.world_size, backend.rank
    said = bytearray(_WORDS * size)
    own = mine.encode()[:_WORDS]
    said[rank * _WORDS : rank * _WORDS + len(own)] = own
    others = [peer for peer in range(size) if peer != rank]
    sends = tuple(SendBytes(peer, rank * _WORDS, (rank + 1) * _WORDS) for peer in others)
    receives = tuple(ReceiveBytes(p, p * _WORDS, (p + 1) * _WORDS) for p in others)
    group = backend.group
    with backend.engine.lock:
        # Not one of the group's collectives, whose numbers are the user's.
        operation = Operation(
            group,
            "rendezvous",
            Channel(group.id, Kind.POINT_TO_POINT, _TAG),
            0,
            (Round(sends, receives),),
            (memoryview(said),),
            timeout=backend.timeout,
        )
        backend.engine.issue(operation)
    backend.wait(operation)
    places = range(0, len(said), _WORDS)
    return [said[p : p + _WORDS].rstrip(b"\0").decode(errors="replace") for p in places]


def _first(said: list[str]) -> tuple[int, str]:
    return next(((rank, words) for rank, words in enumerate(said) if words), (0, ""))
