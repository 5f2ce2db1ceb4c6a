"""DiLoCo's meeting: how far all ranks have come, on average, is a gradient.

    inner   a step of each rank's optimizer, every time    t  ->  t_i
    outer   mean of (t - t_i)  ->  the outer optimizer     t  ->  t'      t_i <- t'

(Douillard et al. 2023; without momentum and with rate 1, t' is the mean of t_i.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.aggregation.saved import load_own, own_state
from phalanx.backends.base import Backend
from phalanx.compression import Compressor
from phalanx.errors import MisuseError
from phalanx.parallel.agreement import check_agreement, describe_with_values
from phalanx.parallel.averaging import AllReduced, Averaging, Compressed
from phalanx.parallel.local.flats import all_finite, averaged, not_finite_on
from phalanx.parallel.local.meeting import in_words
from phalanx.parallel.local.outer_state import load_outer, outer_state

log = logging.getLogger("phalanx")

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class OuterStep:
    """A step of an optimizer of its own, on copies of the parameters that all ranks have alike.

    optimizer   the outer one
    skipped     how many steps were not taken, since their gradient was not finite
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        backend: Backend,
        make: MakeOptimizer,
        compression: Compressor | None,
    ) -> None:
        self.skipped = 0
        self.compression = compression
        self._trained = trained
        self._backend = backend
        self._copies = {
            name: nn.Parameter(parameter.detach().clone()) for name, parameter in trained.items()
        }
        self._copy_of = {trained[name]: copy for name, copy in self._copies.items()}
        self.optimizer = make(list(self._copies.values()))
        self._check_optimizer()
        self._averaging: Averaging = AllReduced(backend)
        if compression is not None:
            names = {parameter: name for name, parameter in trained.items()}
            self._averaging = Compressed(compression, names, backend)

    def _check_optimizer(self) -> None:
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                "DiLoCo(outer=) makes a torch optimizer of a list of parameters, such as "
                f"lambda params: torch.optim.SGD(params, lr=0.7), not {self.optimizer!r}"
            )
        given = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for name, copy in self._copies.items():
            if id(copy) not in given:
                raise MisuseError(
                    f"rank {self._backend.rank}: DiLoCo: the outer optimizer leaves out {name}, "
                    "which would stay as it is: give it all parameters that it is called with",
                    rank=self._backend.rank,
                    op="DiLoCo",
                )

    @property
    def bytes_sent(self) -> int:
        """Of outer gradients."""
        return self._averaging.bytes_sent

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the parameters. Later only outer steps change the copies, so that whatever becomes
        of a rank's parameters they stay the same on all ranks.
        """
        for name, parameter in self._trained.items():
            self._copies[name].copy_(parameter)

    @torch.no_grad()
    def meet(self, label: str) -> None:
        """Average the outer gradients, step, and copy; or without a step, if they are not finite:
        then all are as they were when the period began.

        Raises `DesyncError` if the copies are not the same on all ranks: their hashes are compared,
        in a message of 16 bytes.
        """

        def put(place: Tensor, parameter: Tensor) -> None:
            torch.sub(self._copy_of[parameter], parameter, out=place)  # type: ignore[index]

        trained = self._trained.values()
        flats = averaged(trained, self._averaging, self._backend, label=label, put=put)
        check_agreement(
            [describe_with_values(name, copy) for name, copy in self._copies.items()],
            self._backend,
            op="DiLoCo, parameters as they were when the ranks last met",
            remedy="Load the same state on every rank: that of a checkpoint, or one that was taken "
            "right after sync()",
        )
        if all_finite(flats):
            for flat in flats:
                for parameter, gradient in flat.views():
                    self._copy_of[parameter].grad = gradient  # type: ignore[index]
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.skipped += 1
            log.warning(
                "rank %d: DiLoCo: an outer step is skipped on every rank, and parameters are those "
                "of the one before: they were not finite: %s. That rank's own optimizer may keep "
                "what is not finite: give it a new one",
                self._backend.rank,
                in_words(not_finite_on(self._trained, self._backend)),
            )
        for name, parameter in self._trained.items():
            parameter.copy_(self._copies[name])

    def own_state(self, *, apart: bool) -> dict[str, Tensor]:
        """The outer optimizer's, the copies while they are needed, and the compressor's."""
        copies = self._copies if apart else {}
        state = outer_state(copies, self._copies, self.optimizer)
        return state | (own_state(self.compression, self._backend) if self.compression else {})

    @torch.no_grad()
    def load_own_state(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Go on from there; the copies, if they are in it."""
        sizes = {name: parameter.numel() for name, parameter in self._trained.items()}
        load_own(self.compression, state, self._backend, sizes_of=sizes)
        return load_outer(state, self._copies, self.optimizer, self._backend)
