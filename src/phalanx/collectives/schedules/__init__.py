"""Every collective algorithm, each written once: as a generator of rounds of messages.

Start with `steps.py` (what a round is, and the rules that executors keep), then the ring in
`linear.py`, the classic. `table.py` says which phases make which collective.

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

from __future__ import annotations

from phalanx.collectives.schedules.halving_doubling import (
    core_chunks,
    doubling_all_gather,
    doubling_collect,
    halving_doubling_all_gather,
    halving_doubling_broadcast,
    halving_reduce,
    halving_spread,
)
from phalanx.collectives.schedules.linear import (
    direct_all_gather,
    direct_all_to_all,
    direct_broadcast,
    direct_reduce_scatter,
    pairwise_all_to_all,
    ring_all_gather,
    ring_broadcast,
    ring_reduce_scatter,
    star_broadcast,
    star_gather,
    star_reduce,
    star_scatter,
)
from phalanx.collectives.schedules.steps import (
    Combine,
    Recv,
    Round,
    Schedule,
    ScheduleFunction,
    Send,
    Step,
    backwards,
    picture,
    rooted,
    sparing,
    then,
    turned,
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
from phalanx.collectives.schedules.tree import (
    tree_broadcast,
    tree_gather,
    tree_reduce,
    tree_scatter,
)
from phalanx.collectives.schedules.two_level import (
    Agents,
    Hosts,
    two_level_all_gather,
    two_level_broadcast,
    two_level_collect,
    two_level_combine,
    two_level_reduce,
    two_level_reduce_scatter,
    two_level_share,
)

__all__ = [
    "COLLECTIVES",
    "REDUCING",
    "ROOTED",
    "Agents",
    "Algorithm",
    "Combine",
    "Hosts",
    "Recv",
    "Round",
    "Schedule",
    "ScheduleFunction",
    "Send",
    "Step",
    "backwards",
    "core_chunks",
    "direct_all_gather",
    "direct_all_to_all",
    "direct_broadcast",
    "direct_reduce_scatter",
    "doubling_all_gather",
    "doubling_collect",
    "for_root",
    "halving_doubling_all_gather",
    "halving_doubling_broadcast",
    "halving_reduce",
    "halving_spread",
    "pairwise_all_to_all",
    "picture",
    "ring_all_gather",
    "ring_broadcast",
    "ring_reduce_scatter",
    "rooted",
    "row_for",
    "schedule",
    "sparing",
    "star_broadcast",
    "star_gather",
    "star_reduce",
    "star_scatter",
    "then",
    "tree_broadcast",
    "tree_gather",
    "tree_reduce",
    "tree_scatter",
    "turned",
    "two_level_all_gather",
    "two_level_broadcast",
    "two_level_collect",
    "two_level_combine",
    "two_level_reduce",
    "two_level_reduce_scatter",
    "two_level_share",
]
