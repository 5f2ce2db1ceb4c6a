"""What messages leave out stays in the parameters of the rank that would have sent it.

    d  =  t - t_i             how far this rank's parameters are from the copy t that all have
    q  =  its message         what the others hear of d
    t_i  <-  t' - (d - q)     beside the new copy t' by what they have not heard

So parameters are the memory of error feedback: nothing is lost, no state is added, and a rank goes
on from all that it has learnt itself (Xie et al. 2020, "CSER: Communication-efficient SGD with
Error Reset").
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from phalanx.compression import Compressor, ErrorFeedback
from phalanx.compression.bundle import Bundle
from phalanx.compression.compressor import wide
from phalanx.compression.exchange import Part


class Unsent:
    """A `Feedback` that keeps what is left out of one average until parameters are written."""

    def __init__(self) -> None:
        self._rests: dict[str, Tensor] = {}
        self._parts = 1

    def take(self, name: str) -> Tensor:
        """What has been left out of that parameter; it is forgotten."""
        return self._rests.pop(name)

    def recall(self, bundle: Bundle, part: Part) -> Tensor:
        """All of the bundle."""
        self._parts = part.parts
        return bundle.flat.to(wide(bundle.flat.dtype), copy=True)

    def keep(self, bundle: Bundle, rest: Callable[[], Tensor]) -> None:
        """This rank's to hold."""
        for piece, values in bundle.cut(rest()):
            self._rests[piece.name] = values

    def recall_owned(self, bundle: Bundle, start: int, mean: Tensor) -> Tensor:
        """The mean."""
        return mean.clone()

    def keep_owned(self, bundle: Bundle, start: int, rest: Callable[[], Tensor]) -> None:
        """Of a mean of p ranks p times as much is this rank's to hold."""
        left = rest()
        for piece in bundle.pieces:
            low, high = max(piece.start, start), min(piece.stop, start + len(left))
            if low < high:
                held = self._rests[piece.name].view(-1)[low - piece.start : high - piece.start]
                held.add_(left[low - start : high - start], alpha=self._parts)


def without_memory(compressor: Compressor) -> Compressor:
    """The compressor that error feedback would use, without the feedback."""
    if isinstance(compressor, ErrorFeedback):
        return compressor.inner
    return compressor.contraction()
