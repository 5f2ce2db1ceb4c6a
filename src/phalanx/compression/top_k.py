"""Top-k: the largest values of each gradient, and none of the others.

With error feedback it converges like plain SGD (Stich et al. 2018, "Sparsified SGD with Memory";
Lin et al. 2018, "Deep Gradient Compression").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, sqrt

import torch
from torch import Tensor

from phalanx.compression.compressor import (
    NO_RESIDUALS,
    AllGather,
    AllReduceMean,
    AllToAll,
    CallCounter,
    Compressor,
    EncodedTensor,
    GradientBucket,
    Member,
    ReduceScatterMean,
    ResidualStore,
    Rounds,
    check_floating,
    generator,
    is_finite,
    listed_tensors,
    narrowed,
    wide,
)
from phalanx.compression.sparse import CompressedGradient, index_dtype
from phalanx.errors import SizeMismatchError


class TopK(Compressor):
    """The `ceil(ratio * n)` values of largest magnitude of n; at least one, if there is one.

    ratio   0 <= ratio <= 1

    Of equal magnitudes the one of lowest index goes first. NaN counts as larger than infinity. An
    average gathers all members' messages, k values and about log2(n / k) + 2 bits for each index,
    and sums them member after member: each of p members sends (p-1) messages' bytes, so beyond a
    few dozen members a linear compressor sends less.

    If each member needs a shard only, the largest of each shard are sent to its owner, equally many
    for all: (p-1)/p of one message's bytes, in one round of known lengths, and no owner gets more
    than another. At worst no more is left out than by the largest of all shards.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = checked_ratio(ratio)

    def __repr__(self) -> str:
        return f"TopK({self.ratio})"

    def compress(self, tensor: Tensor) -> CompressedGradient:
        """Return the largest values, in the tensor's dtype."""
        check_floating(tensor, self)
        flat = tensor.detach().reshape(-1)
        n = len(flat)
        indices = largest(flat, kept(n, self.ratio))
        return CompressedGradient(indices.to(index_dtype(n)), flat[indices], n, tuple(tensor.shape))

    def decompress(self, message: CompressedGradient) -> Tensor:
        """Return the values in a tensor of zeros. Raise as `CompressedGradient.dense` does."""
        return message.dense()

    def average_(
        self, bucket: GradientBucket, member: Member, feedback: ResidualStore = NO_RESIDUALS
    ) -> Rounds:
        """Average in one round, in float32 or wider; values of only one member count as a p-th."""
        if len(bucket.flat) > 0:
            (mine,) = self._compressed(bucket, member, feedback, shards=1)
            _average_into(bucket.flat, (yield AllGather(mine.pack())), mine)

    def average_shard_(
        self, bucket: GradientBucket, member: Member, feedback: ResidualStore = NO_RESIDUALS
    ) -> Rounds:
        """Average in one round, an all-to-all of the largest values of each shard."""
        if bucket.size > 0:
            mine = self._compressed(bucket, member, feedback, shards=member.parts)
            rows = yield AllToAll(torch.stack([message.pack() for message in mine]))
            _average_into(bucket.shards(member.parts)[member.number], rows, mine[member.number])

    def _compressed(
        self, bucket: GradientBucket, member: Member, feedback: ResidualStore, *, shards: int
    ) -> list[CompressedGradient]:
        """Return a message for each of the bucket's `parts` shards."""
        wanted = feedback.add_residual(bucket, member)
        values = narrowed(wanted, bucket.flat.dtype).view(shards, -1)
        sent = [self.compress(shard) for shard in values]

        def residual() -> Tensor:
            for shard, message in zip(wanted.view(shards, -1), sent, strict=True):
                shard[message.indices.long()] -= message.values.to(wanted.dtype)
            return wanted

        feedback.store_residual(bucket, residual)
        return sent


def compress_gradients(gradients: Iterable[Tensor], ratio: float) -> list[CompressedGradient]:
    """Return each gradient's `TopK(ratio)` message. TypeError unless given a list of tensors."""
    top_k = TopK(ratio)
    return [top_k.compress(each) for each in listed_tensors(gradients, "compress_gradients")]


def decompress_gradients(
    compressed: Sequence[CompressedGradient], shapes: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Return gradients of these shapes, with zeros where the messages have no value.

    Raises `SizeMismatchError` unless there is a shape for each, of as many values as the gradient
    had; `IndexError` for an index out of range; TypeError for other objects than messages.
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
    """Return `ratio` of n values as a number: at least one, if there is one."""
    return min(n, max(1, ceil(n * ratio)))


def checked_ratio(ratio: float) -> float:
    """Return the ratio; ValueError unless it is one."""
    try:
        fits = 0 <= ratio <= 1
    except TypeError:  # text, or nothing
        fits = False
    if not fits:
        raise ValueError(f"the ratio of values to keep is between 0 and 1, not {ratio!r}")
    return float(ratio)


def _average_into(into: Tensor, rows: Tensor, like: CompressedGradient) -> None:
    """Write the mean of packed messages, each of as many values as `like`, into `into`."""
    n, dtype = like.original_len, like.values.dtype
    total = into.to(wide(dtype)).zero_()  # itself, if it is wide enough
    for row in rows:
        theirs = CompressedGradient.unpack(row, len(like.values), n, dtype)
        total.index_add_(0, theirs.indices, theirs.values.to(total.dtype))
    total.div_(len(rows))
    if total is not into:
        into.copy_(total)


# ------------------------------------------------------------------------------
# The k largest magnitudes, exactly, ties and all.
#
# The bits of a float, without its sign, sort as its magnitude does. Of many values a sample gives a
# bound that most likely some more than k reach. Only those that reach it are searched for the k-th
# largest, unless they turn out to be fewer than k.

SAMPLE = 1 << 14  # values
COMPARE_BLOCK = 1 << 18  # values compared at once: intermediate results stay in the caches


def largest(values: Tensor, k: int) -> Tensor:
    """Return the indices of the k values of largest magnitude of `[n]`, ascending, int64.

    Of equal magnitudes the one of lowest index comes first; NaN is larger than infinity.
    """
    if k in (0, len(values)):
        return torch.arange(k, device=values.device)
    places = _candidates(values, k)
    keys = _keys(values if places is None else values[places])
    kth = _kth_largest(keys, k)
    above = (keys > kth).nonzero().flatten()
    equal = (keys == kth).nonzero().flatten()[: k - len(above)]
    found = torch.cat([above, equal]).sort().values
    return found if places is None else places[found]


def _candidates(values: Tensor, k: int) -> Tensor | None:
    """Return ascending indices that include those of the k largest values. None: it may be any."""
    n = len(values)
    stride = n // SAMPLE
    if stride < 2:
        return None
    sample = values[::stride]
    expected = len(sample) * k / n  # of the k largest, in the sample
    some_more = ceil(expected + 4 * sqrt(expected) + 4)
    if some_more > len(sample) // 4:  # so many take longer than the sample saves
        return None
    bound = _kth_largest(_keys(sample), some_more)
    if bound == 0:  # all reach it
        return None
    size = COMPARE_BLOCK if values.device.type == "cpu" else n
    found = [
        (_keys(piece) >= bound).nonzero().flatten() + number * size
        for number, piece in enumerate(torch.split(values, size))
    ]
    places = torch.cat(found)
    return places if len(places) >= k else None


def _keys(values: Tensor) -> Tensor:
    """Return integers in the order of magnitudes."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize]
    keys = values.abs().view(bits)
    infinity = torch.tensor(torch.inf, dtype=values.dtype).view(bits)
    return keys.clamp_(max=int(infinity) + 1)  # as if there were one NaN


def _kth_largest(keys: Tensor, k: int) -> Tensor:
    return keys.topk(k, sorted=False).values.amin()


# ------------------------------------------------------------------------------
# Random-k: a few values of a gradient, at places that all members draw alike, so no index is sent.
#
# (Stich et al. 2018.) The places are drawn one from each of k equal runs of the gradient, which is
# as good and takes no shuffle:
#
#     n = 8, k = 3   [ . . x | . x . | x . ]


class RandomK(Compressor):
    """`ceil(ratio * n)` values of n, at places that are drawn anew for each average.

    ratio   0 <= ratio <= 1; at least one value, if there is one
    seed    the same on every member

    It sends the drawn values as they are, not multiplied by n/k: with error feedback nothing is
    missing in the end, without it gradients are too small. Averages are all-reduced; if each member
    needs a shard only, as many places are drawn in each, and values reduce-scattered.
    """

    def __init__(self, ratio: float, *, seed: int = 0) -> None:
        self.ratio = checked_ratio(ratio)
        self.seed = seed
        self._calls = CallCounter()

    def __repr__(self) -> str:
        return f"RandomK({self.ratio}, seed={self.seed})"

    def compress(self, tensor: Tensor) -> EncodedTensor:
        """Return the next draw's values; a receiver draws their places itself."""
        check_floating(tensor, self)
        draw, flat = self._calls.next(), tensor.detach().reshape(-1)
        values = flat[self._places(flat, draw, 1)]
        return EncodedTensor((values,), tensor.shape, tensor.dtype, call=draw)

    def decompress(self, message: EncodedTensor) -> Tensor:
        """Return the values in a tensor of zeros."""
        (values,) = message.sent
        dense = values.new_zeros(message.shape.numel())
        dense[self._places(dense, message.call, 1)] = values
        return dense.view(message.shape)

    def average_(
        self, bucket: GradientBucket, member: Member, feedback: ResidualStore = NO_RESIDUALS
    ) -> Rounds:
        """Average by one all-reduce of k values."""
        flat = bucket.flat
        if len(flat) == 0:
            return
        places, values = self._drawn(bucket, member, feedback, shards=1)
        mean = yield AllReduceMean(values)
        flat.zero_()
        flat[places] = mean

    def average_shard_(
        self, bucket: GradientBucket, member: Member, feedback: ResidualStore = NO_RESIDUALS
    ) -> Rounds:
        """Average by one reduce-scatter of equally many values of each shard."""
        if bucket.size == 0:
            return
        p, shard = member.parts, bucket.shards(member.parts)[member.number]
        places, values = self._drawn(bucket, member, feedback, shards=p)
        mean = yield ReduceScatterMean(values.view(p, -1))
        shard.zero_()
        shard[places.view(p, -1)[member.number] - member.number * len(shard)] = mean

    def _drawn(
        self, bucket: GradientBucket, member: Member, feedback: ResidualStore, *, shards: int
    ) -> tuple[Tensor, Tensor]:
        """Return the next draw's places, and a copy of this member's values there, as sent."""
        flat = bucket.flat
        wanted = feedback.add_residual(bucket, member)
        places = self._places(flat, self._calls.next(), shards)
        parts = 1 if flat.dtype is wide(flat.dtype) else member.parts
        values = narrowed(wanted[places], flat.dtype, parts)
        finite = is_finite(wanted)

        def residual() -> Tensor:
            wanted[places] -= values.to(wanted.dtype)
            return wanted

        feedback.store_residual(bucket, residual)
        if not finite:  # at places that are not drawn, perhaps
            return places, torch.full_like(values, torch.nan)
        return places, values.clone()

    def remembers(self) -> Mapping[str, CallCounter]:
        """Return the counter of its draws."""
        return {"draws": self._calls}

    def _places(self, flat: Tensor, draw: int, shards: int) -> Tensor:
        """Return one place of each run, int64, ascending; equally many of equal shards."""
        n, device = len(flat), flat.device
        k = shards * kept(n // shards, self.ratio)
        edges = torch.arange(k + 1, device=device) * n // max(k, 1)
        drawn = generator("random-k", self.seed, draw, device=device)
        chance = torch.rand(k, dtype=torch.float64, device=device, generator=drawn)
        starts, lengths = edges[:-1], edges.diff()
        return starts + (chance * lengths).long().minimum(lengths - 1)
