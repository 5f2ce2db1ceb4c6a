"""Collectives of one MPI communicator: generators of requests, one after the other.

A generator yields a request, and goes on when that is complete; what it does in between is local.
Blocking MPI calls are quicker in some libraries, but know no deadline, and two groups' collectives
that two ranks enter in opposite orders would wait for each other in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.core.steps import NativeCall
from phalanx.native.base import divide_
from phalanx.wire.memory import copy_bits

Mpi = Any  # the module `mpi4py.MPI`; it need not be there when types are checked
Request = Any  # of mpi4py
Memory = list[Any]  # as mpi4py takes it: where, how many, of which datatype

# ------------------------------------------------------------------------------
# What MPI calls torch's dtypes and reductions.
#
# Memory that is only moved is moved in units of its elements' size. What is reduced has the MPI
# datatype of its numbers, and an MPI operation with the meaning that `ReduceOp` gives it:
#
#     dtype                  sum, product      mean            min, max     band, bor, bxor
#     float32, float64       SUM, PROD         SUM, divided    -            -
#     complex64, complex128  SUM, PROD         SUM, divided    -            -
#     int8 ... int64, uint8  SUM, PROD         SUM, divided    MIN, MAX     BAND, BOR, BXOR
#     uint16, 32, 64         SUM, PROD         -               MIN, MAX     BAND, BOR, BXOR
#     bool                   MAX, MIN          -               MIN, MAX     BAND, BOR, BXOR
#
# MPI does not say what the least of some numbers and NaN is, and knows neither bfloat16 nor
# float16.

MOST = 2**31 - 1  # elements in one call, for libraries that count with C's int

MOVED = MappingProxyType(
    {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
)
"""Bytes of an element -> the MPI datatype as which it is moved."""

_FLOATING = {
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
}
_UNSIGNED = {torch.uint16: "UINT16_T", torch.uint32: "UINT32_T", torch.uint64: "UINT64_T"}
_TRUTH = {torch.bool: "UINT8_T"}  # zeros and ones
_ROWS = (
    ("sum", "SUM", _FLOATING | _WHOLE | _UNSIGNED),
    ("sum", "MAX", _TRUTH),
    ("product", "PROD", _FLOATING | _WHOLE | _UNSIGNED),
    ("product", "MIN", _TRUTH),
    ("mean", "SUM", _FLOATING | _WHOLE),
    *(
        (op, op.upper(), _WHOLE | _UNSIGNED | _TRUTH)
        for op in ("min", "max", "band", "bor", "bxor")
    ),
)
REDUCED: Mapping[tuple[str, torch.dtype], tuple[str, str]] = MappingProxyType(
    {
        (ours, dtype): (datatype, op)
        for ours, op, datatypes in _ROWS
        for dtype, datatype in datatypes.items()
    }
)
"""(reduction, dtype) -> the names of MPI's datatype and operation."""


# ------------------------------------------------------------------------------

REMEMBERED = 64  # lengths of tensors of which a communicator knows the pieces
STAGE = 64 << 20  # bytes of others' contributions that are held at a time
LEAST_CHUNK = 16 << 10  # bytes of a rank's chunk from which `exchange` is faster than MPI


class Communicator:
    """An MPI communicator of our own, and the descriptions of memory that it takes.

    stage, least_chunk   bytes; see the defaults, and `exchange`
    """

    def __init__(
        self, mpi: Mpi, comm: Any, *, stage: int = STAGE, least_chunk: int = LEAST_CHUNK
    ) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.in_place = mpi.IN_PLACE
        self.least_chunk = least_chunk
        self.moved = {size: getattr(mpi, name) for size, name in MOVED.items()}
        self.reduced = {
            key: (getattr(mpi, datatype), getattr(mpi, op))
            for key, (datatype, op) in REDUCED.items()
        }
        self.pieces = lru_cache(REMEMBERED)(partial(_pieces, self.rank, self.size, stage))
        self._at = mpi.buffer.fromaddress
        self._block = torch.empty(0, dtype=torch.uint8)
        self._staged: tuple[int, torch.dtype] | None = None
        self._stage: tuple[Tensor, list[Tensor]] = (self._block, [])

    def memory(self, tensor: Tensor, parts: int = 1, datatype: Any = None) -> Memory:
        """A contiguous tensor's memory, cut into so many parts; to be moved without a datatype."""
        where = self._at(tensor.data_ptr(), tensor.nbytes)
        if datatype is None:
            datatype = self.moved[tensor.itemsize]
        return [where, tensor.numel() // parts, datatype]

    def parts_of(self, tensor: Tensor, counts: list[int], starts: list[int]) -> Memory:
        """Parts of a contiguous tensor's memory, one for each rank, in elements."""
        where = self._at(tensor.data_ptr(), tensor.nbytes)
        return [where, (counts, starts), self.moved[tensor.itemsize]]

    def stage(self, count: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Memory for so many elements of each other rank: all of it, and the part of each.

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

    def has(self, call: NativeCall) -> bool:
        """Whether MPI does this collective, or `exchange`: the same on every rank."""
        if any(t is not None and t.numel() > MOST for t in (call.source, call.out)):
            return False
        if call.op is None:
            return True
        if call.source is None:
            return False
        return (call.op, call.source.dtype) in REDUCED or self._is_exchanged(call)

    def steps(self, call: NativeCall) -> Iterator[Request]:
        """The requests of a collective."""
        return (exchange if self._is_exchanged(call) else whole)(self, call)

    def _is_exchanged(self, call: NativeCall) -> bool:
        source, op = call.source, call.op
        if source is None or op is None or self.size == 1 or call.collective not in EXCHANGED:
            return False
        return source.nbytes >= self.size * self.least_chunk and folds(op, source.dtype)


# ------------------------------------------------------------------------------
# What MPI does whole: one request, and what it leaves to be done.


class MpiCall(NamedTuple):
    """One of mpi4py's calls, for all collectives but a broadcast and a barrier.

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


def whole(c: Communicator, call: NativeCall) -> Iterator[Request]:
    """A collective that MPI does whole."""
    name, source, out, op, root = call
    is_root = c.rank == root
    if name == "barrier":
        yield c.comm.Ibarrier()
        return
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
    if op == "mean" and into is not None:
        assert out is not None
        divide_(out, c.size)


# ------------------------------------------------------------------------------
# Large reductions: MPI moves the contributions, and torch reduces them.
#
#          rank 0    rank 1                       rank 0         rank 1
#         a0 | a1    b0 | b1   -- all to all ->   a0 + b0        a1 + b1   -- all gather -> both
#
# Every rank reduces its own chunk, in rank order. Each sends 2(p-1)/p of the bytes for an all-
# reduce, which is optimal (Thakur, Rabenseifner & Gropp 2005, section 4.5). Only MPI's nonblocking
# collectives that move bytes are used: those that reduce are slow in Open MPI. Memory for what
# comes from others is bounded: what is larger is done piece by piece.

EXCHANGED = frozenset({"all_reduce", "reduce", "reduce_scatter"})


def exchange(c: Communicator, call: NativeCall) -> Iterator[Request]:
    """A reduction in which MPI moves the contributions."""
    assert call.source is not None
    assert call.op is not None
    source, root = call.source.view(-1), call.root
    out = None
    if call.collective != "reduce" or c.rank == root:
        assert call.out is not None
        out = call.out.view(-1)
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
        fold([*theirs[: c.rank], mine, *theirs[c.rank :]], theirs[0], own, call.op)
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


class TensorPiece(NamedTuple):
    """A part of a tensor that is exchanged at once, in elements of the whole.

    counts, starts          each rank's chunk of it
    even                    whether all chunks are of one size
    counts_out              what goes to each rank: its chunk, nothing to oneself
    counts_in, starts_in    what comes from each rank, and where in the stage
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
    """The pieces of a tensor of this length; of each, what comes to this rank fits the stage.

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
# Reducing contributions with torch, after MPI has moved them.
#
# Torch's reductions are faster than those in MPI libraries, have bfloat16 and float16, and a
# meaning for NaN. Contributions are reduced in rank order.

BLOCK = 1 << 16  # elements reduced at a time in a wider dtype; they fit the second-level cache

_HALF = frozenset({torch.float16, torch.bfloat16})
_REALS = _HALF | {torch.float32, torch.float64}
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_BITS = frozenset(_WHOLE) | {torch.bool}

_COMBINE: Mapping[str, tuple[Callable[..., Tensor], frozenset[torch.dtype]]] = MappingProxyType(
    {
        "sum": (torch.add, _REALS | _COMPLEX | _BITS),
        "mean": (torch.add, (_REALS | _COMPLEX | _BITS) - {torch.bool}),
        "product": (torch.mul, _REALS | _COMPLEX | _BITS),
        "min": (torch.minimum, _REALS | _BITS),
        "max": (torch.maximum, _REALS | _BITS),
        "band": (torch.bitwise_and, _BITS),
        "bor": (torch.bitwise_or, _BITS),
        "bxor": (torch.bitwise_xor, _BITS),
    }
)
"""How each reduction combines two tensors, and of which dtypes."""


def folds(op: str, dtype: torch.dtype) -> bool:
    """Whether `fold` can do this."""
    return dtype in _COMBINE[op][1]


def fold(parts: Sequence[Tensor], spare: Tensor, out: Tensor, op: str) -> None:
    """Reduce `parts`, flat and of one length, in their order into `out`.

    spare   memory of one part, which is overwritten; may be any part, if it is the first of those
            that `out` is not
    out     may be one of the parts

    Sums and products of float16 and bfloat16 are computed in float32 and rounded once.
    """
    combine, _ = _COMBINE[op]
    if out.dtype in _HALF and op in ("sum", "mean", "product"):
        for start in range(0, out.numel(), BLOCK):
            block = slice(start, start + BLOCK)
            total = parts[0][block].to(torch.float32)
            for part in parts[1:]:
                combine(total, part[block], out=total)
            if op == "mean":
                divide_(total, len(parts))
            out[block].copy_(total)
        return
    total = parts[0]
    for part in parts[1:-1]:
        total = combine(total, part, out=spare)
    if len(parts) > 1:
        combine(total, parts[-1], out=out)
    elif total.data_ptr() != out.data_ptr():
        out.copy_(total)
    if op == "mean":
        divide_(out, len(parts))
