"""What is measured: how much memory each operation takes, and what has to be in it afterwards.

Element i of what rank r gives is `i % 13 + r + 1`, where i counts over the whole of the message.
So a result says which rank and which place it is from, and sums stay whole numbers.

Bytes are counted as the NCCL tests do: those of the larger of what a rank gives and gets. Their
bus bandwidth (doc/PERFORMANCE.md) is what each rank's link has to carry at least, so that it can
be compared with what the machine can do, whatever the number of ranks: n bytes in t seconds are
n / t times `bus(ranks)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["EXPANDED", "OPERATIONS", "Operation", "Segment", "longest_stretch"]

PERIOD = 13


class Segment(NamedTuple):
    """`length` elements; the k-th is `scale * ((first + k) % 13) + shift`."""

    first: int
    length: int
    scale: float
    shift: float


Segments = tuple[Segment, ...]
Given = Callable[[int, int, int], Segments]
Gotten = Callable[[int, int, int], Segments]


def _own(rank: int, size: int, n: int) -> Segments:
    """All n elements of this rank's."""
    return (Segment(0, n, 1, rank + 1),)


def _own_slice(rank: int, size: int, n: int) -> Segments:
    return (Segment(rank * (n // size), n // size, 1, rank + 1),)


def _all_slices(rank: int, size: int, n: int) -> Segments:
    return tuple(Segment(q * (n // size), n // size, 1, q + 1) for q in range(size))


def _slices_for_me(rank: int, size: int, n: int) -> Segments:
    return tuple(Segment(rank * (n // size), n // size, 1, q + 1) for q in range(size))


def _slice_of_root(rank: int, size: int, n: int) -> Segments:
    return (Segment(rank * (n // size), n // size, 1, 1),)


def _sum(rank: int, size: int, n: int) -> Segments:
    return (Segment(0, n, size, size * (size + 1) / 2),)


def _slice_of_sum(rank: int, size: int, n: int) -> Segments:
    return (Segment(rank * (n // size), n // size, size, size * (size + 1) / 2),)


def _of_root(rank: int, size: int, n: int) -> Segments:
    return _own(0, size, n)


def _of_even(rank: int, size: int, n: int) -> Segments:
    return _own(rank - rank % 2, size, n)


def _on_root(gotten: Gotten) -> Gotten:
    return lambda rank, size, n: gotten(rank, size, n) if rank == 0 else ()


def _on_even(given: Given) -> Given:
    return lambda rank, size, n: given(rank, size, n) if rank % 2 == 0 else ()


def _nothing(rank: int, size: int, n: int) -> Segments:
    return ()


@dataclass(frozen=True)
class Operation:
    """One row: an operation, for p ranks and messages of n elements.

    source, out   how many elements a rank gives and gets, as parts of n: 1, or p for the p-th part
    in_place      what is given and gotten is one memory, unless it is asked for otherwise
    given         what a rank gives; nothing, where its values do not matter
    gotten        what it has afterwards; nothing, where it gets nothing
    bus           the factor of the bus bandwidth
    trips         messages that one call takes one after the other, of which one is shown
    least         calls that make a round at least
    training      a training step (`peers/training.py`), to be compared with the same step alone
    held          its peak of memory is of interest, too
    """

    name: str
    source: bool | None  # whole; a p-th part; nothing
    out: bool | None
    in_place: bool
    given: Given
    gotten: Gotten
    bus: Callable[[int], float]
    trips: int = 1
    least: int = 1
    training: bool = False
    held: bool = False

    def elements(self, whole: bool | None, size: int, n: int) -> int:
        """How many elements such memory has."""
        return 0 if whole is None else n if whole else n // size

    def fitting(self, size: int, count: int) -> int:
        """The number of float32 elements, for `count` bytes: at least, and to be cut into p."""
        if self.source is None:
            return 0
        unit = size if self.sliced else 1
        return -(-count // (4 * unit)) * unit

    @property
    def sliced(self) -> bool:
        """Whether messages are cut into one part for each rank."""
        return not self.in_place and self.name not in ("copy", "reduce")


def _once(p: int) -> float:
    return 1.0


def _twice(p: int) -> float:
    return 2 * (p - 1) / p


def _others(p: int) -> float:
    return (p - 1) / p


# fmt: off
_W, _P = True, False  # the whole message, or a p-th part of it
_ROOT, _EVEN = _on_root, _on_even
OPERATIONS: Mapping[str, Operation] = MappingProxyType({row.name: row for row in (
    #         name              gives gets  in place  given         gotten              bus
    Operation("all_reduce",     _W,   _W,   True,     _own,         _sum,               _twice),
    Operation("all_gather",     _P,   _W,   False,    _own_slice,   _all_slices,        _others),
    Operation("reduce_scatter", _W,   _P,   False,    _own,         _slice_of_sum,      _others),
    Operation("broadcast",      _W,   _W,   True,     _ROOT(_own),  _of_root,           _once),
    Operation("all_to_all",     _W,   _W,   False,    _own,         _slices_for_me,     _others),
    Operation("reduce",         _W,   _W,   False,    _own,         _ROOT(_sum),        _once),
    Operation("gather",         _P,   _W,   False,    _own_slice,   _ROOT(_all_slices), _others),
    Operation("scatter",        _W,   _P,   False,    _own,         _slice_of_root,     _others),
    Operation("ping_pong",      _W,   _W,   True,     _EVEN(_own),  _of_even,           _once, 2),
    Operation("stream",         _W,   _W,   True,     _EVEN(_own),  _of_even,           _once),
    Operation("barrier",        None, None, True,     _nothing,     _nothing,           _once),
    Operation("ddp",            None, None, True,     _nothing,     _nothing,           _once,
              least=5, training=True),
    Operation("fsdp",           None, None, True,     _nothing,     _nothing,           _once,
              least=5, training=True, held=True),
    Operation("copy",           _W,   _W,   False,    _own,         _own,               _once),
)})
"""Name -> row. `ping_pong` and `stream` are between each even rank and the next one; `ddp`
and `fsdp` are training steps (see `peers/training.py`), and `copy` what the machine can do."""
# fmt: on

EXPANDED: Mapping[str, tuple[str, ...]] = MappingProxyType({"p2p": ("ping_pong", "stream")})
"""What is asked for under one name and measured as several."""


def longest_stretch(operation: Operation, size: int, *, in_place: bool) -> int:
    """How many calls may follow each other until the result has to be looked at.

    An all_reduce in place multiplies its own result by p in each call, and float32 has to hold it
    to the last bit: a power of two times a small number, or a whole number below 2^24.
    """
    if operation.name != "all_reduce" or not in_place or size < 2:
        return 1000
    largest = size * (PERIOD - 1) + size * (size + 1) // 2
    limit = 1 << (126 if size & (size - 1) == 0 else 24)
    calls = 1
    while largest * size**calls < limit:
        calls += 1
    return calls
