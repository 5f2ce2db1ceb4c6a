"""PowerSGD: each gradient matrix's best approximation of a low rank, found as the steps go by.

    M     [n, m]  a gradient, as a matrix: its first dimension, and all the others
    P, Q  [n, r], [m, r]   M is about P Q'

    P <- mean over members of M Q         all-reduce, n r values
    P <- orthogonalize(P)
    Q <- mean over members of M' P        all-reduce, m r values
    the mean of M is about P Q'; Q is where the next step begins: one step of power iteration each

(Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression".) Use error feedback.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from phalanx.compression.compressor import (
    NO_RESIDUALS,
    AllReduceMean,
    Compressor,
    EncodedTensor,
    GradientBucket,
    Member,
    NamedTensors,
    Request,
    ResidualStore,
    Rounds,
    check_floating,
    generator,
    narrowed,
    wide,
)

Approximation = dict[str, tuple[Tensor, ...]]  # of gradients by name: P and Q, or all of it, flat


class PowerSGD(Compressor):
    """Matrices as products of two narrow ones.

    rank   of the products: a matrix of n x m is sent as (n + m) * rank values
    dtype  in which they are sent: float32 (None; float64 for that), or half as many bytes as
           `torch.bfloat16` or `torch.float16`
    seed   of the first Q, the same on every member

    Vectors, and matrices that would not become smaller, are sent as they are; so at full rank it is
    exact, if `dtype` is. All matrices of a bucket go in two all-reduces. Members compute P from the
    same numbers: if their processors round alike the results are the same bits. If each needs a
    shard only, it multiplies the rows of the factors that overlap its shard.
    """

    def __init__(self, rank: int, *, dtype: torch.dtype | None = None, seed: int = 0) -> None:
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"PowerSGD approximates by matrices of rank 1 or more, not {rank}")
        if dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"PowerSGD sends bfloat16, float16 or float32, not {dtype}")
        self.rank, self.dtype, self.seed = rank, dtype, seed
        self._q = NamedTensors()

    def __repr__(self) -> str:
        return f"PowerSGD({self.rank}, dtype={self.dtype}, seed={self.seed})"

    def compress(self, tensor: Tensor) -> EncodedTensor:
        """Return this tensor's own factors P and Q, after one step of power iteration from the
        first Q. A tensor that would not become smaller is sent whole.
        """
        check_floating(tensor, self)
        values = tensor.detach().to(wide(tensor.dtype), copy=True)
        if not self._pays(tensor.shape):
            return EncodedTensor((self._rounded(values),), tensor.shape, tensor.dtype)
        matrix = values.flatten(1)
        p = self._rounded(_orthogonal(matrix @ self._first_q("", matrix)))
        q = self._rounded(matrix.T @ p.to(matrix))
        return EncodedTensor((p, q), tensor.shape, tensor.dtype)

    def decompress(self, message: EncodedTensor) -> Tensor:
        values, *q = (sent.to(wide(message.dtype)) for sent in message.sent)
        if q:
            values = values @ q[0].T
        return values.to(message.dtype, copy=True).view(message.shape)

    def average_(
        self, bucket: GradientBucket, member: Member, feedback: ResidualStore = NO_RESIDUALS
    ) -> Rounds:
        """Average in two rounds; in one if there is no matrix to compress."""
        if len(bucket.flat) == 0:
            return
        found = yield from self._approximate(bucket, member, feedback)
        for start, mean in _values(found, bucket, 0, len(bucket.flat)):
            bucket.flat[start : start + len(mean)] = mean

    def average_shard_(
        self, bucket: GradientBucket, member: Member, feedback: ResidualStore = NO_RESIDUALS
    ) -> Rounds:
        if bucket.size == 0:
            return
        found = yield from self._approximate(bucket.unpadded(), member, feedback)
        shard = bucket.shards(member.parts)[member.number]
        first = member.number * len(shard)
        for start, mean in _values(found, bucket, first, first + len(shard)):
            shard[start : start + len(mean)] = mean

    def _approximate(
        self, bucket: GradientBucket, member: Member, feedback: ResidualStore
    ) -> Generator[Request, Tensor, Approximation]:
        """Run the rounds; return an approximation of the mean."""
        wanted = feedback.add_residual(bucket, member)
        wanted = wanted.to(wide(wanted.dtype))
        low = {i.name: m.flatten(1) for i, m in bucket.cut(wanted) if self._pays(i.shape)}
        whole = {i.name: m.flatten() for i, m in bucket.cut(wanted) if i.name not in low}

        ps = [m @ self._last_q(name, m) for name, m in low.items()]
        sent, means = yield from self._mean([*ps, *whole.values()], member)
        own_whole, mean_whole = sent[len(ps) :], means[len(ps) :]
        ps = [_orthogonal(p) for p in means[: len(ps)]]
        own_qs = qs = [m.T @ p for m, p in zip(low.values(), ps, strict=True)]
        if qs:
            own_qs, qs = yield from self._mean(qs, member)

        def approximation(qs: Sequence[Tensor], whole_parts: Sequence[Tensor]) -> Approximation:
            found: Approximation = dict(zip(low, zip(ps, qs, strict=True), strict=True))
            return found | {name: (part,) for name, part in zip(whole, whole_parts, strict=True)}

        def residual() -> Tensor:
            own = approximation(own_qs, own_whole)
            for start, values in _values(own, bucket, 0, bucket.size):
                wanted[start : start + len(values)] -= values
            return wanted

        feedback.store_residual(bucket, residual)
        self._q.pending.update((name, q.clone()) for name, q in zip(low, qs, strict=True))
        return approximation(qs, mean_whole)

    def _mean(
        self, tensors: Sequence[Tensor], member: Member
    ) -> Generator[Request, Tensor, tuple[list[Tensor], list[Tensor]]]:
        """Run one round: return this member's tensors as sent, and their means over all members."""
        sent = self._rounded(torch.cat([one.flatten() for one in tensors]), member.parts)
        mean = yield AllReduceMean(sent.clone())
        return _like(tensors, sent), _like(tensors, mean)

    def remembers(self) -> Mapping[str, NamedTensors]:
        """Return the Q of each matrix."""
        return {"q.": self._q}

    def _rounded(self, values: Tensor, parts: int = 1) -> Tensor:
        return values if self.dtype is None else narrowed(values, self.dtype, parts)

    def _pays(self, shape: torch.Size) -> bool:
        """Return whether the factors of a tensor of this shape are smaller than the tensor."""
        if len(shape) < 2 or shape.numel() == 0:
            return False
        n, m = shape[0], shape.numel() // shape[0]
        return (n + m) * self.rank < n * m

    def _last_q(self, name: str, matrix: Tensor) -> Tensor:
        """Return the last step's Q; a new one if that is zeros, as its products would be zeros."""
        q = self._q.latest(name)
        if q is None or q.shape != (matrix.shape[1], self.rank) or not q.any():
            return self._first_q(name, matrix)
        return q.to(matrix)

    def _first_q(self, name: str, matrix: Tensor) -> Tensor:
        # Drawn on the CPU: the same on every member, on any device.
        cpu = torch.device("cpu")
        drawn = generator("powersgd", self.seed, name, device=cpu)
        return torch.randn(matrix.shape[1], self.rank, generator=drawn).to(matrix)


def _values(
    found: Approximation, bucket: GradientBucket, start: int, stop: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield elements start:stop of the bucket by gradient: the place of the first among them, and
    the flat values. One at a time, so that the multiplied values stay in the caches.
    """
    for place, low, high in bucket.overlaps(start, stop):
        first, last = low - place.start, high - place.start
        values, *factors = found[place.name]
        if factors:
            (q,) = factors
            top, bottom = first // len(q), -(-last // len(q))  # rows that have some of them
            values = (values[top:bottom] @ q.T).flatten()
            first, last = first - top * len(q), last - top * len(q)
        yield low - start, values[first:last]


def _orthogonal(p: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns' span; NaN, if they are not finite."""
    basis: Tensor = torch.linalg.qr(p).Q
    return basis


def _like(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """Return flat memory as tensors of those shapes, in their dtype."""
    pieces = torch.split(flat.to(tensors[0].dtype), [one.numel() for one in tensors])
    return [piece.view_as(one) for piece, one in zip(pieces, tensors, strict=True)]
