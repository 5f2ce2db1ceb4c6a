"""Large reductions: MPI brings together what belongs together, and torch reduces it.

         rank 0    rank 1                       rank 0         rank 1
        a0 | a1    b0 | b1   -- all to all ->   a0 + b0        a1 + b1   -- all gather -> both

Every rank reduces its own chunk, in rank order. Each sends 2(p-1)/p of the bytes for an all-reduce,
which is optimal (Thakur, Rabenseifner & Gropp 2005, section 4.5). Only MPI's nonblocking
collectives that move bytes are used: those that reduce are slow in Open MPI. Memory for what comes
from others is bounded: what is larger is done piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from phalanx.backends.mpi.folding import fold
from phalanx.backends.mpi.steps import Communicator, Steps
from phalanx.backends.native import Call

REMEMBERED = 64  # lengths of tensors of which a communicator knows the pieces
STAGE = 64 << 20  # bytes of others' contributions that are held at a time
LEAST_CHUNK = 16 << 10  # bytes of a rank's chunk from which this is faster than MPI's reductions


class Piece(NamedTuple):
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


def _all_reduce(c: Communicator, call: Call) -> Steps:
    source, out = _flat(call.source), _flat(call.out)
    for piece in _pieces(c, source.numel(), source.itemsize):
        yield from _reduced(c, call, source, piece, out[piece.own])
        if piece.even:  # this is faster in Open MPI
            yield c.comm.Iallgather(c.in_place, c.each_of(out[piece.all]))
        else:
            yield c.comm.Iallgatherv(c.in_place, c.parts_of(out, piece.counts, piece.starts))


def _reduce(c: Communicator, call: Call) -> Steps:
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


def _reduce_scatter(c: Communicator, call: Call) -> Steps:
    source, out = _flat(call.source), _flat(call.out)
    first = c.rank * out.numel()
    for piece in _pieces(c, out.numel(), source.itemsize, rows=True):
        into = slice(piece.own.start - first, piece.own.stop - first)
        yield from _reduced(c, call, source, piece, out[into])


EXCHANGED: Mapping[str, Callable[[Communicator, Call], Steps]] = MappingProxyType(
    {"all_reduce": _all_reduce, "reduce": _reduce, "reduce_scatter": _reduce_scatter}
)


def is_large(call: Call, size: int) -> bool:
    """Whether a reduction is better done in this way: the same on every rank."""
    source = call.source
    if source is None or size == 1 or call.collective not in EXCHANGED:
        return False
    return source.nbytes >= size * LEAST_CHUNK


def _reduced(c: Communicator, call: Call, source: Tensor, piece: Piece, own: Tensor) -> Steps:
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


def _pieces(c: Communicator, length: int, itemsize: int, *, rows: bool = False) -> list[Piece]:
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


def _piece(rank: int, counts: list[int], starts: list[int]) -> Piece:
    count, others = counts[rank], range(len(counts))
    return Piece(
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
