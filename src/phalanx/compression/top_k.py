"""Top-k: of each gradient the largest values, and nothing of the others.

With error feedback it converges like plain SGD (Stich et al. 2018, "Sparsified SGD with Memory";
Lin et al. 2018, "Deep Gradient Compression").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from types import MappingProxyType

import torch
from torch import Tensor

from phalanx.compression.compressor import (
    FORGET,
    Compressor,
    Feedback,
    Gather,
    Mean,
    MeanShard,
    Part,
    Rounds,
    Swap,
    check_floating,
    generator,
    is_finite,
    narrowed,
    wide,
)
from phalanx.compression.memory import Bundle, Remembers, Turns
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


# ------------------------------------------------------------------------------
# The k largest magnitudes, exactly, ties and all, in time proportional to n: radix selection.
#
# The bits of a float, without its sign, order as its magnitude does. So the k-th largest is found
# 16 bits at a time: count how often each value of the highest 16 occurs, see in which the k-th
# lies, go on with those.
#
# Of many values a few tell where to look: a bound that most likely some more than k reach. Only
# those that do are gone through, unless they turn out to be fewer than k.

DIGIT = 16  # bits

SAMPLE = 1 << 14
"""Values by which the bound is chosen."""

PIECE = 1 << 18
"""Values that are looked at together: what is worked out about them stays in the caches."""


def largest(values: Tensor, k: int) -> Tensor:
    """The indices of the k values of largest magnitude of `[n]`, ascending, int64.

    Of equal magnitudes the one of lowest index comes first; NaN is larger than infinity.
    """
    if k in (0, len(values)):
        return torch.arange(k, device=values.device)
    places = _candidates(values, k)
    keys = _keys(values if places is None else values[places])
    kth, needed = _kth_largest(keys, k)
    above = (keys > kth).nonzero().flatten()
    equal = (keys == kth).nonzero().flatten()[:needed]
    found = torch.cat([above, equal]).sort().values
    return found if places is None else places[found]


def _candidates(values: Tensor, k: int) -> Tensor | None:
    """Some indices, ascending, those of the k largest among them. None: it may be any."""
    n = len(values)
    stride = n // SAMPLE
    if stride < 2:
        return None
    sample = values[::stride]
    expected = len(sample) * k / n  # of the k largest, in the sample
    some_more = ceil(expected + 4 * sqrt(expected) + 4)
    if some_more > len(sample) // 4:  # to go through so many takes longer than it saves
        return None
    bound, _ = _kth_largest(_keys(sample), some_more)
    if bound == 0:  # which all reach
        return None
    size = PIECE if values.device.type == "cpu" else n
    found = [
        (_keys(piece) >= bound).nonzero().flatten() + number * size
        for number, piece in enumerate(torch.split(values, size))
    ]
    places = torch.cat(found)
    return places if len(places) >= k else None


def _keys(values: Tensor) -> Tensor:
    """Integers in the order of magnitudes."""
    bits = _BITS[values.dtype]
    keys = values.abs().view(bits)
    infinity = torch.tensor(torch.inf, dtype=values.dtype).view(bits)
    keys.clamp_(max=int(infinity) + 1)  # as if there were one NaN
    return keys.int() if bits is torch.int16 else keys  # in which a digit is no negative number


def _kth_largest(keys: Tensor, k: int) -> tuple[int, int]:
    """The k-th largest key, and how many of those that equal it are among the k largest."""
    kth = 0
    for shift in range(keys.dtype.itemsize * 8 - DIGIT, -1, -DIGIT):
        digits = keys >> shift & 0xFFFF
        counts = digits.bincount(minlength=1 << DIGIT)
        at_least = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(at_least, k))
        digit = (1 << DIGIT) - 1 - place
        k -= int(at_least[place]) - int(counts[digit])
        kth |= digit << shift
        keys = keys[digits == digit]
    return kth, k


_BITS: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {
        torch.float16: torch.int16,
        torch.bfloat16: torch.int16,
        torch.float32: torch.int32,
        torch.float64: torch.int64,
    }
)


# ------------------------------------------------------------------------------
# Random-k: a few values of a gradient, at places that all parts draw alike, so no index is sent.
#
# (Stich et al. 2018.) The places are drawn one from each of k equal runs of the gradient, which is
# as good and takes no shuffle:
#
#     n = 8, k = 3   [ . . x | . x . | x . ]


@dataclass(frozen=True, eq=False)
class RandomValues:
    """A message: values, and the number of the draw that says where they stand."""

    values: Tensor
    draw: int
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Of the values: receivers count draws, too."""
        return self.values.nbytes


class RandomK(Compressor):
    """`ceil(ratio * n)` values of n, at places that are drawn anew for each average.

    ratio   0 <= ratio <= 1; at least one value, if there is one
    seed    the same on every part

    It sends what it has drawn as it is, not n/k times as much: with error feedback nothing is
    missing in the end, without it gradients are too small. Averages are all-reduced; where each
    part needs a shard only, equally many places are drawn in each, and their values
    reduce-scattered.
    """

    def __init__(self, ratio: float, *, seed: int = 0) -> None:
        self.ratio = checked_ratio(ratio)
        self.seed = seed
        self._turns = Turns()

    def __repr__(self) -> str:
        return f"RandomK({self.ratio}, seed={self.seed})"

    def compress(self, tensor: Tensor) -> RandomValues:
        """The next draw's values."""
        check_floating(tensor, self)
        draw, flat = self._turns.next(), tensor.detach().reshape(-1)
        return RandomValues(flat[self._places(flat, draw, 1)], draw, tensor.shape)

    def decompress(self, message: RandomValues) -> Tensor:
        """Zeros but for those values."""
        dense = message.values.new_zeros(message.shape.numel())
        dense[self._places(dense, message.draw, 1)] = message.values
        return dense.view(message.shape)

    def average_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """One round, an all-reduce of k values."""
        flat = bundle.flat
        if len(flat) == 0:
            return
        places, values = self._drawn(bundle, part, feedback, 1)
        mean = yield Mean(values)
        flat.zero_()
        flat[places] = mean

    def average_shard_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """One round, a reduce-scatter of equally many values of each shard."""
        if bundle.size == 0:
            return
        parts, shard = part.parts, bundle.shards(part.parts)[part.number]
        places, values = self._drawn(bundle, part, feedback, parts)
        mean = yield MeanShard(values.view(parts, -1))
        shard.zero_()
        shard[places.view(parts, -1)[part.number] - part.number * len(shard)] = mean

    def _drawn(
        self, bundle: Bundle, part: Part, feedback: Feedback, shards: int
    ) -> tuple[Tensor, Tensor]:
        """The next draw's places, and a copy of this part's values there, as they travel."""
        flat = bundle.flat
        wanted = feedback.recall(bundle, part)
        places = self._places(flat, self._turns.next(), shards)
        parts = 1 if flat.dtype is wide(flat.dtype) else part.parts
        values = narrowed(wanted[places], flat.dtype, parts)
        finite = is_finite(wanted)

        def rest() -> Tensor:
            wanted[places] -= values.to(wanted.dtype)
            return wanted

        feedback.keep(bundle, rest)
        if not finite:  # at places that are not drawn, perhaps
            return places, torch.full_like(values, torch.nan)
        return places, values.clone()

    def remembers(self) -> Mapping[str, Remembers]:
        """How often it has drawn."""
        return {"draws": self._turns}

    def _places(self, flat: Tensor, draw: int, shards: int) -> Tensor:
        """One from each run, int64, ascending; of equal shards equally many."""
        n, device = len(flat), flat.device
        k = shards * kept(n // shards, self.ratio)
        edges = torch.arange(k + 1, device=device) * n // max(k, 1)
        chance = torch.rand(
            k,
            dtype=torch.float64,
            device=device,
            generator=generator("random-k", self.seed, draw, device=device),
        )
        starts, lengths = edges[:-1], edges.diff()
        return starts + (chance * lengths).long().minimum(lengths - 1)
