"""Large reductions: MPI brings together what belongs together, and torch reduces it.

         rank 0    rank 1                       rank 0         rank 1
        a0 | a1    b0 | b1   -- all to all ->   a0 + b0        a1 + b1   -- all gather -> both

Every rank reduces its own chunk, in rank order. Each sends 2(p-1)/p of the bytes for an all-reduce,
which is optimal (Thakur, Rabenseifner & Gropp 2005, section 4.5). Only MPI's nonblocking
collectives that move bytes are used: those that reduce are slow in Open MPI. Memory for what comes
from others is bounded: what is larger is done piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from torch import Tensor

from phalanx.backends.mpi.folding import fold
from phalanx.backends.mpi.steps import Communicator, Steps
from phalanx.backends.native import Call

STAGE = 64 << 20  # bytes of others' contributions that are held at a time
LEAST_CHUNK = 16 << 10  # bytes of a rank's chunk from which on this is faster than MPI's reductions


def _all_reduce(c: Communicator, call: Call) -> Steps:
    source, out = _flat(call.source), _flat(call.out)
    for start, stop in _pieces(source.numel(), c.size, c.size, source.itemsize):
        counts, starts = _chunks(start, stop, c.size)
        own = out[starts[c.rank] :][: counts[c.rank]]
        yield from _reduced(c, call, source, counts, starts, own)
        yield c.comm.Iallgatherv(c.in_place, c.parts_of(out, counts, starts))


def _reduce(c: Communicator, call: Call) -> Steps:
    source = _flat(call.source)
    here = c.rank == call.root
    out = _flat(call.out) if here else None
    for start, stop in _pieces(source.numel(), c.size, c.size, source.itemsize):
        counts, starts = _chunks(start, stop, c.size)
        if out is not None:
            own = out[starts[c.rank] :][: counts[c.rank]]
            yield from _reduced(c, call, source, counts, starts, own)
            into = c.parts_of(out, counts, starts)
            yield c.comm.Igatherv(c.in_place, into, call.root)
        else:
            own = c.stage((c.size - 1) * counts[c.rank], source.dtype)[: counts[c.rank]]
            yield from _reduced(c, call, source, counts, starts, own)
            yield c.comm.Igatherv(c.all_of(own), None, call.root)


def _reduce_scatter(c: Communicator, call: Call) -> Steps:
    source, out = _flat(call.source), _flat(call.out)
    length = out.numel()
    for start, stop in _pieces(length, 1, c.size, source.itemsize):
        counts = [stop - start] * c.size
        starts = [rank * length + start for rank in range(c.size)]
        yield from _reduced(c, call, source, counts, starts, out[start:stop])


EXCHANGED: Mapping[str, Callable[[Communicator, Call], Steps]] = MappingProxyType(
    {"all_reduce": _all_reduce, "reduce": _reduce, "reduce_scatter": _reduce_scatter}
)


def is_large(call: Call, size: int) -> bool:
    """Whether a reduction is better done in this way: the same on every rank."""
    source = call.source
    if source is None or size == 1 or call.collective not in EXCHANGED:
        return False
    return source.nbytes >= size * LEAST_CHUNK


def _reduced(
    c: Communicator, call: Call, source: Tensor, counts: list[int], starts: list[int], own: Tensor
) -> Steps:
    """Reduce this rank's part of everyone's `source` into `own`, which may be a part of it."""
    assert call.op is not None
    rank, count = c.rank, counts[c.rank]
    mine = source[starts[rank] :][:count]
    stage = c.stage((c.size - 1) * count, source.dtype)
    counts_in = [0 if peer == rank else count for peer in range(c.size)]
    starts_in = [(peer - (peer > rank)) * count for peer in range(c.size)]
    counts_out = [0 if peer == rank else n for peer, n in enumerate(counts)]
    yield c.comm.Ialltoallv(
        c.parts_of(source, counts_out, starts), c.parts_of(stage, counts_in, starts_in)
    )
    rows = list(stage.view(c.size - 1, count)) if count else [stage] * (c.size - 1)
    parts = [*rows[:rank], mine, *rows[rank:]]
    fold(parts, rows[0], own, call.op)


def _pieces(length: int, cut_by: int, size: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Parts of a tensor of which others' contributions to this rank's chunk fit the stage.

    cut_by   how many chunks a piece is cut into
    """
    chunk = max(1, STAGE // (itemsize * max(1, size - 1)))
    step = chunk * cut_by
    for start in range(0, length, step):
        yield start, min(length, start + step)


def _chunks(start: int, stop: int, size: int) -> tuple[list[int], list[int]]:
    """The lengths and first elements of a piece's chunks, one for each rank."""
    each, rest = divmod(stop - start, size)
    counts = [each + (rank < rest) for rank in range(size)]
    starts = [start + rank * each + min(rank, rest) for rank in range(size)]
    return counts, starts


def _flat(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.view(-1)
