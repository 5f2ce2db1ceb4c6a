"""Writing what ranks give into memory, and comparing what came with what had to come."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.bench.operations import PERIOD, Segment, Segments

__all__ = ["POISON", "count_wrong", "fill", "poison"]

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
