"""The collectives: what groups of ranks do with their tensors together."""

from phalanx.collectives.chunks import chunk_ranges
from phalanx.collectives.functions.all_gather import all_gather, async_all_gather
from phalanx.collectives.functions.all_gather_object import (
    all_gather_object,
    async_all_gather_object,
)
from phalanx.collectives.functions.all_reduce import (
    all_reduce,
    all_reduce_,
    async_all_reduce,
    async_all_reduce_,
)
from phalanx.collectives.functions.all_reduce_coalesced import (
    all_reduce_coalesced,
    all_reduce_coalesced_,
    async_all_reduce_coalesced,
    async_all_reduce_coalesced_,
)
from phalanx.collectives.functions.all_to_all import all_to_all, async_all_to_all
from phalanx.collectives.functions.all_to_all_uneven import (
    all_to_all_uneven,
    async_all_to_all_uneven,
)
from phalanx.collectives.functions.barrier import async_barrier, barrier
from phalanx.collectives.functions.broadcast import (
    async_broadcast,
    async_broadcast_,
    broadcast,
    broadcast_,
)
from phalanx.collectives.functions.broadcast_object import (
    async_broadcast_object,
    broadcast_object,
)
from phalanx.collectives.functions.gather import async_gather, gather
from phalanx.collectives.functions.point_to_point import irecv, isend, recv, send, sendrecv
from phalanx.collectives.functions.reduce import async_reduce, async_reduce_, reduce, reduce_
from phalanx.collectives.functions.reduce_scatter import async_reduce_scatter, reduce_scatter
from phalanx.collectives.functions.scatter import async_scatter, scatter
from phalanx.collectives.functions.wait_any import wait_any
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.reduce_op import ReduceOp

__all__ = [
    "PendingCollective",
    "ReduceOp",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "all_to_all",
    "all_to_all_uneven",
    "async_all_gather",
    "async_all_gather_object",
    "async_all_reduce",
    "async_all_reduce_",
    "async_all_reduce_coalesced",
    "async_all_reduce_coalesced_",
    "async_all_to_all",
    "async_all_to_all_uneven",
    "async_barrier",
    "async_broadcast",
    "async_broadcast_",
    "async_broadcast_object",
    "async_gather",
    "async_reduce",
    "async_reduce_",
    "async_reduce_scatter",
    "async_scatter",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "chunk_ranges",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_",
    "reduce_scatter",
    "scatter",
    "send",
    "sendrecv",
    "wait_any",
]
