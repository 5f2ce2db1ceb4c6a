"""How a length is cut into chunks: as evenly as it goes, in order, nothing left over."""

from __future__ import annotations

from phalanx.errors import InvalidWorldSizeError

__all__ = ["chunk_ranges"]


def chunk_ranges(total: int, parts: int) -> list[tuple[int, int]]:
    """Cut [0, total) into `parts` runs (start, end), whose lengths differ by one at most.

    Part i is [i * total // parts, (i + 1) * total // parts). With fewer elements than parts, some
    are empty:

        total 10, parts 4    [0, 2) [2, 5) [5, 7) [7, 10)
        total 2, parts 4     [0, 0) [0, 1) [1, 1) [1, 2)

    Raises InvalidWorldSizeError if there are no parts to cut into, ValueError if `total` is
    negative.
    """
    if parts < 1:
        raise InvalidWorldSizeError(f"cannot cut into {parts} parts: 1 or more are needed")
    if total < 0:
        raise ValueError(f"cannot cut {total} elements: a length is 0 or more")
    return [(i * total // parts, (i + 1) * total // parts) for i in range(parts)]
