"""Top-k: of each gradient the largest values, and nothing of the others.

With error feedback it converges like plain SGD (Stich et al. 2018, "Sparsified SGD with Memory";
Lin et al. 2018, "Deep Gradient Compression").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

import torch
from torch import Tensor

from phalanx.compression.bundle import Bundle
from phalanx.compression.compressor import Compressor, check_floating, narrowed, wide
from phalanx.compression.exchange import Gather, Part, Rounds, Swap
from phalanx.compression.feedback import FORGET, Feedback
from phalanx.compression.select import largest
from phalanx.compression.sparse import CompressedGradient, index_dtype
from phalanx.errors import SizeMismatchError


class TopK(Compressor):
    """The `ceil(ratio * n)` values of largest magnitude of n; at least one, if there is one.

    ratio   0 <= ratio <= 1

    Of equal magnitudes the one of lowest index goes first. NaN counts as larger than infinity. An
    average gathers all parts' messages, k values and about log2(n / k) + 2 bits for each index, and
    sums them part after part: each of p parts sends (p-1) messages' bytes, so beyond a few dozen
    parts a linear compressor sends less.

    Where each part needs a shard only, the largest of each shard are sent to its owner, equally
    many for all: (p-1)/p of one message's bytes, in one round of lengths that are known, and no
    owner gets more than another. At worst no more is left out than by the largest of all shards.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = checked_ratio(ratio)

    def __repr__(self) -> str:
        return f"TopK({self.ratio})"

    def compress(self, tensor: Tensor) -> CompressedGradient:
        """The largest values, in the tensor's dtype."""
        check_floating(tensor, self)
        flat = tensor.detach().reshape(-1)
        n = len(flat)
        indices = largest(flat, kept(n, self.ratio))
        return CompressedGradient(indices.to(index_dtype(n)), flat[indices], n, tuple(tensor.shape))

    def decompress(self, message: CompressedGradient) -> Tensor:
        """Zeros but for those values. Raises as `CompressedGradient.dense` does."""
        return message.dense()

    def average_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """One round. Summed in float32 or wider; a value that only one part sent counts as a p-th
        of it.
        """
        n, dtype = len(bundle.flat), bundle.flat.dtype
        if n == 0:
            return
        wanted = feedback.recall(bundle, part)
        mine = self.compress(narrowed(wanted, dtype))
        feedback.keep(bundle, lambda: _without_(wanted, [mine]))
        rows = yield Gather(mine.pack())
        _average_into(bundle.flat, rows, mine)

    def average_shard_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """One round, an all-to-all of the largest values of each shard."""
        if bundle.size == 0:
            return
        wanted = feedback.recall(bundle, part)
        shards = narrowed(wanted, bundle.flat.dtype).view_as(bundle.shards(part.parts))
        mine = [self.compress(shard) for shard in shards]
        feedback.keep(bundle, lambda: _without_(wanted, mine))
        rows = yield Swap(torch.stack([message.pack() for message in mine]))
        _average_into(bundle.shards(part.parts)[part.number], rows, mine[part.number])


def compress_gradients(gradients: Iterable[Tensor], ratio: float) -> list[CompressedGradient]:
    """Each gradient's `TopK(ratio)` message. TypeError for what is no list of tensors."""
    if isinstance(gradients, Tensor):  # whose rows would be taken for gradients
        raise TypeError("compress_gradients takes a list of gradients, not one tensor")
    top_k, listed = TopK(ratio), list(gradients)
    for number, gradient in enumerate(listed):
        if not isinstance(gradient, Tensor):
            raise TypeError(
                f"compress_gradients: gradient {number} is a {type(gradient).__name__}, not a "
                "tensor; leave out parameters without a gradient, or give zeros"
            )
    return [top_k.compress(gradient) for gradient in listed]


def decompress_gradients(
    compressed: Sequence[CompressedGradient], shapes: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Gradients of these shapes, with zeros where the messages have no value.

    Raises `SizeMismatchError` unless there is a shape for each, of as many values as the gradient
    had; `IndexError` for an index that is not one of its; TypeError for what is no message.
    """
    if len(compressed) != len(shapes):
        raise SizeMismatchError(
            f"decompress_gradients: {len(compressed)} gradients and {len(shapes)} shapes"
        )
    dense = []
    for number, (message, shape) in enumerate(zip(compressed, shapes, strict=True)):
        if not isinstance(message, CompressedGradient):
            raise TypeError(
                f"decompress_gradients: gradient {number} is a {type(message).__name__}, not a "
                "CompressedGradient"
            )
        if torch.Size(shape).numel() != message.original_len:
            raise SizeMismatchError(
                f"decompress_gradients: gradient {number} had {message.original_len} values, and "
                f"the shape {list(shape)} has {torch.Size(shape).numel()}"
            )
        dense.append(message.dense().view(torch.Size(shape)))
    return dense


def kept(n: int, ratio: float) -> int:
    """How many of n values that ratio is: at least one, if there is one."""
    return min(n, max(1, ceil(n * ratio)))


def checked_ratio(ratio: float) -> float:
    """The ratio; ValueError unless it is one."""
    try:
        fits = 0 <= ratio <= 1
    except TypeError:  # text, or nothing
        fits = False
    if not fits:
        raise ValueError(f"the ratio of values to keep is between 0 and 1, not {ratio!r}")
    return float(ratio)


def _without_(wanted: Tensor, sent: Sequence[CompressedGradient]) -> Tensor:
    """What is left of values whose shards, or which all, were sent so; in place."""
    for shard, message in zip(wanted.view(len(sent), -1), sent, strict=True):
        shard[message.indices.long()] -= message.values.to(wanted.dtype)
    return wanted


def _average_into(into: Tensor, rows: Tensor, like: CompressedGradient) -> None:
    """The mean of packed messages, all of as many values as `like`, summed in float32 or wider."""
    n, dtype = like.original_len, like.values.dtype
    total = into.to(wide(dtype)).zero_()  # itself, if it is wide enough
    for row in rows:
        theirs = CompressedGradient.unpack(row, len(like.values), n, dtype)
        total.index_add_(0, theirs.indices, theirs.values.to(total.dtype))
    total.div_(len(rows))
    if total is not into:
        into.copy_(total)
