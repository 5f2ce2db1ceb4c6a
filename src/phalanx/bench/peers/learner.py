"""`Learner`: a model that trains on this rank, whoever trains it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["Learner", "Plain"]


class Learner(ABC):
    """What a benchmark does with a model, besides training it.

    model   is called with this rank's samples
    """

    model: nn.Module

    def parameters(self) -> Iterable[nn.Parameter]:
        """Those that this rank's optimizer steps."""
        return self.model.parameters()

    @abstractmethod
    def remember(self) -> None:
        """Remember the parameters, for `rewind`. Every rank calls it."""

    @abstractmethod
    def rewind(self) -> None:
        """Make the parameters what they were. Every rank calls it."""

    @abstractmethod
    def whole(self) -> dict[str, Tensor]:
        """All parameters, by the names of the plain model. Every rank calls it."""


class Plain(Learner):
    """Every parameter is here: of a plain model, or one whose gradients are averaged.

    model   as it is called
    plain   the plain model, if that is another
    """

    def __init__(self, model: nn.Module, plain: nn.Module | None = None) -> None:
        self.model = model
        self._plain = model if plain is None else plain
        self._first: dict[str, Tensor] = {}

    def remember(self) -> None:
        """Copies them."""
        self._first = {name: value.clone() for name, value in self.whole().items()}

    def rewind(self) -> None:
        """Copies them back."""
        with torch.no_grad():
            for name, value in self.whole().items():
                value.copy_(self._first[name])

    def whole(self) -> dict[str, Tensor]:
        """They themselves."""
        return {name: value.detach() for name, value in self._plain.named_parameters()}
