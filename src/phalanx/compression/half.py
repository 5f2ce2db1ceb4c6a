"""Casts: gradients travel in a dtype of 16 bits."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.compression.bundle import Bundle
from phalanx.compression.compressor import Compressor, check_floating, narrowed, wide
from phalanx.compression.exchange import Gather, Mean, Part, Request, Rounds, Swap
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

    The sum is in that dtype, too, as the backend sums it. With error feedback, from which nothing
    may be lost, it is in float32 instead, on the owner of a slice, which keeps what it rounds off
    the mean: as many bytes, an all-to-all and an all-gather.

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
        """One round, an all-reduce of 2 bytes a value; two with feedback."""
        n = len(bundle.flat)
        if n == 0:
            return
        if feedback is FORGET:
            bundle.flat.copy_((yield Mean(narrowed(bundle.flat, self.dtype, part.parts).clone())))
            return
        mean = yield from self._mean_of_slice(bundle, part, feedback)
        start = min(n, part.number * len(mean))
        size = min(n, start + len(mean)) - start  # the last slices may be shorter, or empty
        owned = feedback.recall_owned(bundle, start, mean[:size])
        again = narrowed(owned, self.dtype)
        feedback.keep_owned(bundle, start, lambda: owned - again.to(owned.dtype))
        gathered = yield Gather(torch.nn.functional.pad(again, (0, len(mean) - size)))
        bundle.flat.copy_(gathered.flatten()[:n])

    def average_shard_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """One round, an all-to-all of 2 bytes a value."""
        if bundle.size == 0:
            return
        mean = yield from self._mean_of_slice(bundle, part, feedback)
        bundle.shards(part.parts)[part.number].copy_(mean)

    def _mean_of_slice(
        self, bundle: Bundle, part: Part, feedback: Feedback
    ) -> Generator[Request, Tensor, Tensor]:
        """Of one of as many slices as there are parts, the last ones padded; float32 or wider."""
        p, length = part.parts, -(-len(bundle.flat) // part.parts)
        wanted = feedback.recall(bundle, part)
        sent = narrowed(wanted, self.dtype)
        feedback.keep(bundle, lambda: wanted.sub_(sent))
        padded = torch.nn.functional.pad(sent, (0, p * length - len(sent)))
        rows = yield Swap(padded.view(p, length))
        total = torch.zeros(length, dtype=wide(wanted.dtype), device=wanted.device)
        for theirs in rows:
            total += theirs
        return total.div_(p)
