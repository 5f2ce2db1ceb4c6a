"""A tensor whose own slice lies in pieces, which need not be copied: no other rank reads it.

    rank 0's tensor   [ own slice: a place for the result | copied, for rank 1             ]
    elsewhere         [ gradient 0 ][ gradient 1 ]

If ranks share memory, each reduces its own slice of all contributions. It reads its own one from
the pieces, and so saves a copy. Everywhere else the pieces are first copied to their places.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from torch import Tensor

from phalanx.wire.memory import copy_bits

Elsewhere: TypeAlias = "tuple[tuple[int, Tensor], ...]"
"""Pieces in order: the element of the flat tensor where each belongs, and its contiguous values."""


class Pieces(NamedTuple):
    """A contiguous tensor, with room for all, and the pieces of this rank's slice of it.

    The slice of rank r, of n elements over p ranks, is [r n // p, (r + 1) n // p).
    """

    tensor: Tensor
    elsewhere: Elsewhere = ()


def join(tensor: Tensor, elsewhere: Elsewhere) -> None:
    """Copy the pieces to their places in the tensor."""
    flat = tensor.view(-1)
    for first, values in elsewhere:
        copy_bits(flat[first : first + values.numel()], values.view(-1))
