"""The collectives: what groups of ranks do with their tensors together."""

from phalanx.collectives.all_gather import all_gather, async_all_gather
from phalanx.collectives.all_reduce import (
    all_reduce,
    all_reduce_,
    async_all_reduce,
    async_all_reduce_,
)
from phalanx.collectives.barrier import async_barrier, barrier
from phalanx.collectives.broadcast import (
    async_broadcast,
    async_broadcast_,
    broadcast,
    broadcast_,
)
from phalanx.collectives.chunks import chunk_ranges
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.point_to_point import recv, send, sendrecv
from phalanx.collectives.reduce_op import ReduceOp
from phalanx.collectives.reduce_scatter import async_reduce_scatter, reduce_scatter

__all__ = [
    "PendingCollective",
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "async_all_gather",
    "async_all_reduce",
    "async_all_reduce_",
    "async_barrier",
    "async_broadcast",
    "async_broadcast_",
    "async_reduce_scatter",
    "barrier",
    "broadcast",
    "broadcast_",
    "chunk_ranges",
    "recv",
    "reduce_scatter",
    "send",
    "sendrecv",
]
