"""How ranks that have met come to share memory.

Everyone has said in the rendezvous where its ledger is. Each rank attaches those of its host, and
says how that went; nobody goes on before all have said so. So either all have what they need, or
all know who has not, and why.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phalanx.backends.shm.commons import Commons
from phalanx.errors import BackendUnavailableError

if TYPE_CHECKING:
    from phalanx.wire.messages import Address


log = logging.getLogger("phalanx")


class Sharing(enum.Enum):
    """Which ranks have memory in common."""

    NOTHING = "none"
    HOSTS = "those of each host"
    ALL = "all, which have to be on one host"

    @property
    def shares(self) -> bool:
        """Whether any do."""
        return self is not Sharing.NOTHING

    def relaxed(self) -> Sharing:
        """The same, for ranks that need not be on one host."""
        return Sharing.HOSTS if self is Sharing.ALL else self

    def offer(self, rank: int, world_size: int) -> tuple[Commons | None, str]:
        """What this rank shows to others; or None, and why it cannot.

        It meets the others all the same, so that they hear of it, too.
        """
        if not self.shares:
            return None, ""
        try:
            return Commons(rank, world_size), ""
        except (OSError, AttributeError) as error:  # of a system that has no memfd_create
            return None, str(error)

    def attach(
        self, commons: Commons | None, why_not: str, rank: int, addresses: list[Address]
    ) -> str:
        """Attach the memory of the ranks of this one's host; what keeps it from that, or ""."""
        if commons is None:
            return f"it has no memory to share ({why_not}): that needs Linux (memfd, /proc)"
        here = addresses[rank].host_id
        for peer, address in enumerate(addresses):
            if peer == rank:
                continue
            if address.host_id != here:
                if self is Sharing.ALL:
                    return f"rank {peer} is on another host"
                continue
            if address.memory < 0:
                continue  # it has none, and says so itself
            try:
                commons.meet(peer, address.process, address.memory, address.bell)
            except OSError as error:
                return (
                    f"the memory of rank {peer} (process {address.process}) cannot be attached: "
                    f"{error.strerror or error} (this is user {os.getuid()}; ranks of one host "
                    "have to be processes of one user, who see each other in /proc)"
                )
        return ""


def check(rank: int, problems: Mapping[int, str], *, fall_back: bool) -> bool:
    """Whether every rank has attached what it should have.

    If not, raises `BackendUnavailableError`; or, with `fall_back`, rank 0 says so in its log.
    """
    for blamed, problem in sorted(problems.items()):
        if not problem:
            continue
        what = f"the ranks do not share memory: rank {blamed} says: {problem}"
        if fall_back:
            log.log(logging.WARNING if rank == 0 else logging.DEBUG, "%s; all goes over TCP", what)
            return False
        raise BackendUnavailableError(
            f"rank {rank}: {what}; use backend='hybrid' for several hosts, 'tcp' where processes "
            "may not see each other",
            rank=rank,
            peer=None if blamed == rank else blamed,
        )
    return True
