"""How ranks that have taken steps of their own come to the same parameters: by their mean.

begin   parameters are alike, and not by a meeting: they have been made or loaded
meet    a period is over
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from phalanx.backends.base import Backend
from phalanx.parallel.averaging import AllReduced
from phalanx.parallel.local.flats import all_finite, averaged, not_finite_on

log = logging.getLogger("phalanx")


class Meeting(Protocol):
    """Brings the ranks' parameters together.

    alike   whether they are the same on all ranks since the last one
    """

    alike: bool

    @property
    def bytes_sent(self) -> int:
        """By this rank so far, as rings and direct messages send them."""

    def begin(self) -> None:
        """The ranks have the same parameters, from which the next period begins."""

    def meet(self, label: str, *, whole: bool) -> None:
        """Overwrite this rank's parameters; blocks until all ranks have come.

        whole   leave nothing out, so that parameters are the same on all ranks
        """

    def own_state(self, *, apart: bool) -> dict[str, Tensor]:
        """What goes on from here needs; by keys that say whose it is (saved.py).

        apart   whether a period is under way
        """

    def load_own_state(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Go on from there. Returns the parameters that the ranks had when the period began, by
        name, if it was under way and it knows them.
        """


class MeanOfParameters:
    """Everybody takes the mean of all (Stich 2019)."""

    def __init__(self, trained: Mapping[str, nn.Parameter], backend: Backend) -> None:
        self._trained = trained
        self._backend = backend
        self._averaging = AllReduced(backend)
        self.alike = True

    @property
    def bytes_sent(self) -> int:
        """2(p-1)/p of the parameters' bytes for each mean."""
        return self._averaging.bytes_sent

    def begin(self) -> None:
        """Nothing is kept of it."""

    @torch.no_grad()
    def meet(self, label: str, *, whole: bool = True) -> None:
        """One all-reduce."""
        if self._backend.world_size == 1:
            return
        trained = self._trained.values()
        flats = averaged(trained, self._averaging, self._backend, label=label)
        if not all_finite(flats):
            log.warning(
                "rank %d: LocalSGD: parameters are not finite, and by their mean on no rank any "
                "more: %s. Go back to a checkpoint",
                self._backend.rank,
                in_words(not_finite_on(self._trained, self._backend)),
            )
        for flat in flats:
            for parameter, mean in flat.views():
                parameter.copy_(mean)

    def own_state(self, *, apart: bool) -> dict[str, Tensor]:
        """None."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """None."""
        return {}


def in_words(found: Mapping[int, str]) -> str:
    """For each rank the first parameter that is not finite, for a message."""
    if not found:
        return "on each rank all are, but not their mean"
    return ", ".join(f"{name} on rank {rank}" for rank, name in found.items())
