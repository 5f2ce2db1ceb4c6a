"""Ranks that share memory, without engines: their host domain, and control blocks of groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.core.call import Members
from phalanx.transport.shm.control import ControlBlock
from phalanx.transport.shm.domain import HostDomain


@contextmanager
def local_peers(size: int) -> Iterator[list[HostDomain]]:
    """So many ranks of this process, which have met."""
    domain = [HostDomain(rank, size) for rank in range(size)]
    try:
        for rank, one in enumerate(domain):
            for other, there in enumerate(domain):
                if other != rank:
                    one.add_peer(other, os.getpid(), there.memory, there.wakeup_end)
        yield domain
    finally:
        for one in domain:
            one.close()


def make_control(domain: list[HostDomain], rank: int, ident: int = 0) -> ControlBlock:
    """A rank's control block for a group of all."""
    ranks = tuple(range(len(domain)))
    control = domain[rank].shared(Members(ident, ranks, rank))
    assert control is not None
    return control
