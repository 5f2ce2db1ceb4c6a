"""Every collective algorithm, each written once: as a generator of rounds of messages.

Start with `steps` (what a round is, and what whoever runs it promises), then `ring`, the classic;
every other file is one more family. `table` says which phases make which collective.

    steps             Send, Recv, Combine, and the rules
    ring              two neighbours, all links busy     large tensors
    direct            all pairs at once, in rank order   shared memory; reproducible sums
    tree              binomial, ceil(log2 p) rounds      small tensors, many ranks
    halving_doubling  log2 p rounds, the ring's bytes    everything between
    star              one hub, one round                 a few bytes, a few ranks
    pairwise          every pair has its own message     all to all
    two_level         inside hosts, then between them    several ranks on each of several hosts
    agents            who acts for whom on which host
    table             collective -> algorithm -> row
    picture           the drawings in these docstrings

In the drawings, a line is a round, and `0 -2:4-> 1` a message: rank 0's chunks 2 and 3 go to rank 1
and overwrite what it has there; in `0 +2:4+> 1` they are reduced into it.
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
