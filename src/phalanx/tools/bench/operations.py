"""What is measured: how much memory each operation takes, and what has to be in it afterwards.

Element i of what rank r gives is `i % 13 + r + 1`, where i counts over the whole of the message.
So a result says which rank and which place it is from, and sums stay whole numbers.

Bytes are counted as the NCCL tests do: those of the larger of what a rank gives and gets. Their
bus bandwidth (doc/PERFORMANCE.md) is what each rank's link has to carry at least, so that it can
be compared with what the machine can do, whatever the number of ranks: n bytes in t seconds are
n / t times `bus(ranks)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

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


# ------------------------------------------------------------------------------
# Writing what ranks give into memory, and comparing what came with what had to come.

POISON = -1.0
"""What memory holds that has to be overwritten: no result is negative."""

_BLOCK = PERIOD << 13  # elements: they stay in a core's cache


def fill(tensor: Tensor, segments: Segments) -> None:
    """Write them one after the other; nothing given is POISON everywhere."""
    if not segments:
        poison(tensor)
    for part, block in _blocks(tensor, segments):
        part.copy_(block)


def poison(tensor: Tensor) -> None:
    """Write POISON everywhere."""
    tensor.fill_(POISON)


def count_wrong(tensor: Tensor, segments: Segments, factor: float = 1.0) -> int:
    """How many elements are not `factor` times what the segments say, bit for bit."""
    wrong = 0
    for part, block in _blocks(tensor, tuple(_times(segment, factor) for segment in segments)):
        if not torch.equal(part, block):
            wrong += int((part != block).sum())
    return wrong


def _times(segment: Segment, factor: float) -> Segment:
    return segment._replace(scale=segment.scale * factor, shift=segment.shift * factor)


def _blocks(tensor: Tensor, segments: Segments) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of the tensor, and what belongs there."""
    begin = 0
    for first, length, scale, shift in segments:
        block = (
            (torch.arange(min(length, _BLOCK)) + first % PERIOD).remainder_(PERIOD).to(tensor.dtype)
        )
        block.mul_(scale).add_(shift)
        for start in range(begin, begin + length, _BLOCK):
            part = tensor[start : min(start + _BLOCK, begin + length)]
            yield part, block[: part.numel()]
        begin += length


# ------------------------------------------------------------------------------
# Where tensors of a message lie: rows of a table, by which contenders differ.


class Kind(NamedTuple):
    """One way to give memory to a call.

    registered  what the backend's `empty` gives, instead of torch's
    fresh       the result comes in new memory, each time
    apart       the result goes into memory of its own, given with `into=`
    """

    registered: bool = False
    fresh: bool = False
    apart: bool = False


MEMORIES: Mapping[str, Kind] = MappingProxyType(
    {
        "ordinary": Kind(),
        "registered": Kind(registered=True),
        "fresh": Kind(fresh=True),
        "into": Kind(apart=True),
    }
)
"""`ordinary` and `registered` are in place, where an operation can be; else into given memory."""

_MESSAGES = frozenset({"ping_pong", "stream"})


def kinds_for(operation: Operation, asked: Sequence[str]) -> list[str]:
    """Which of the kinds asked for are different things for this operation."""
    if operation.source is None or operation.name == "copy":
        return ["ordinary"]
    names = [name for name in asked if not (operation.name in _MESSAGES and name == "fresh")]
    if not operation.in_place or operation.name in _MESSAGES:
        names = ["ordinary" if name == "into" else name for name in names]
    return list(dict.fromkeys(names))


class Memory:
    """Torch's own memory for messages of one size: all peers use the same, one after the other."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], Tensor] = {}

    def empty(self, use: str, elements: int) -> Tensor:
        """As many float32 elements for this use ("source" or "out"), the same memory again."""
        key = (use, elements)
        if key not in self._held:
            self._held[key] = torch.zeros(elements)  # touched: no page is missing when it is timed
        return self._held[key]


# ------------------------------------------------------------------------------
# One operation of one peer on this rank's memory, ready to be repeated.


class Exchange:
    """What is timed: `call()` as often as wanted, then `finish()`.

    operation   what it does; says what is given and gotten
    source      what this rank gives; written before calls
    out         what it gets; looked at after calls. The same memory in place; None where it is
                not known before the first call
    call        does it once. Blocks as the library's own call does
    finish      waits until the last call has arrived, for calls that return before. Timed
    """

    def __init__(
        self,
        operation: Operation,
        source: Tensor | None,
        out: Tensor | None,
        call: Callable[[], object],
        finish: Callable[[], object] | None = None,
    ) -> None:
        self.operation = operation
        self.source = source
        self.out = out
        self.call = call
        self.finish = finish

    @property
    def in_place(self) -> bool:
        """Whether calls overwrite what they are given."""
        return self.source is self.out

    def load(self) -> None:
        """Take over `source`, where the library wants it in memory of its own. Not timed."""

    def store(self) -> None:
        """Bring the result to `out`. Not timed."""

    def count_wrong(self, calls: int) -> int:
        """How many elements are wrong after so many calls, besides those of `out`. Not timed."""
        return 0


class Fresh(Exchange):
    """A call that returns its result in new memory; it is kept until the next call has one."""

    def __init__(
        self, operation: Operation, source: Tensor, make: Callable[[], Tensor | None]
    ) -> None:
        super().__init__(operation, source, None, self._keep)
        self._make = make

    def _keep(self) -> None:
        self.out = self._make()
