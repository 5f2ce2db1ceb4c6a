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

from phalanx.compression.bits import bits_of, bytes_for, numbers_of, pack_bits, unpack_bits


class Code(NamedTuple):
    """A code: how many bits it takes for (n, k); bits of k indices below n; and back."""

    bits: Callable[[int, int], int]
    encode: Callable[[Tensor, int], Tensor]
    decode: Callable[[Tensor, int, int], Tensor]


def code_for(n: int, k: int) -> Code:
    """The shortest one; the first of those in the table."""
    return min(CODES.values(), key=lambda code: code.bits(n, k))


def encoded_size(n: int, k: int) -> int:
    """Bytes of k indices below n."""
    return bytes_for(code_for(n, k).bits(n, k))


def encode(indices: Tensor, n: int) -> Tensor:
    """`[k]` different indices below n, ascending, as uint8."""
    return pack_bits(code_for(n, len(indices)).encode(indices.long(), n))


def decode(packed: Tensor, n: int, k: int) -> Tensor:
    """The indices, int64. Bytes that are no code give another number of them, or n and more."""
    code = code_for(n, k)
    return code.decode(unpack_bits(packed, code.bits(n, k)), n, k)


def _width(n: int) -> int:
    return max(n - 1, 0).bit_length()


def _plain_bits(n: int, k: int) -> int:
    return k * _width(n)


def _plain_encode(indices: Tensor, n: int) -> Tensor:
    return bits_of(indices, _width(n))


def _plain_decode(bits: Tensor, n: int, k: int) -> Tensor:
    return numbers_of(bits, _width(n), k)


def _bitmap_bits(n: int, k: int) -> int:
    return n


def _bitmap_encode(indices: Tensor, n: int) -> Tensor:
    return _ones_at(indices, n)


def _bitmap_decode(bits: Tensor, n: int, k: int) -> Tensor:
    return bits.nonzero().flatten()


def _low(n: int, k: int) -> int:
    """How many bits of an index are low ones."""
    return max(n // max(k, 1), 1).bit_length() - 1


def _row(n: int, k: int) -> int:
    """Bits of the high parts."""
    return k + (max(n - 1, 0) >> _low(n, k))


def _two_parts_bits(n: int, k: int) -> int:
    return k * _low(n, k) + _row(n, k)


def _two_parts_encode(indices: Tensor, n: int) -> Tensor:
    k = len(indices)
    low = _low(n, k)
    places = (indices >> low) + torch.arange(k, device=indices.device)
    lows = bits_of(indices & ((1 << low) - 1), low)
    return torch.cat([lows, _ones_at(places, _row(n, k))])


def _two_parts_decode(bits: Tensor, n: int, k: int) -> Tensor:
    low = _low(n, k)
    places = bits[k * low :].nonzero().flatten()
    if len(places) != k:
        return places
    highs = places - torch.arange(k, device=bits.device)
    return highs << low | numbers_of(bits[: k * low], low, k)


def _ones_at(places: Tensor, count: int) -> Tensor:
    bits = torch.zeros(count, dtype=torch.uint8, device=places.device)
    bits[places] = 1
    return bits


CODES: Mapping[str, Code] = MappingProxyType(
    {
        "plain": Code(_plain_bits, _plain_encode, _plain_decode),
        "two_parts": Code(_two_parts_bits, _two_parts_encode, _two_parts_decode),
        "bitmap": Code(_bitmap_bits, _bitmap_encode, _bitmap_decode),
    }
)
