"""PowerSGD: of each gradient matrix its best approximation of a low rank, found as the steps go by.

    M     [n, m]  a gradient, as a matrix: its first dimension, and all the others
    P, Q  [n, r], [m, r]   M is about P Q'

    P <- mean over parts of M Q             all-reduce, n r values
    P <- orthogonalize(P)
    Q <- mean over parts of M' P            all-reduce, m r values
    the mean of M is about P Q'; Q is where the next step begins: one step of power iteration each

(Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression".) To be used with error
feedback.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.compression.compressor import (
    FORGET,
    Compressor,
    Feedback,
    Mean,
    Part,
    Request,
    Rounds,
    check_floating,
    generator,
    narrowed,
    wide,
)
from phalanx.compression.memory import Bundle, Memory, Piece, Remembers


@dataclass(frozen=True, eq=False)
class Factors:
    """A message: two factors of a matrix; or a tensor that is not worth it, whole.

    p, q   [n, r], [m, r], as they travel; or the tensor, and None
    """

    p: Tensor
    q: Tensor | None
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of both factors."""
        return self.p.nbytes + (self.q.nbytes if self.q is not None else 0)


class _Approximation(NamedTuple):
    """Of gradients of a bundle, by name: factors P and Q, or the whole, flat."""

    factors: dict[str, tuple[Tensor, Tensor]]
    whole: dict[str, Tensor]

    def values(self, bundle: Bundle, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Elements start:stop of the bundle, gradient by gradient: where among them one begins, and
        its values, flat. One at a time, so that what is multiplied stays in the caches.
        """
        for piece in bundle.pieces:
            low, high = max(piece.start, start) - piece.start, min(piece.stop, stop) - piece.start
            if low >= high:
                continue
            place = piece.start + low - start
            if piece.name in self.whole:
                yield place, self.whole[piece.name][low:high]
                continue
            p, q = self.factors[piece.name]
            first, last = low // len(q), -(-high // len(q))  # rows that have something of it
            rows = (p[first:last] @ q.T).flatten()
            yield place, rows[low - first * len(q) : high - first * len(q)]


class PowerSGD(Compressor):
    """Matrices as products of two narrow ones.

    rank   of the products: a matrix of n x m is sent as (n + m) * rank values
    dtype  in which they travel: float32 (None; float64 for that), or half as many bytes as
           `torch.bfloat16` or `torch.float16`
    seed   of the first Q, the same on every part

    Vectors, and matrices that would not become smaller, are sent as they are; so at full rank it is
    exact, if `dtype` is. All matrices of a bundle go in two all-reduces. Parts compute P from the
    same numbers: where their processors round alike the results are the same bits. Where each part
    needs a shard only, it multiplies those rows of the factors that its shard has something of.
    """

    def __init__(self, rank: int, *, dtype: torch.dtype | None = None, seed: int = 0) -> None:
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"PowerSGD approximates by matrices of rank 1 or more, not {rank}")
        if dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"PowerSGD sends bfloat16, float16 or float32, not {dtype}")
        self.rank, self.dtype, self.seed = rank, dtype, seed
        self._q = Memory()

    def __repr__(self) -> str:
        return f"PowerSGD({self.rank}, dtype={self.dtype}, seed={self.seed})"

    def compress(self, tensor: Tensor) -> Factors:
        """This tensor's own factors, from the first Q: one step of power iteration."""
        check_floating(tensor, self)
        values = tensor.detach().to(wide(tensor.dtype), copy=True)
        if not self._pays(tensor.shape):
            return Factors(self._travelling(values), None, tensor.shape, tensor.dtype)
        matrix = values.flatten(1)
        p = self._travelling(_orthogonal(matrix @ self._first_q("", matrix)))
        q = self._travelling(matrix.T @ p.to(matrix))
        return Factors(p, q, tensor.shape, tensor.dtype)

    def decompress(self, message: Factors) -> Tensor:
        """The factors' product."""
        values = message.p.to(wide(message.dtype))
        if message.q is not None:
            values = values @ message.q.to(values).T
        return values.to(message.dtype, copy=True).view(message.shape)

    def average_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """Two rounds; one if there is no matrix to compress."""
        if len(bundle.flat) == 0:
            return
        found = yield from self._approximate(bundle, part, feedback)
        for start, mean in found.values(bundle, 0, len(bundle.flat)):
            bundle.flat[start : start + len(mean)] = mean

    def average_shard_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """The same rounds."""
        if bundle.size == 0:
            return
        found = yield from self._approximate(bundle.unpadded(), part, feedback)
        shard = bundle.shards(part.parts)[part.number]
        first = part.number * len(shard)
        for start, mean in found.values(bundle, first, first + len(shard)):
            shard[start : start + len(mean)] = mean

    def _approximate(
        self, bundle: Bundle, part: Part, feedback: Feedback
    ) -> Generator[Request, Tensor, _Approximation]:
        """The rounds; the factors of the mean."""
        wanted = feedback.recall(bundle, part)
        wanted = wanted.to(wide(wanted.dtype))
        low = [(i, m.flatten(1)) for i, m in bundle.cut(wanted) if self._pays(i.shape)]
        small = [piece.name for piece, _ in low]
        others = {i.name: m.flatten() for i, m in bundle.cut(wanted) if i.name not in small}
        whole = list(others.values())

        ps = [m @ self._last_q(piece, m) for piece, m in low]
        sent = self._travelling(torch.cat([*(p.flatten() for p in ps), *whole]), part.parts)
        sizes = [p.numel() for p in ps] + [len(values) for values in whole]
        mine = torch.split(sent.to(wanted), sizes)[len(ps) :]
        mean = yield Mean(sent.clone())
        means = torch.split(mean.to(wanted), sizes)
        ps = [_orthogonal(flat.view_as(p)) for flat, p in zip(means, ps, strict=False)]

        qs = [m.T @ p for (_, m), p in zip(low, ps, strict=True)]
        sent = self._travelling(torch.cat([*(q.flatten() for q in qs), wanted[:0]]), part.parts)
        qs = _like(qs, sent.to(wanted))

        def joined(qs: Sequence[Tensor], whole: Sequence[Tensor]) -> _Approximation:
            factors = dict(zip(small, zip(ps, qs, strict=True), strict=True))
            return _Approximation(factors, dict(zip(others, whole, strict=True)))

        own = joined(qs, mine)

        def rest() -> Tensor:
            for start, sent in own.values(bundle, 0, bundle.size):
                wanted[start : start + len(sent)] -= sent
            return wanted

        feedback.keep(bundle, rest)
        if qs:
            mean = yield Mean(sent.clone())
            qs = _like(qs, mean.to(wanted))
            for (piece, _), q in zip(low, qs, strict=True):
                self._q.put(piece.name, q.clone())
        return joined(qs, means[len(ps) :])

    def remembers(self) -> Mapping[str, Remembers]:
        """The Q of each matrix."""
        return {"q.": self._q}

    def _travelling(self, values: Tensor, parts: int = 1) -> Tensor:
        return values if self.dtype is None else narrowed(values, self.dtype, parts)

    def _pays(self, shape: torch.Size) -> bool:
        """Whether the factors of a tensor of this shape are smaller than that."""
        if len(shape) < 2 or shape.numel() == 0:
            return False
        n, m = shape[0], shape.numel() // shape[0]
        return (n + m) * self.rank < n * m

    def _last_q(self, piece: Piece, matrix: Tensor) -> Tensor:
        """Where the last step came to; anew if that is zeros, from which nothing comes."""
        q = self._q.get(piece.name)
        if q is None or q.shape != (matrix.shape[1], self.rank) or not q.any():
            return self._first_q(piece.name, matrix)
        return q.to(matrix)

    def _first_q(self, name: str, matrix: Tensor) -> Tensor:
        # Drawn on the CPU: the same on every part, whatever its device.
        cpu = torch.device("cpu")
        drawn = generator("powersgd", self.seed, name, device=cpu)
        return torch.randn(matrix.shape[1], self.rank, generator=drawn).to(matrix)


def _orthogonal(p: Tensor) -> Tensor:
    """An orthonormal basis of what the columns span; NaN, if they are not finite."""
    basis: Tensor = torch.linalg.qr(p).Q
    return basis


def _like(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """Flat memory as tensors of those shapes."""
    pieces = torch.split(flat, [one.numel() for one in tensors])
    return [piece.view_as(one) for piece, one in zip(pieces, tensors, strict=False)]
