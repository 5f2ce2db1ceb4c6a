"""How ranks that have met come to share memory.

Everyone has said in the rendezvous where its ledger is. Each rank attaches those of its host, and
says how that went; nobody goes on before all have said so. So either all have what they need, or
all know who has not, and why.
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phalanx.backends.shm.commons import Commons
from phalanx.errors import BackendUnavailableError

if TYPE_CHECKING:
    from phalanx.wire.messages import Address


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

    def attach(self, commons: Commons, rank: int, addresses: list[Address]) -> str:
        """Attach the memory of the ranks of this one's host; what keeps it from that, or ""."""
        here = addresses[rank].host_id
        for peer, address in enumerate(addresses):
            if peer == rank:
                continue
            if address.host_id != here:
                if self is Sharing.ALL:
                    return f"rank {peer} is on another host"
                continue
            try:
                commons.meet(peer, address.process, address.memory, address.bell)
            except OSError as error:
                return (
                    f"the memory of rank {peer} (process {address.process}) cannot be attached: "
                    f"{error.strerror or error} (this is user {os.getuid()}; ranks of one host "
                    "have to be processes of one user, who see each other in /proc)"
                )
        return ""


def check(rank: int, problems: Mapping[int, str]) -> None:
    """Raise `BackendUnavailableError` if a rank has not attached what it should have."""
    for blamed, problem in sorted(problems.items()):
        if problem:
            raise BackendUnavailableError(
                f"rank {rank}: the ranks do not share memory: rank {blamed} says: {problem}; use "
                "backend='hybrid' for several hosts, 'tcp' where processes may not see each other",
                rank=rank,
                peer=None if blamed == rank else blamed,
            )
