"""`MpiLibrary`: one communicator of MPI's, its collectives, and groups of some of its ranks.

A collective is a generator of requests: it yields one, and goes on when that is complete; it works
locally in between. Blocking MPI calls are quicker in some libraries, but have no deadline. Two
ranks that enter two groups' collectives in opposite orders would deadlock in them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from phalanx.core.reduce_op import RankOrderReduction, ReduceOp, divide_, reduction_for
from phalanx.core.steps import NativeCall
from phalanx.errors import (
    DistributedError,
    PeerLostError,
    UnsupportedOperationError,
)
from phalanx.native.base import Handle, Library
from phalanx.wire.memory import copy_bits

Mpi = Any  # the module `mpi4py.MPI`; it need not be there when types are checked
Request = Any  # of mpi4py
Memory = list[Any]  # as mpi4py takes it: address, count, datatype

# ------------------------------------------------------------------------------
# MPI's names of torch's dtypes and reductions.
#
# Memory that is only moved is moved in units of its elements' size. Memory that is reduced has the
# MPI datatype of its numbers, and an MPI operation with the meaning of `ReduceOp`:
#
#     dtype                  sum, product      mean            min, max     band, bor, bxor
#     float32, float64       SUM, PROD         SUM, divided    -            -
#     complex64, complex128  SUM, PROD         SUM, divided    -            -
#     integers               SUM, PROD         SUM, divided    MIN, MAX     BAND, BOR, BXOR
#     bool                   MAX, MIN          -               MIN, MAX     BAND, BOR, BXOR
#
# MPI does not say what the least of some numbers and NaN is, and knows neither bfloat16 nor
# float16.

MOST = 2**31 - 1  # elements in one call, for libraries that count with C's int

MOVED = MappingProxyType(
    {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
)
"""Bytes of an element -> the MPI datatype as which it is moved."""

_NUMBERS = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
_WHOLE = {
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
}
_TRUTH = {torch.bool: "UINT8_T"}  # zeros and ones
_ROWS = (
    (ReduceOp.SUM, "SUM", _NUMBERS | _WHOLE),
    (ReduceOp.SUM, "MAX", _TRUTH),
    (ReduceOp.MEAN, "SUM", _NUMBERS | _WHOLE),
    (ReduceOp.PRODUCT, "PROD", _NUMBERS | _WHOLE),
    (ReduceOp.PRODUCT, "MIN", _TRUTH),
    (ReduceOp.MIN, "MIN", _WHOLE | _TRUTH),
    (ReduceOp.MAX, "MAX", _WHOLE | _TRUTH),
    (ReduceOp.BAND, "BAND", _WHOLE | _TRUTH),
    (ReduceOp.BOR, "BOR", _WHOLE | _TRUTH),
    (ReduceOp.BXOR, "BXOR", _WHOLE | _TRUTH),
)
REDUCED: Mapping[tuple[ReduceOp, torch.dtype], tuple[str, str]] = MappingProxyType(
    {
        (ours, dtype): (datatype, op)
        for ours, op, datatypes in _ROWS
        for dtype, datatype in datatypes.items()
    }
)
"""(reduction, dtype) -> the names of MPI's datatype and operation."""


# ------------------------------------------------------------------------------

REMEMBERED = 64  # kinds of tensors of which a group knows the pieces, or how to reduce them
STAGE = 64 << 20  # bytes of others' contributions that are held at a time
LEAST_CHUNK = 16 << 10  # bytes of a rank's chunk from which `exchange` is faster than MPI


class MpiLibrary(Library):
    """A private communicator, and the descriptions of memory that it takes.

    Memory that MPI still writes when a group breaks is kept until MPI ends: its collectives cannot
    be cancelled. Communicators are never freed: Open MPI may deliver a late message to the next
    communicator, and ends the job.

    looks                how many polls a waiting thread makes at once
    stage, least_chunk   bytes; see the defaults, and `exchange`
    """

    name = "MPI"

    def __init__(
        self, mpi: Mpi, comm: Any, looks: int, *, stage: int = STAGE, least_chunk: int = LEAST_CHUNK
    ) -> None:
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # which mpi4py raises
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.in_place = mpi.IN_PLACE
        self.moved = {size: getattr(mpi, name) for size, name in MOVED.items()}
        self.reduced = {
            key: (getattr(mpi, datatype), getattr(mpi, op))
            for key, (datatype, op) in REDUCED.items()
        }
        self.pieces = lru_cache(REMEMBERED)(partial(_pieces, self.rank, self.size, stage))
        self.reduction = lru_cache(REMEMBERED)(partial(_reduction, self.size))
        self._mpi = mpi
        self._looks = looks
        self._least_exchanged = least_chunk * self.size
        self._pending: set[MpiHandle] = set()
        self._ended = False
        self._at = mpi.buffer.fromaddress
        self._block = torch.empty(0, dtype=torch.uint8)
        self._staged: tuple[int, torch.dtype] | None = None
        self._stage: tuple[Tensor, list[Tensor]] = (self._block, [])

    def memory(self, tensor: Tensor, parts: int = 1, datatype: Any = None) -> Memory:
        """Return a contiguous tensor's memory, cut into `parts`; to be moved without a datatype."""
        where = self._at(tensor.data_ptr(), tensor.nbytes)
        if datatype is None:
            datatype = self.moved[tensor.itemsize]
        return [where, tensor.numel() // parts, datatype]

    def parts_of(self, tensor: Tensor, counts: list[int], starts: list[int]) -> Memory:
        """Return parts of a contiguous tensor's memory, one for each rank, in elements."""
        where = self._at(tensor.data_ptr(), tensor.nbytes)
        return [where, (counts, starts), self.moved[tensor.itemsize]]

    def stage(self, count: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Return memory for `count` elements of each other rank: all of it, and the part of each.

        The next call gives the same again.
        """
        if self._staged != (count, dtype):
            parts = self.size - 1
            size = parts * count * dtype.itemsize
            if self._block.numel() < size:
                self._block = torch.empty(size, dtype=torch.uint8)
            memory = self._block[:size].view(dtype)
            self._staged = (count, dtype)
            self._stage = memory, [memory[n * count :][:count] for n in range(parts)]
        return self._stage

    @override
    def has(self, call: NativeCall) -> bool:
        source, op = call.source, call.op
        if any(t is not None and t.numel() > MOST for t in (source, call.out)):
            return False
        if op is None or self._is_exchanged(call):
            return True
        return source is not None and (op, source.dtype) in REDUCED

    @override
    def collective(self, call: NativeCall) -> Handle:
        requests = (exchange if self._is_exchanged(call) else whole)(self, call)
        return MpiHandle(requests, self._pending, self._looks)

    def _is_exchanged(self, call: NativeCall) -> bool:
        if call.op is None or call.source is None:
            return False
        return bool(call.source.nbytes >= self._least_exchanged)

    @override
    def subgroup(self, members: Sequence[int], ident: int, timeout: float) -> Library:
        mpi = self._mpi
        tag = ident % int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB))
        everyone = self.comm.Get_group()
        some = everyone.Incl(list(members))
        try:
            return MpiLibrary(mpi, self.comm.Create_group(some, tag), self._looks)
        finally:
            some.Free()
            everyone.Free()

    @override
    def kind_of(self, error: Exception) -> type[DistributedError]:
        mpi = self._mpi
        wrong_calls = [mpi.ERR_ARG, mpi.ERR_BUFFER, mpi.ERR_COUNT, mpi.ERR_OP, mpi.ERR_TYPE]
        if isinstance(error, mpi.Exception) and error.Get_error_class() in wrong_calls:
            return UnsupportedOperationError
        return PeerLostError

    @override
    def close(self) -> None:
        if self._ended or self._mpi.Is_finalized():
            return
        self._ended = True
        if self._pending:
            keyval = self._mpi.Comm.Create_keyval()
            self._mpi.COMM_SELF.Set_attr(keyval, self._pending)

    @override
    def abort(self) -> None:
        self.close()


class MpiHandle(Handle):
    """A request, and those of its collective that follow it.

    steps    yields the requests, one after the other, and does the local work in between
    pending  the unfinished handles, of which this is one
    looks    how many polls a waiting thread makes at once
    """

    __slots__ = ("_looks", "_pending", "_request", "_steps")

    def __init__(self, steps: Iterator[Request], pending: set[MpiHandle], looks: int) -> None:
        self._steps = steps
        self._looks = looks
        self._request: Request = next(steps, None)
        self._pending = pending
        if self._request is not None:
            pending.add(self)

    @override
    def done(self) -> bool:
        request = self._request
        while request is not None:
            if not request.Test():
                return False
            self._request = request = next(self._steps, None)
            if request is None:
                self._pending.discard(self)
        return True

    @override
    def wait(self, seconds: float) -> bool:
        return wait_until(self.done, seconds, self._looks)


# ------------------------------------------------------------------------------
# Collectives that MPI does whole: one request, and the work after it.


class MpiCall(NamedTuple):
    """One of mpi4py's calls, for all collectives but a broadcast.

    from_root, to_root           whether only the root gives something, or gets a result
    source_in_rows, out_in_rows  whether that tensor has a row for each rank
    in_place                     whether its source may lie in its result, in its place there
    """

    name: str
    from_root: bool = False
    to_root: bool = False
    source_in_rows: bool = False
    out_in_rows: bool = False
    in_place: bool = False


CALLS: Mapping[str, MpiCall] = MappingProxyType(
    {
        "all_reduce": MpiCall("Iallreduce", in_place=True),
        "reduce": MpiCall("Ireduce", to_root=True, in_place=True),
        "reduce_scatter": MpiCall("Ireduce_scatter_block", source_in_rows=True),
        "all_gather": MpiCall("Iallgather", out_in_rows=True, in_place=True),
        "gather": MpiCall("Igather", to_root=True, out_in_rows=True, in_place=True),
        "scatter": MpiCall("Iscatter", from_root=True, source_in_rows=True),
        "all_to_all": MpiCall("Ialltoall", source_in_rows=True, out_in_rows=True),
    }
)


def whole(c: MpiLibrary, call: NativeCall) -> Iterator[Request]:
    """Run a collective as one call of MPI."""
    name, source, out, op, root = call
    is_root = c.rank == root
    if name == "broadcast":
        moved = source if is_root else out
        assert moved is not None
        yield c.comm.Ibcast(c.memory(moved), root)
        if is_root and out is not None:
            copy_bits(out, moved)
        return
    row = CALLS[name]
    datatype = operation = given = into = None
    if op is not None:
        assert source is not None
        datatype, operation = c.reduced[op, source.dtype]
    if out is not None and (is_root or not row.to_root):
        into = c.memory(out, c.size if row.out_in_rows else 1, datatype)
    if source is not None and (is_root or not row.from_root):
        place = -1
        if row.in_place and into is not None:
            assert out is not None
            place = out.data_ptr() + (c.rank * source.nbytes if row.out_in_rows else 0)
        if source.data_ptr() == place:
            given = c.in_place
        else:
            given = c.memory(source, c.size if row.source_in_rows else 1, datatype)
    arguments = [given, into]
    if operation is not None:
        arguments.append(operation)
    if row.from_root or row.to_root:
        arguments.append(root)
    yield getattr(c.comm, row.name)(*arguments)
    if op is ReduceOp.MEAN and into is not None:
        assert out is not None
        divide_(out, c.size)


# ------------------------------------------------------------------------------
# Large reductions: MPI moves the contributions, and torch reduces them, which is faster than MPI
# libraries do it, has every dtype, and a meaning for NaN.
#
#          rank 0    rank 1                       rank 0         rank 1
#         a0 | a1    b0 | b1   -- all to all ->   a0 + b0        a1 + b1   -- all gather -> both
#
# Every rank reduces its own chunk, in rank order. Each sends 2(p-1)/p of the bytes for an all-
# reduce, which is optimal (Thakur, Rabenseifner & Gropp 2005, section 4.5). Only MPI's nonblocking
# collectives that move bytes are used: those that reduce are slow in Open MPI. Memory for other
# ranks' data is bounded: larger tensors are reduced piece by piece.


def exchange(c: MpiLibrary, call: NativeCall) -> Iterator[Request]:
    """Run a reduction in which MPI moves the contributions."""
    assert call.source is not None
    assert call.op is not None
    source, root = call.source.view(-1), call.root
    out = None
    if call.collective != "reduce" or c.rank == root:
        assert call.out is not None
        out = call.out.view(-1)
    reduction = c.reduction(call.op, source.dtype)
    rows = call.collective == "reduce_scatter"
    length = source.numel() // c.size if rows else source.numel()
    for piece in c.pieces(length, source.itemsize, rows):
        start, count = piece.starts[c.rank], piece.counts[c.rank]
        stage, theirs = c.stage(count, source.dtype)
        yield c.comm.Ialltoallv(
            c.parts_of(source, piece.counts_out, piece.starts),
            c.parts_of(stage, piece.counts_in, piece.starts_in),
        )
        mine = source[start : start + count]
        into = start - c.rank * length if rows else start
        own = theirs[0] if out is None else out[into : into + count]
        reduction.reduce([*theirs[: c.rank], mine, *theirs[c.rank :]], own)
        if rows:
            continue
        given, gathered = c.in_place, None
        if out is None:
            given = c.memory(own)
        elif piece.even:  # this is faster in Open MPI
            first, last = piece.starts[0], piece.starts[-1] + piece.counts[-1]
            gathered = c.memory(out[first:last], c.size)
        else:
            gathered = c.parts_of(out, piece.counts, piece.starts)
        if call.collective == "all_reduce":
            yield (c.comm.Iallgather if piece.even else c.comm.Iallgatherv)(given, gathered)
        else:
            yield (c.comm.Igather if piece.even else c.comm.Igatherv)(given, gathered, root)


def _reduction(size: int, op: ReduceOp, dtype: torch.dtype) -> RankOrderReduction:
    divisor = size if op is ReduceOp.MEAN else 1
    return RankOrderReduction(reduction_for(op, dtype), dtype, divisor)


class TensorPiece(NamedTuple):
    """A part of a tensor that is exchanged at once, in elements of the whole.

    counts, starts          each rank's chunk of it
    even                    whether all chunks are of one size
    counts_out              elements sent to each rank: its chunk, none to oneself
    counts_in, starts_in    elements from each rank, and their places in the stage
    """

    counts: list[int]
    starts: list[int]
    even: bool
    counts_out: list[int]
    counts_in: list[int]
    starts_in: list[int]


def _pieces(
    rank: int, size: int, stage: int, length: int, itemsize: int, rows: bool
) -> list[TensorPiece]:
    """Return the pieces of a tensor of this length; the stage holds this rank's part of each.

    rows   each rank has a row of this length, and a piece is a part of all rows
    """
    ranks = range(size)
    chunk = max(1, stage // (itemsize * (size - 1)))
    step = chunk if rows else chunk * size
    pieces = []
    for start in range(0, length, step):
        count = min(step, length - start)
        if rows:
            counts, starts = [count] * size, [peer * length + start for peer in ranks]
        else:
            each, rest = divmod(count, size)
            counts = [each + (peer < rest) for peer in ranks]
            starts = [start + peer * each + min(peer, rest) for peer in ranks]
        counts_out = [0 if peer == rank else counts[peer] for peer in ranks]
        counts_in = [0 if peer == rank else counts[rank] for peer in ranks]
        starts_in = [(peer - (peer > rank)) * counts[rank] for peer in ranks]
        even = len(set(counts)) == 1
        pieces.append(TensorPiece(counts, starts, even, counts_out, counts_in, starts_in))
    return pieces


# ------------------------------------------------------------------------------
# Waiting for MPI, which moves bytes only when it is called, and knows no deadline.

LOOKS = 50  # one after the other, since a rank that polls takes the core from another
YIELDING = 0.005  # seconds of looks between which other processes may run
PAUSE = 50e-6  # seconds between looks after that
BUSY = 10e-6  # seconds: a look that takes longer has moved bytes


def wait_until(done: Callable[[], bool], seconds: float, looks: int = LOOKS) -> bool:
    """Call `done` until it is true, for about `seconds` at most; return whether it is.

    First `looks` times without a pause; then yielding the core, perhaps to the ranks waited for;
    after a while without progress, with short sleeps.
    """
    for _ in range(looks):
        if done():
            return True
    now = moved = monotonic()
    deadline = now + seconds
    while now < deadline:
        if now - moved < YIELDING:
            os.sched_yield()
        else:
            time.sleep(PAUSE)
        looked = monotonic()
        if done():
            return True
        now = monotonic()
        if now - looked > BUSY:
            moved = now
    return False
