"""Lists of tensors as flat memory, one piece for each dtype, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def numbers_by_kind(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Which tensors are of one dtype, and on one device: their numbers."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(number)
    return list(kinds.values())


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Copies of some tensors of one kind, one after the other."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def cut_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """New tensors with the values of flat memory, in the shapes of those that it was made of."""
    sizes = [tensor.numel() for tensor in tensors]
    return [
        piece.view(like.shape).clone()
        for piece, like in zip(torch.split(flat, sizes), tensors, strict=True)
    ]
