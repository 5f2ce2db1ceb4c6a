"""Where parameters lie in the flat memory of a unit, and which shard has what of them.

    w: 5 elements, b: 2, over 3 ranks

    | w w w | w w b | b . . |       . is padding
      rank 0  rank 1  rank 2

Parameters follow each other without gaps; the whole is padded to a multiple of the number of ranks.
So a shard has a contiguous part of each parameter, or nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod


class Layout:
    """The places of parameters of these shapes, cut into `parts` shards.

    starts   where each begins; and where the last one ends
    shard    elements of a shard
    padded   elements of all shards
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], parts: int) -> None:
        self.shapes = tuple(shapes)
        self.starts = [0, *accumulate(prod(shape) for shape in shapes)]
        self.shard = -(-self.starts[-1] // parts)
        self.padded = self.shard * parts

    @property
    def total(self) -> int:
        """Elements of all parameters."""
        return self.starts[-1]

    def part(self, index: int, place: int) -> tuple[int, int]:
        """The elements start:stop of a parameter that lie in shard `place`."""
        begin, end = self.starts[index], self.starts[index + 1]
        first, last = place * self.shard, (place + 1) * self.shard
        start = min(max(begin, first), end) - begin
        return start, max(start, min(end, last) - begin)

    def inside(self, index: int, place: int) -> tuple[int, int]:
        """Where these lie in that shard."""
        start, stop = self.part(index, place)
        if start == stop:
            return 0, 0
        offset = self.starts[index] - place * self.shard
        return offset + start, offset + stop

    def picture(self, letters: Sequence[str]) -> str:
        """As above, with a letter for each parameter."""
        counts = [prod(shape) for shape in self.shapes]
        cells = [letter for letter, n in zip(letters, counts, strict=True) for _ in range(n)]
        cells += ["."] * (self.padded - self.total)
        shards = range(0, self.padded, self.shard or 1)
        return "".join(f"| {' '.join(cells[i : i + self.shard])} " for i in shards) + "|"
