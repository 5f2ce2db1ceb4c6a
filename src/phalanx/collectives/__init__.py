"""The collectives: what groups of ranks do with their tensors together."""

from phalanx.collectives.chunks import chunk_ranges
from phalanx.collectives.functions.all_gather import all_gather, async_all_gather
from phalanx.collectives.functions.all_reduce import (
    all_reduce,
    all_reduce_,
    async_all_reduce,
    async_all_reduce_,
)
from phalanx.collectives.functions.barrier import async_barrier, barrier
from phalanx.collectives.functions.broadcast import (
    async_broadcast,
    async_broadcast_,
    broadcast,
    broadcast_,
)
from phalanx.collectives.functions.point_to_point import recv, send, sendrecv
from phalanx.collectives.functions.reduce_scatter import async_reduce_scatter, reduce_scatter
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.reduce_op import ReduceOp

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
