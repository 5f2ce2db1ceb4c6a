"""Every collective algorithm, each written once: as a generator of rounds of messages.

Start with `steps.py` (rounds, and the rules that executors keep), then the ring in `linear.py`, the
classic. `table.py` lists the phases of each collective.

    ring              linear.py            two neighbours, all links busy     large tensors
    direct            linear.py            all pairs at once, in rank order   reproducible sums
    star              linear.py            one hub, one round                 few bytes, few ranks
    pairwise          linear.py            a message of its own a pair        all to all
    tree              tree.py              binomial, ceil(log2 p) rounds      few bytes, many ranks
    halving_doubling  halving_doubling.py  log2 p rounds, the ring's bytes    everything between
    two_level         two_level.py         inside hosts, then between them    several ranks a host

In the drawings, a line is a round, and `0 -2:4-> 1` a message: rank 0's chunks 2 and 3 go to rank 1
and overwrite what it has there; in `0 +2:4+> 1` they are reduced into it.

`tests/collectives/schedule_checker.py` runs the schedules of all ranks against each other, for up
to 1,000 ranks, and proves that every contribution counts exactly once.
"""

from phalanx.collectives.schedules.steps import (
    Combine,
    Recv,
    Round,
    Schedule,
    ScheduleFunction,
    Send,
    Step,
    picture,
)
from phalanx.collectives.schedules.table import (
    COLLECTIVES,
    REDUCING,
    ROOTED,
    Algorithm,
    for_root,
    row_for,
    schedule,
)
from phalanx.collectives.schedules.two_level import Hosts

__all__ = [
    "COLLECTIVES",
    "REDUCING",
    "ROOTED",
    "Algorithm",
    "Combine",
    "Hosts",
    "Recv",
    "Round",
    "Schedule",
    "ScheduleFunction",
    "Send",
    "Step",
    "for_root",
    "picture",
    "row_for",
    "schedule",
]
