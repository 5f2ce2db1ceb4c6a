"""`CompressedGradient`: a few values of a gradient, and where they stand; and its bytes.

on the wire   [ values, k of them | indices, in the shortest code for (n, k) ]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.compression.index_codes import decode, encode, encoded_size
from phalanx.errors import SizeMismatchError


@dataclass(frozen=True, eq=False)
class CompressedGradient:
    """Some values of a gradient; the others count as zeros.

    indices       [k], ascending, of the gradient read row by row; int32, or int64 from 2**31 on
    values        [k], in the gradient's dtype
    original_len  how many values the gradient has
    shape         of the gradient; by default `(original_len,)`
    """

    indices: Tensor
    values: Tensor
    original_len: int
    shape: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the wire: of the values, and of the indices in their shortest code."""
        k = len(self.values)
        return self.values.nbytes + encoded_size(self.original_len, k)

    def pack(self) -> Tensor:
        """The bytes on the wire, uint8. Their number follows from k, `original_len` and dtype.

        Raises ValueError unless indices are ascending, and as `dense` does.
        """
        self.check()
        if not _ascending(self.indices):
            raise ValueError("indices go on the wire in ascending order: sort them, and the values")
        code = encode(self.indices, self.original_len)
        return torch.cat([self.values.contiguous().view(torch.uint8), code])

    @classmethod
    def unpack(cls, packed: Tensor, k: int, n: int, dtype: torch.dtype) -> CompressedGradient:
        """What `pack` was given. Raises `SizeMismatchError` for bytes that are no such message."""
        split = k * dtype.itemsize
        expected = split + encoded_size(n, k)
        if len(packed) != expected:
            raise SizeMismatchError(
                f"{k} of {n} values of {dtype} are {expected} bytes, not {len(packed)}"
            )
        indices = decode(packed[split:], n, k)
        if len(indices) != k or not _ascending(indices) or (k and int(indices[-1]) >= n):
            raise SizeMismatchError(f"these bytes do not say which {k} of {n} values they are")
        values = packed[:split].clone().view(dtype)  # at an address that the dtype can have
        return cls(indices.to(index_dtype(n)), values, n)

    def dense(self) -> Tensor:
        """The gradient with zeros for what is not there: new, of its shape.

        Raises `IndexError` if an index is not one of its, ValueError if one comes twice,
        `SizeMismatchError` if there are not as many indices as values, or the shape is another
        size.
        """
        dense = self.values.new_zeros(self.original_len)
        self.check()
        dense[self.indices.long()] = self.values
        return dense if self.shape is None else dense.view(self.shape)

    def check(self) -> None:
        """Raise unless the indices are those of values of a gradient of this length."""
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
        if not _ascending(self.indices):
            ordered = self.indices.sort().values
            twice = ordered[1:][ordered.diff() == 0]
            if len(twice) > 0:
                raise ValueError(
                    f"index {int(twice[0])} of a compressed gradient comes twice: each "
                    "stands for one value"
                )


def _ascending(indices: Tensor) -> bool:
    return not bool((indices.diff() <= 0).any())


def index_dtype(n: int) -> torch.dtype:
    """The smallest dtype with which torch can index n values."""
    return torch.int32 if n <= 1 << 31 else torch.int64
