"""Casts: gradients travel in a dtype of 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.compression.bundle import Bundle
from phalanx.compression.compressor import Compressor, check_floating, narrowed, wide
from phalanx.compression.exchange import Mean, Part, Rounds, Swap
from phalanx.compression.feedback import FORGET, Feedback


@dataclass(frozen=True, eq=False)
class Cast:
    """A message: the tensor in another dtype."""

    values: Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of the values."""
        return self.values.nbytes


class Half(Compressor):
    """Gradients as float16 or bfloat16: 2 bytes a value, and one all-reduce.

    dtype   `torch.bfloat16`: values of any size, to 8 bits; `torch.float16`: to 11 bits, of up to
            65504 / (p + 1), which larger ones are sent as, so that the sum over p parts is finite

    The sum is in that dtype, too, as the backend sums it. With error feedback the rest of a value
    follows later.

    Where each part needs a shard only, its owner gets all parts' values, and sums them in float32:
    (p-1)/p of the bytes, nothing is rounded twice, and float16 takes values of up to 65504.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"Half casts to torch.float16 or torch.bfloat16, not {dtype}")
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Half({self.dtype})"

    def compress(self, tensor: Tensor) -> Cast:
        """The tensor, rounded to nearest."""
        check_floating(tensor, self)
        return Cast(narrowed(tensor.detach(), self.dtype), tensor.dtype)

    def decompress(self, message: Cast) -> Tensor:
        """The rounded tensor, in its former dtype."""
        return message.values.to(message.dtype, copy=True)

    def average_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """One round, an all-reduce of 2 bytes a value."""
        if len(bundle.flat) == 0:
            return
        wanted = feedback.recall(bundle, part)
        sent = narrowed(wanted, self.dtype, part.parts)
        feedback.keep(bundle, lambda: wanted.sub_(sent))
        bundle.flat.copy_((yield Mean(sent.clone())))

    def average_shard_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """One round, an all-to-all of 2 bytes a value."""
        if bundle.size == 0:
            return
        wanted = feedback.recall(bundle, part)
        sent = narrowed(wanted, self.dtype)
        feedback.keep(bundle, lambda: wanted.sub_(sent))
        shards = bundle.shards(part.parts)
        rows = yield Swap(sent.view_as(shards))
        total = torch.zeros(shards.shape[1], dtype=wide(wanted.dtype), device=wanted.device)
        for theirs in rows:
            total += theirs
        shards[part.number].copy_(total.div_(part.parts))
