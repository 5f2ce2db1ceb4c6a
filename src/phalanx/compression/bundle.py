"""Bundles: gradients that are compressed and averaged together, one after the other in memory.

names   weight                  bias
flat    [ . . . . . . . . . . | . . ]     one dtype
shapes  (2, 5)                  (2,)

Where each part is to have a shard of the mean, the flat memory is cut into as many of one length;
what lies behind the last gradient is zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


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
