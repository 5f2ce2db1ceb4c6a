"""What a compressor remembers: tensors by name, and how often it was called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Remembers(Protocol):
    """What has a state, which changes for good with `commit`, after a pass."""

    def commit(self) -> None:
        """The pass counts."""

    def rollback(self) -> None:
        """The pass does not count: be as after the last commit."""

    def state_dict(self) -> dict[str, Tensor]:
        """The state after the last commit; copies."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Be in that state."""


class Memory:
    """Tensors by name. Those that a pass puts in are seen once it is committed."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._new: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        """The tensor of that name, as of the last commit."""
        return self._kept.get(name)

    def new(self, name: str) -> Tensor | None:
        """What this pass has put in under that name."""
        return self._new.get(name)

    def latest(self, name: str) -> Tensor | None:
        """What this pass has put in under that name; else what is kept."""
        return self._new.get(name, self._kept.get(name))

    def put(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor, which nobody else writes, when this pass is committed."""
        self._new[name] = tensor

    def drop(self, name: str) -> None:
        """Forget a tensor now."""
        self._kept.pop(name, None)

    def commit(self) -> None:
        """The pass counts."""
        self._kept.update(self._new)
        self._new.clear()

    def rollback(self) -> None:
        """The pass does not count."""
        self._new.clear()

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, as of the last commit."""
        yield from list(self._kept.items())

    def state_dict(self) -> dict[str, Tensor]:
        """Names and tensors, as of the last commit; copies."""
        return {name: kept.clone() for name, kept in self._kept.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Forget all and know these, of which copies are made."""
        self._kept = {name: kept.detach().clone() for name, kept in state.items()}
        self._new.clear()


class Turns:
    """Counts calls, so that each has random numbers of its own, and alike on every part.

    A pass that is rolled back is counted again: parts that were cut short at different calls go on
    alike.
    """

    def __init__(self) -> None:
        self._before = 0
        self._in_this_pass = 0

    def next(self) -> int:
        """The number of this call."""
        number = self._before + self._in_this_pass
        self._in_this_pass += 1
        return number

    def commit(self) -> None:
        """The pass counts."""
        self._before += self._in_this_pass
        self._in_this_pass = 0

    def rollback(self) -> None:
        """The pass does not count."""
        self._in_this_pass = 0

    def state_dict(self) -> dict[str, Tensor]:
        """How many calls counted; its name is empty."""
        return {"": torch.tensor(self._before, dtype=torch.int64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there."""
        self._before, self._in_this_pass = int(state.get("", 0)), 0


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of a state has keys of that prefix, without it."""
    return {k[len(prefix) :]: value for k, value in state.items() if k.startswith(prefix)}


# ------------------------------------------------------------------------------
# What is left over, as a state: its keys, and what becomes of it with another number of parts.
#
#   residual.<name>              what a part has left out of its gradient
#   owned.<start>-<stop>.<name>  what it has left out of the mean of these elements of the gradient
#   inner.<key>                  the compressor's own
#
# An average is short of  sum over p parts of residual / p  +  sum of owned.  Of q parts each gets
# an equal share, so that it is short of as much afterwards.
#
# Where gradients are cut into shards before they are averaged, a part knows pieces of them only:
# then <name> is <start>-<stop>.<name>, elements start:stop of that gradient.

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


# ------------------------------------------------------------------------------
# Bundles: gradients that are compressed and averaged together, one after the other in memory.
#
# names   weight                  bias
# flat    [ . . . . . . . . . . | . . ]     one dtype
# shapes  (2, 5)                  (2,)
#
# Where each part is to have a shard of the mean, the flat memory is cut into as many of one length;
# what lies behind the last gradient is zeros.


class Piece(NamedTuple):
    """One gradient's place: elements start:stop."""

    name: str
    shape: torch.Size
    start: int
    stop: int


class Bundle:
    """Flat memory, and whose gradients lie in it.

    flat    1-D, contiguous; as long as the gradients, or longer, padded with zeros
    names   of the gradients; the same on every part, so that what is kept of each finds its place
    shapes  of the gradients
    """

    def __init__(self, flat: Tensor, names: Sequence[str], shapes: Sequence[torch.Size]) -> None:
        self.flat = flat
        stops = list(accumulate(shape.numel() for shape in shapes))
        self.pieces = tuple(
            Piece(name, shape, stop - shape.numel(), stop)
            for name, shape, stop in zip(names, shapes, stops, strict=True)
        )

    @property
    def size(self) -> int:
        """How many values the gradients have."""
        return self.pieces[-1].stop if self.pieces else 0

    def unpadded(self) -> Bundle:
        """The gradients alone, in the same memory."""
        names, shapes = [p.name for p in self.pieces], [p.shape for p in self.pieces]
        return Bundle(self.flat[: self.size], names, shapes)

    def shards(self, parts: int) -> Tensor:
        """The flat memory as `[parts, ...]`: row i is part i's shard."""
        return self.flat.view(parts, len(self.flat) // parts)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], names: Sequence[str]) -> Bundle:
        """A bundle of copies of tensors of one dtype."""
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        return cls(flat, names, [tensor.shape for tensor in tensors])

    def cut(self, flat: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Each gradient's place, and its view, in its shape, of a tensor like `flat`."""
        for piece in self.pieces:
            yield piece, flat[piece.start : piece.stop].view(piece.shape)
