"""What is left over, as a state: its keys, and what becomes of it with another number of parts.

    residual.<name>              what a part has left out of its gradient
    owned.<start>-<stop>.<name>  what it has left out of the mean of these elements of the gradient
    inner.<key>                  the compressor's own

An average is short of  sum over p parts of residual / p  +  sum of owned.  Of q parts each gets an
equal share, so that it is short of as much afterwards.

Where gradients are cut into shards before they are averaged, a part knows pieces of them only:
then <name> is <start>-<stop>.<name>, elements start:stop of that gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from phalanx.compression.bundle import Bundle
from phalanx.compression.memory import under

RESIDUAL, OWNED, INNER = "residual.", "owned.", "inner."


def owned_key(name: str, start: int, stop: int) -> str:
    """The key of elements start:stop of a gradient, without its prefix."""
    return f"{start}-{stop}.{name}"


def read_owned_key(key: str) -> tuple[str, int, int]:
    """The name, start and stop of such a key."""
    span, name = key.split(".", 1)
    start, stop = span.split("-")
    return name, int(start), int(stop)


def owned_places(bundle: Bundle, start: int, size: int) -> Iterator[tuple[str, int, int]]:
    """Which elements of which gradients `size` elements of a bundle, from `start` on, are.

    Their key, and where they lie among the `size` elements.
    """
    for piece in bundle.pieces:
        low, high = max(piece.start, start), min(piece.stop, start + size)
        if low < high:
            key = owned_key(piece.name, low - piece.start, high - piece.start)
            yield key, low - start, high - start


def short_of(states: Sequence[Mapping[str, Tensor]], parts: int) -> dict[str, Tensor]:
    """By how much averages of that many parts are short, by name; float64.

    states   of those parts that are known
    """
    total: dict[str, Tensor] = {}
    for state in states:
        for name, left in under(RESIDUAL, state).items():
            mine = left.double() / parts
            total[name] = total[name] + mine if name in total else mine
    for state in states:
        for key, left in under(OWNED, state).items():
            name, start, stop = read_owned_key(key)
            total[name][start:stop] += left.double()
    return total


def joined(pieces: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Whole gradients out of pieces of them, by name; zeros for what is not there.

    sizes   of the gradients, by name, as far as they are known
    """
    whole: dict[str, Tensor] = {}
    for key, values in pieces.items():
        name, start, stop = read_owned_key(key)
        known = whole.setdefault(name, values.new_zeros(sizes.get(name, stop)))
        if len(known) < stop:
            known = whole[name] = torch.cat([known, known.new_zeros(stop - len(known))])
        known[start:stop] += values
    return whole


def shares(missing: Tensor, parts: int, dtype: torch.dtype) -> list[Tensor]:
    """Residuals of that many parts by whose mean an average is short of `missing` (float64).

    Rounded to `dtype`, so that together they are off by half a unit in the last place of one.
    """
    rest, given = missing * parts, []
    for still in range(parts, 0, -1):
        given.append((rest / still).to(dtype))
        rest = rest - given[-1].double()
    return given
