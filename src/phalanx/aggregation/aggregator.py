"""`GradientAggregator`: gradients in, their average out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor

from phalanx.backends.base import Backend


class GradientAggregator(ABC):
    """Averages gradients over ranks. One method: to write another one, write `aggregate`.

    backend   the ranks; None if there is one only
    steps     how many training steps it has been used for (`distributed_train_step` counts them)
    """

    backend: Backend | None = None
    steps: int = 0

    @abstractmethod
    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The average of each of some gradients over all ranks.

        gradients   any number, of any shapes and dtypes; alike on every rank, in the same order;
                    not changed

        Blocks until this rank has the averages, of the same shapes and dtypes: the same bits on
        every rank.
        """


class LocalAggregator(GradientAggregator):
    """Of one rank: the average is the gradient. Tensors are given back as they are, not copied."""

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients themselves, in a new list."""
        return checked(gradients, "LocalAggregator")


def checked(gradients: Iterable[Tensor], who: str) -> list[Tensor]:
    """The gradients as a list. TypeError unless it is one of tensors."""
    if isinstance(gradients, Tensor):  # whose rows would be taken for gradients
        raise TypeError(f"{who}.aggregate takes a list of gradients, not one tensor")
    listed = list(gradients)
    for number, gradient in enumerate(listed):
        if not isinstance(gradient, Tensor):
            raise TypeError(
                f"{who}.aggregate: gradient {number} is a {type(gradient).__name__}, not a tensor; "
                "leave out parameters without a gradient, or give zeros"
            )
    return listed
