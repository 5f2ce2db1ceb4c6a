"""What is measured: the memory that each operation takes, and the values that have to be in it.

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


class ValueRange(NamedTuple):
    """`length` elements; the k-th is `scale * ((first + k) % 13) + shift`."""

    first: int
    length: int
    scale: float
    shift: float


Values = tuple[ValueRange, ...]
"""What memory holds: ranges, one after the other. Nothing: the values do not matter."""


def _whole(q: int, n: int) -> ValueRange:
    """All n elements of what rank q gives."""
    return ValueRange(0, n, 1, q + 1)


def _part(k: int, q: int, p: int, n: int) -> ValueRange:
    """The k-th of p parts of it."""
    return ValueRange(k * (n // p), n // p, 1, q + 1)


def _sum(p: int, first: int, length: int) -> ValueRange:
    """Elements of the sum over p ranks."""
    return ValueRange(first, length, p, p * (p + 1) / 2)


VALUES: Mapping[str, Callable[[int, int, int], Values]] = MappingProxyType(
    {
        "nothing": lambda r, p, n: (),
        "own": lambda r, p, n: (_whole(r, n),),
        "own/root": lambda r, p, n: (_whole(r, n),) if r == 0 else (),
        "own/even": lambda r, p, n: (_whole(r, n),) if r % 2 == 0 else (),
        "own part": lambda r, p, n: (_part(r, r, p, n),),
        "root's": lambda r, p, n: (_whole(0, n),),
        "root's part": lambda r, p, n: (_part(r, 0, p, n),),
        "even's": lambda r, p, n: (_whole(r - r % 2, n),),
        "all parts": lambda r, p, n: tuple(_part(q, q, p, n) for q in range(p)),
        "all parts/root": lambda r, p, n: VALUES["all parts"](r, p, n) if r == 0 else (),
        "my parts": lambda r, p, n: tuple(_part(r, q, p, n) for q in range(p)),
        "sum": lambda r, p, n: (_sum(p, 0, n),),
        "sum/root": lambda r, p, n: (_sum(p, 0, n),) if r == 0 else (),
        "sum part": lambda r, p, n: (_sum(p, r * (n // p), n // p),),
    }
)
"""What rank r of p ranks gives or gets, of messages of n elements.

`.../root` is nothing but on rank 0, `.../even` nothing but on even ranks."""


def _once(p: int) -> float:
    return 1.0


def _twice(p: int) -> float:
    return 2 * (p - 1) / p


def _others(p: int) -> float:
    return (p - 1) / p


@dataclass(frozen=True)
class BenchOperation:
    """One row: an operation, for p ranks and messages of n elements.

    source, out   how many elements a rank gives and gets: "n", "n/p", or "" for none
    in_place      a call overwrites what it is given, unless other memory is requested
    given         what a rank gives, a name of `VALUES`
    expected      what it must have afterwards, a name of `VALUES`
    bus           the factor of the bus bandwidth
    trips         messages that one call takes one after the other, of which one is shown
    least         calls that make a round at least
    training      a training step (`training.py`), to be compared with the same step alone
    peak          its peak of memory is of interest, too
    """

    name: str
    source: str
    out: str
    in_place: bool
    given: str
    expected: str
    bus: Callable[[int], float]
    trips: int = 1
    least: int = 1
    training: bool = False
    peak: bool = False

    def elements(self, part: str, size: int, n: int) -> int:
        """How many elements `source` or `out` has."""
        return {"": 0, "n": n, "n/p": n // size}[part]

    def fitting(self, size: int, count: int) -> int:
        """The number of float32 elements, for `count` bytes: at least, and to be cut into p."""
        if not self.source:
            return 0
        unit = size if self.sliced else 1
        return -(-count // (4 * unit)) * unit

    @property
    def sliced(self) -> bool:
        """Whether messages are cut into one part for each rank."""
        return not self.in_place and self.name not in ("copy", "reduce")


# fmt: off
_ROWS = (
    #              name              gives  gets   in place given      gets              bus
    BenchOperation("all_reduce",     "n",   "n",   True,  "own",      "sum",            _twice),
    BenchOperation("all_gather",     "n/p", "n",   False, "own part", "all parts",      _others),
    BenchOperation("reduce_scatter", "n",   "n/p", False, "own",      "sum part",       _others),
    BenchOperation("broadcast",      "n",   "n",   True,  "own/root", "root's",         _once),
    BenchOperation("all_to_all",     "n",   "n",   False, "own",      "my parts",       _others),
    BenchOperation("reduce",         "n",   "n",   False, "own",      "sum/root",       _once),
    BenchOperation("gather",         "n/p", "n",   False, "own part", "all parts/root", _others),
    BenchOperation("scatter",        "n",   "n/p", False, "own",      "root's part",    _others),
    BenchOperation("ping_pong",      "n",   "n",   True,  "own/even", "even's",         _once,
                   trips=2),
    BenchOperation("stream",         "n",   "n",   True,  "own/even", "even's",         _once),
    BenchOperation("barrier",        "",    "",    True,  "nothing",  "nothing",        _once),
    BenchOperation("ddp",            "",    "",    True,  "nothing",  "nothing",        _once,
                   least=5, training=True),
    BenchOperation("fsdp",           "",    "",    True,  "nothing",  "nothing",        _once,
                   least=5, training=True, peak=True),
    BenchOperation("copy",           "n",   "n",   False, "own",      "own",            _once),
)
# fmt: on
OPERATIONS: Mapping[str, BenchOperation] = MappingProxyType({row.name: row for row in _ROWS})
"""Name -> row. `ping_pong` and `stream` are between each even rank and the next one, `ddp` and
`fsdp` training steps, and `copy` what the machine can do."""

EXPANDED: Mapping[str, tuple[str, ...]] = MappingProxyType({"p2p": ("ping_pong", "stream")})
"""What is requested under one name and measured as several."""


def longest_stretch(operation: BenchOperation, size: int, *, in_place: bool) -> int:
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
# Filling memory with what ranks give, and comparing results with what is expected.

POISON = -1.0
"""What memory holds before a call has to overwrite it: no result is negative."""

_BLOCK = PERIOD << 13  # elements: they stay in a core's cache


def fill(tensor: Tensor, values: Values) -> None:
    """Write them one after the other; nothing given is POISON everywhere."""
    if not values:
        tensor.fill_(POISON)
    for part, block in _blocks(tensor, values, 1.0):
        part.copy_(block)


def count_wrong(tensor: Tensor, values: Values, factor: float = 1.0) -> int:
    """How many elements are not `factor` times these values, bit for bit."""
    wrong = 0
    for part, block in _blocks(tensor, values, factor):
        if not torch.equal(part, block):
            wrong += int((part != block).sum())
    return wrong


def _blocks(tensor: Tensor, values: Values, factor: float) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of the tensor, and what belongs there."""
    begin = 0
    for first, length, scale, shift in values:
        numbers = torch.arange(min(length, _BLOCK), device=tensor.device)
        block = numbers.add_(first % PERIOD).remainder_(PERIOD).to(tensor.dtype)
        block.mul_(scale * factor).add_(shift * factor)
        for start in range(begin, begin + length, _BLOCK):
            part = tensor[start : min(start + _BLOCK, begin + length)]
            yield part, block[: part.numel()]
        begin += length


# ------------------------------------------------------------------------------
# Where the tensors of a message lie, and a call on them.


class MemoryKind(NamedTuple):
    """One way to give memory to a call.

    registered  what the backend's `empty` gives, instead of torch's
    fresh       the result comes in new memory, each time
    apart       the result goes into memory of its own, given with `into=`
    """

    registered: bool = False
    fresh: bool = False
    apart: bool = False


MEMORY_KINDS: Mapping[str, MemoryKind] = MappingProxyType(
    {
        "ordinary": MemoryKind(),
        "registered": MemoryKind(registered=True),
        "fresh": MemoryKind(fresh=True),
        "into": MemoryKind(apart=True),
    }
)
"""`ordinary` and `registered` are in place, where an operation can be; else into given memory."""


def kinds_for(operation: BenchOperation, requested: Sequence[str]) -> list[str]:
    """Which of the requested kinds of memory are different things for this operation."""
    if not operation.source or operation.name == "copy":
        return ["ordinary"]
    is_message = operation.name in ("ping_pong", "stream")
    names = [name for name in requested if not (is_message and name == "fresh")]
    if not operation.in_place or is_message:
        names = ["ordinary" if name == "into" else name for name in names]
    return list(dict.fromkeys(names))


class MessageBuffers:
    """Torch's own memory for messages of one size: all peers use the same, one after the other."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int, str], Tensor] = {}

    def empty(self, use: str, elements: int, device: str = "cpu") -> Tensor:
        """As many float32 elements for this use ("source" or "out"), the same memory again."""
        key = (use, elements, device)
        if key not in self._buffers:  # touched: no page is missing when it is timed
            self._buffers[key] = torch.zeros(elements, device=device)
        return self._buffers[key]


class PreparedCall:
    """One operation of one peer on this rank's memory: `call()`, repeated, and then `finish()`.

    operation   its row, with what is given and expected
    source      what this rank gives; written before calls
    out         what it gets; looked at after calls. The same memory in place; None where it is
                not known before the first call
    call        does it once. Blocks as the library's own call does
    finish      waits until the last call has arrived, for calls that return before. Timed
    """

    def __init__(
        self,
        operation: BenchOperation,
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


class FreshCall(PreparedCall):
    """A call that returns its result in new memory; it is kept until the next call has one."""

    def __init__(
        self,
        operation: BenchOperation,
        source: Tensor,
        make: Callable[[], Tensor | None],
        finish: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(operation, source, None, self._make_and_keep, finish)
        self._make = make

    def _make_and_keep(self) -> None:
        self.out = self._make()
