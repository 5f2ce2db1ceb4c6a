"""`Slice`: which part of a tensor a rank holds.

    tensor of shape (3, 4)      read row by row: 0 1 2 3 | 4 5 6 7 | 8 9 10 11
    Slice((3, 4), 3, 6)                                3 | 4 5

The only thing that a checkpoint has to know of how a model is split over ranks.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple


class Slice(NamedTuple):
    """The part of a tensor that this rank holds: elements start:stop of it, read row by row.

    shape   of the whole tensor
    """

    shape: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Slice:
        """All of a tensor of this shape."""
        return cls(tuple(shape), 0, prod(shape))

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the tensor is elsewhere."""
        return self.start == 0 and self.stop == prod(self.shape)

    @property
    def numel(self) -> int:
        """How many elements this rank holds."""
        return self.stop - self.start
