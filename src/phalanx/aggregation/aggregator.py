"""`GradientAggregator`: gradients in, their average out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.errors import UnsupportedOperationError


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


def checked(gradients: Iterable[Tensor], who: str, backend: Backend | None = None) -> list[Tensor]:
    """The gradients as a list. TypeError unless it is one of tensors, and for several ranks
    `UnsupportedOperationError` unless they are dense.
    """
    rank = None if backend is None else backend.rank
    where = f"{who}.aggregate" if rank is None else f"rank {rank}: {who}.aggregate"
    if isinstance(gradients, Tensor):  # whose rows would be taken for gradients
        raise TypeError(f"{where} takes a list of gradients, not one tensor")
    if not isinstance(gradients, Iterable):
        raise TypeError(f"{where} takes a list of gradients, not a {type(gradients).__name__}")
    listed = list(gradients)
    for number, gradient in enumerate(listed):
        if not isinstance(gradient, Tensor):
            raise TypeError(
                f"{where}: gradient {number} is a {type(gradient).__name__}, not a tensor; "
                "leave out parameters without a gradient, or give zeros"
            )
        if rank is not None and (gradient.layout is not torch.strided or gradient.is_nested):
            raise UnsupportedOperationError(
                f"{where}: gradient {number} is {gradient.layout}; only dense gradients are "
                "averaged: pass sparse=False to the embedding, or give gradient.to_dense()",
                rank=rank,
                op="aggregate",
            )
    return listed
