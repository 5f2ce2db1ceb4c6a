"""Blocks of values that share a scale, and their bytes.

a row on the wire   [ scales, float32 | codes of `bits` each, the first in the lowest bits ]

bits   codes        a code c of scale s stands for   s, rounding at random   s, to nearest
8      -127..127    c * s                            largest / 127           largest / 127
4      -7..7        c * s                            largest / 7             largest / 7
1      0, 1         -s, s                            largest                 mean magnitude
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.compression.bits import bytes_for, pack_bits, unpack_bits


class Blocks(NamedTuple):
    """How rows of `length` values are cut into blocks of `block` (the last one may be shorter)."""

    bits: int
    block: int
    length: int

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.length // self.block)

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return 4 * self.blocks + bytes_for(self.bits * self.length)

    def pack(self, rows: Tensor, noise: Tensor | None) -> Tensor:
        """`[n, length]` values as `[n, nbytes]` uint8.

        noise   uniform in [0, 1), like `rows`: what is added before rounding down; None: to nearest
        """
        cut = self._cut(rows)
        magnitudes = cut.abs()
        if self.bits == 1 and noise is None:
            padded = self.blocks * self.block - self.length
            sizes = torch.full((self.blocks,), float(self.block), device=rows.device)
            if self.blocks:
                sizes[-1] -= padded
            scales = magnitudes.sum(-1) / sizes
        else:
            scales = magnitudes.amax(-1) / _MOST[self.bits]
        scales = scales.float()
        scales = torch.where(scales.isfinite(), scales, torch.nan)
        units = cut / torch.where(scales == 0, 1, scales).unsqueeze(-1).to(cut.dtype)
        spread = self._cut(noise) if noise is not None else None
        codes = self._codes(units, spread).flatten(-2)[..., : self.length]
        return torch.cat([scales.contiguous().view(torch.uint8), self._packed(codes)], dim=-1)

    def unpack(self, packed: Tensor) -> Tensor:
        """`[n, nbytes]` as `[n, length]` float32."""
        split = 4 * self.blocks
        scales = packed[..., :split].flatten().clone().view(torch.float32)
        codes = self._cut(self._unpacked(packed[..., split:]).float())
        values = codes * scales.view(*codes.shape[:-1], 1)
        return values.flatten(-2)[..., : self.length]

    def _cut(self, rows: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(rows, (0, self.blocks * self.block - self.length))
        return padded.view(*rows.shape[:-1], self.blocks, self.block)

    def _codes(self, units: Tensor, noise: Tensor | None) -> Tensor:
        """Rounded units; at 1 bit, whether they are positive."""
        most = _MOST[self.bits]
        if self.bits == 1:
            return (units >= 0) if noise is None else (noise < (units + 1) / 2)
        rounded = units.round() if noise is None else (units + noise).floor()
        return rounded.nan_to_num_(0).clamp_(-most, most).to(torch.int8)

    def _packed(self, codes: Tensor) -> Tensor:
        if self.bits == 1:
            return pack_bits(codes)
        if self.bits == 8:
            return codes.contiguous().view(torch.uint8)
        halves = torch.nn.functional.pad(codes + 7, (0, codes.shape[-1] % 2)).to(torch.uint8)
        return halves[..., 0::2] | halves[..., 1::2] << 4

    def _unpacked(self, packed: Tensor) -> Tensor:
        if self.bits == 1:
            return unpack_bits(packed, self.length).to(torch.int8) * 2 - 1
        if self.bits == 8:
            return packed.contiguous().view(torch.int8)
        halves = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
        return halves[..., : self.length].to(torch.int8) - 7


_MOST: Mapping[int, int] = MappingProxyType({8: 127, 4: 7, 1: 1})
