"""`Feedback`: who keeps what a compressor leaves out, so that it can be sent later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from phalanx.compression.bundle import Bundle
from phalanx.compression.exchange import Part


class Feedback(Protocol):
    """Asked before anything is left out, told afterwards what was.

    A quantized average leaves out twice: each part of its own gradients; and the part that has
    summed a slice, its owner, of that mean.
    """

    def recall(self, bundle: Bundle, part: Part) -> Tensor:
        """What is to be sent of the bundle: flat, float32 or wider; `rest` alone may write it."""

    def keep(self, bundle: Bundle, rest: Callable[[], Tensor]) -> None:
        """`rest()` of that was left out: flat, as long as the bundle. It may be computed in the
        memory that `recall` gave, which nobody reads afterwards.
        """

    def recall_owned(self, bundle: Bundle, start: int, mean: Tensor) -> Tensor:
        """What is to be sent of a mean whose owner this part is: elements `start` and on."""

    def keep_owned(self, bundle: Bundle, start: int, rest: Callable[[], Tensor]) -> None:
        """`rest()` of that was left out."""


class _Forget:
    """Keeps nothing, and so computes nothing."""

    def recall(self, bundle: Bundle, part: Part) -> Tensor:
        return bundle.flat

    def keep(self, bundle: Bundle, rest: Callable[[], Tensor]) -> None:
        pass

    def recall_owned(self, bundle: Bundle, start: int, mean: Tensor) -> Tensor:
        return mean

    def keep_owned(self, bundle: Bundle, start: int, rest: Callable[[], Tensor]) -> None:
        pass


FORGET: Feedback = _Forget()
"""No feedback: what is left out is lost."""
