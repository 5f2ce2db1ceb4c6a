"""`CompressedGradient`: a few values of a gradient, and their indices; and its bytes.

on the wire   [ values, k of them | indices, in the shortest code for (n, k) ]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.compression.quantized import bits_of, numbers_of, pack_bits, unpack_bits
from phalanx.errors import SizeMismatchError


@dataclass(frozen=True, eq=False)
class CompressedGradient:
    """Some values of a gradient; the others count as zeros.

    indices       [k], ascending, of the gradient read row by row; int32, or int64 from 2**31 on
    values        [k], in the gradient's dtype
    original_len  number of the gradient's values
    shape         of the gradient; by default `(original_len,)`
    """

    indices: Tensor
    values: Tensor
    original_len: int
    shape: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes on the wire: values, and indices in their shortest code."""
        k = len(self.values)
        return self.values.nbytes + encoded_size(self.original_len, k)

    def pack(self) -> Tensor:
        """Return the bytes on the wire, uint8; their number depends on k, `original_len` and dtype.

        Raises ValueError unless indices are ascending, and as `dense` does.
        """
        if not self.check():
            raise ValueError("indices go on the wire in ascending order: sort them, and the values")
        n, k = self.original_len, len(self.indices)
        code = pack_bits(code_for(n, k).encode(self.indices.long(), n))
        return torch.cat([self.values.contiguous().view(torch.uint8), code])

    @classmethod
    def unpack(cls, packed: Tensor, k: int, n: int, dtype: torch.dtype) -> CompressedGradient:
        """Return the gradient that `pack` packed. Raise `SizeMismatchError` for other bytes."""
        split = k * dtype.itemsize
        expected = split + encoded_size(n, k)
        if len(packed) != expected:
            raise SizeMismatchError(
                f"{k} of {n} values of {dtype} are {expected} bytes, not {len(packed)}"
            )
        code = code_for(n, k)  # bytes that are none give another number of indices, or n and more
        indices = code.decode(unpack_bits(packed[split:], code.bits(n, k)), n, k)
        if len(indices) != k or not _ascending(indices) or (k and int(indices[-1]) >= n):
            raise SizeMismatchError(f"these bytes do not say which {k} of {n} values they are")
        values = packed[:split].clone().view(dtype)  # at an address that the dtype can have
        return cls(indices.to(index_dtype(n)), values, n)

    def dense(self) -> Tensor:
        """Return the gradient with zeros for missing values: new, of its shape.

        Raises `IndexError` for an index out of range, ValueError if one comes twice,
        `SizeMismatchError` for another number of indices than values, or another size of shape.
        """
        dense = self.values.new_zeros(self.original_len)
        self.check()
        dense[self.indices.long()] = self.values
        return dense if self.shape is None else dense.view(self.shape)

    def check(self) -> bool:
        """Raise unless the indices are those of values here; return whether they ascend."""
        k, n = len(self.values), self.original_len
        if self.indices.shape != self.values.shape or self.values.dim() != 1:
            raise SizeMismatchError(
                f"a compressed gradient has an index for each value: {list(self.indices.shape)} "
                f"indices and {list(self.values.shape)} values"
            )
        if self.shape is not None and torch.Size(self.shape).numel() != n:
            raise SizeMismatchError(f"{n} values are no gradient of shape {list(self.shape)}")
        outside = (self.indices < 0) | (self.indices >= n)
        if k and outside.any():
            raise IndexError(
                f"index {int(self.indices[outside][0])} of a compressed gradient is out of range: "
                f"it has {n} values, 0 to {n - 1}"
            )
        if _ascending(self.indices):
            return True
        ordered = self.indices.sort().values
        twice = ordered[1:][ordered.diff() == 0]
        if len(twice) > 0:
            raise ValueError(
                f"index {int(twice[0])} of a compressed gradient comes twice: each stands for one "
                "value"
            )
        return False


def _ascending(indices: Tensor) -> bool:
    return not bool((indices.diff() <= 0).any())


def index_dtype(n: int) -> torch.dtype:
    """Return the smallest dtype with which torch can index n values."""
    return torch.int32 if n <= 1 << 31 else torch.int64


# ------------------------------------------------------------------------------
# Codes for k different indices below n, ascending: the one of fewest bytes.
#
#     code          bits                       smallest when
#     plain         k * ceil(log2 n)           few indices: one of 256 is one byte
#     two_parts     k * (2 + log2(n / k))      in between: at 1 % 8.6 bits an index, and no code of
#                                              fixed length needs fewer than 8.1
#     bitmap        n                          nearly all
#
# `two_parts` (Elias 1974, Fano 1971): the low l bits of each index as they are; the high parts,
# which never fall, as a row of bits in which the i-th one stands at place high_i + i. Code and
# lengths follow from n and k alone, so messages of all ranks are of one length.


class Code(NamedTuple):
    """A code: its bits for (n, k); an encoder of k indices below n; a decoder."""

    bits: Callable[[int, int], int]
    encode: Callable[[Tensor, int], Tensor]
    decode: Callable[[Tensor, int, int], Tensor]


def _width(n: int) -> int:
    """Return the number of bits of a number below n."""
    return max(n - 1, 0).bit_length()


def _low(n: int, k: int) -> int:
    """Return the number of low bits of an index."""
    return max(n // max(k, 1), 1).bit_length() - 1


def _row(n: int, k: int) -> int:
    """Return the number of bits of the high parts."""
    return k + (max(n - 1, 0) >> _low(n, k))


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
    """Return a row of bits that are 1 at `places`."""
    bits = torch.zeros(count, dtype=torch.uint8, device=places.device)
    bits[places] = 1
    return bits


CODES: Mapping[str, Code] = MappingProxyType(
    {
        "plain": Code(
            bits=lambda n, k: k * _width(n),
            encode=lambda indices, n: bits_of(indices, _width(n)),
            decode=lambda bits, n, k: numbers_of(bits, _width(n), k),
        ),
        "two_parts": Code(
            bits=lambda n, k: k * _low(n, k) + _row(n, k),
            encode=_two_parts_encode,
            decode=_two_parts_decode,
        ),
        "bitmap": Code(
            bits=lambda n, k: n,
            encode=_ones_at,
            decode=lambda bits, n, k: bits.nonzero().flatten(),
        ),
    }
)


def code_for(n: int, k: int) -> Code:
    """Return the shortest code; of equal ones the first in the table."""
    return min(CODES.values(), key=lambda code: code.bits(n, k))


def encoded_size(n: int, k: int) -> int:
    """Return the number of bytes of k indices below n."""
    return -(-code_for(n, k).bits(n, k) // 8)
