"""Codes for k different indices below n, ascending: whichever takes the fewest bytes.

    code          bits                       smallest when
    plain         k * ceil(log2 n)           few indices: one of 256 is one byte
    two_parts     k * (2 + log2(n / k))      in between: at 1 % 8.6 bits an index, and no code of
                                             fixed length needs fewer than 8.1
    bitmap        n                          nearly all

`two_parts` (Elias 1974, Fano 1971): the low l bits of each index as they are; the high parts, which
never fall, as a row of bits in which the i-th one stands at place high_i + i. All lengths follow
from n and k alone, so messages of all ranks are of one length, and nothing says which code it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.compression.bits import (
    bytes_for,
    pack_bits,
    pack_numbers,
    unpack_bits,
    unpack_numbers,
)


class Code(NamedTuple):
    """A code: how many bytes it takes for (n, k), and both ways."""

    size: Callable[[int, int], int]
    encode: Callable[[Tensor, int], Tensor]
    decode: Callable[[Tensor, int, int], Tensor]


def code_for(n: int, k: int) -> Code:
    """The smallest one; the first of those in the table."""
    return min(CODES.values(), key=lambda code: code.size(n, k))


def _width(n: int) -> int:
    return max(n - 1, 0).bit_length()


def _plain_size(n: int, k: int) -> int:
    return bytes_for(k * _width(n))


def _plain_encode(indices: Tensor, n: int) -> Tensor:
    return pack_numbers(indices, _width(n))


def _plain_decode(packed: Tensor, n: int, k: int) -> Tensor:
    return unpack_numbers(packed, _width(n), k)


def _bitmap_size(n: int, k: int) -> int:
    return bytes_for(n)


def _bitmap_encode(indices: Tensor, n: int) -> Tensor:
    return pack_bits(_ones_at(indices.long(), n))


def _bitmap_decode(packed: Tensor, n: int, k: int) -> Tensor:
    return _ones_of(packed, n)


def _low_bits(n: int, k: int) -> int:
    return max(n // max(k, 1), 1).bit_length() - 1


def _row(n: int, k: int) -> int:
    """Bits of the high parts."""
    return k + (max(n - 1, 0) >> _low_bits(n, k))


def _two_parts_size(n: int, k: int) -> int:
    return bytes_for(k * _low_bits(n, k)) + bytes_for(_row(n, k))


def _two_parts_encode(indices: Tensor, n: int) -> Tensor:
    k, indices = len(indices), indices.long()
    low = _low_bits(n, k)
    places = (indices >> low) + torch.arange(k, device=indices.device)
    lows = pack_numbers(indices & ((1 << low) - 1), low)
    return torch.cat([lows, pack_bits(_ones_at(places, _row(n, k)))])


def _two_parts_decode(packed: Tensor, n: int, k: int) -> Tensor:
    low = _low_bits(n, k)
    lows, row = packed.tensor_split([bytes_for(k * low)])
    places = _ones_of(row, _row(n, k))
    if len(places) != k:
        return places  # too many or too few: the caller refuses them
    highs = places - torch.arange(k, device=packed.device)
    return highs << low | unpack_numbers(lows, low, k)


def _ones_at(places: Tensor, count: int) -> Tensor:
    bits = torch.zeros(count, dtype=torch.uint8, device=places.device)
    bits[places] = 1
    return bits


def _ones_of(packed: Tensor, count: int) -> Tensor:
    return unpack_bits(packed, count).nonzero().flatten()


CODES: Mapping[str, Code] = MappingProxyType(
    {
        "plain": Code(_plain_size, _plain_encode, _plain_decode),
        "two_parts": Code(_two_parts_size, _two_parts_encode, _two_parts_decode),
        "bitmap": Code(_bitmap_size, _bitmap_encode, _bitmap_decode),
    }
)
