"""Bits as bytes, the first bit the lowest of the first byte; and numbers of a few bits each."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_bits(bits: Tensor) -> Tensor:
    """`[..., n]` of 0 and 1, uint8 or bool, as `[..., ceil(n / 8)]` uint8; the rest is zeros."""
    eights = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.shape[-1] % 8))
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    return (eights.view(*eights.shape[:-1], -1, 8) * powers).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The first `count` bits, as `[..., count]` uint8."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> places & 1).flatten(-2)[..., :count]


def bits_of(numbers: Tensor, width: int) -> Tensor:
    """`[n]` integers, 0 <= number < 2**width, as `[n * width]` bits, uint8."""
    places = torch.arange(width, device=numbers.device)
    return (numbers.long().unsqueeze(-1) >> places & 1).flatten().to(torch.uint8)


def numbers_of(bits: Tensor, width: int, count: int) -> Tensor:
    """`[count * width]` bits as `[count]` integers, int64."""
    places = torch.arange(width, device=bits.device)
    return (bits.view(count, width).long() << places).sum(-1, dtype=torch.int64)


def bytes_for(bits: int) -> int:
    """How many bytes that many bits take."""
    return (bits + 7) // 8
