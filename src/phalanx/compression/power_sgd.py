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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.compression.bundle import Bundle, Piece
from phalanx.compression.compressor import Compressor, check_floating, narrowed, wide
from phalanx.compression.draws import generator
from phalanx.compression.exchange import Mean, Part, Rounds
from phalanx.compression.feedback import FORGET, Feedback
from phalanx.compression.memory import Memory, Remembers


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


class PowerSGD(Compressor):
    """Matrices as products of two narrow ones.

    rank   of the products: a matrix of n x m is sent as (n + m) * rank values
    dtype  in which they travel: float32 (None; float64 for that), or half as many bytes as
           `torch.bfloat16` or `torch.float16`
    seed   of the first Q, the same on every part

    Vectors, and matrices that would not become smaller, are sent as they are; so at full rank it is
    exact, if `dtype` is. All matrices of a bundle go in two all-reduces. Parts compute P from the
    same numbers: where their processors round alike the results are the same bits.
    """

    def __init__(self, rank: int, *, dtype: torch.dtype | None = None, seed: int = 0) -> None:
        if rank < 1:
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
        wanted = feedback.recall(bundle, part)
        wanted = wanted.to(wide(wanted.dtype))
        low = [(i, m.flatten(1)) for i, m in bundle.cut(wanted) if self._pays(i.shape)]
        small = {piece.name for piece, _ in low}
        whole = [values.flatten() for i, values in bundle.cut(wanted) if i.name not in small]

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

        def rest() -> Tensor:
            for piece, sent in _each(bundle, small, ps, qs, mine):
                wanted[piece.start : piece.stop].sub_(sent)
            return wanted

        feedback.keep(bundle, rest)
        found = qs
        if qs:
            mean = yield Mean(sent.clone())
            found = _like(qs, mean.to(wanted))
            for (piece, _), q in zip(low, found, strict=True):
                self._q.put(piece.name, q.clone())
        for piece, average in _each(bundle, small, ps, found, means[len(ps) :]):
            bundle.flat[piece.start : piece.stop].copy_(average)

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


def _each(
    bundle: Bundle,
    small: set[str],
    ps: Sequence[Tensor],
    qs: Sequence[Tensor],
    whole: Sequence[Tensor],
) -> Iterator[tuple[Piece, Tensor]]:
    """Each gradient's place, and its values: the product of its factors, if it is in `small`; else
    as it was sent. One at a time, so that what is multiplied stays in the caches.
    """
    products, others = zip(ps, qs, strict=True), iter(whole)
    for piece in bundle.pieces:
        if piece.name in small:
            p, q = next(products)
            yield piece, (p @ q.T).flatten()
        else:
            yield piece, next(others)
