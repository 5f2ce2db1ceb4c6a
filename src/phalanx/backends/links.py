"""What links cost, as estimates for the choice of an algorithm."""

from __future__ import annotations

from math import inf
from typing import NamedTuple


class LinkCost(NamedTuple):
    """What it costs to send a message, for the choice of an algorithm. The same on every rank."""

    latency: float  # seconds until the receiver can go on
    overhead: float  # seconds of work for each message sent or received
    bandwidth: float  # bytes a second
    duplex: bool  # whether sending and receiving at the same time takes no longer than either


class Links(NamedTuple):
    """The links of a group. All ranks of a host share one bandwidth out of it, and one into it."""

    inside: LinkCost  # a host
    between: LinkCost  # hosts
    processors: float = inf  # of a host, which its ranks share; the same number on all of them


# Inside a host a byte costs a processor's time on either side, between hosts the wire's. Measured
# with 2, 3 and 4 processes on two processors, as the times of all algorithms of all_reduce, from
# 8 bytes to 16 MiB, in turn.
INSIDE_A_HOST = LinkCost(latency=70e-6, overhead=20e-6, bandwidth=2.5e9, duplex=False)
BETWEEN_HOSTS = LinkCost(latency=100e-6, overhead=20e-6, bandwidth=1.2e9, duplex=True)
