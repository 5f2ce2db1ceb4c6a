"""DiLoCo's meeting: how far all ranks have come, on average, is a gradient.

    inner   a step of each rank's optimizer, every time    t  ->  t_i
    outer   mean of (t - t_i)  ->  the outer optimizer     t  ->  t'      t_i <- t'

(Douillard et al. 2023; without momentum and with rate 1, t' is the mean of t_i.) With `Unsent`, t_i
becomes t' and what rank i has not told the others (unsent.py).
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
from phalanx.compression.feedback import FORGET
from phalanx.errors import MisuseError
from phalanx.parallel.agreement import check_agreement, describe_with_values
from phalanx.parallel.averaging import AllReduced, Averaging, Compressed
from phalanx.parallel.local.flats import all_finite, averaged, not_finite_on
from phalanx.parallel.local.meeting import in_words
from phalanx.parallel.local.outer_state import load_outer, outer_state
from phalanx.parallel.local.unsent import Unsent

log = logging.getLogger("phalanx")

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class OuterStep:
    """A step of an optimizer of its own, on copies of the parameters that all ranks have alike.

    optimizer   the outer one
    skipped     how many steps were not taken, since their gradient was not finite
    who         is it that takes them, in errors
    unsent      keeps what messages leave out, if parameters are to
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        backend: Backend,
        make: MakeOptimizer,
        compression: Compressor | None,
        *,
        who: str,
        unsent: Unsent | None = None,
    ) -> None:
        self.skipped = 0
        self.alike = True
        self._who = who
        self._unsent = unsent
        self.compression = compression
        self._trained = trained
        self._backend = backend
        self._copies = {
            name: nn.Parameter(parameter.detach().clone()) for name, parameter in trained.items()
        }
        self._copy_of = {trained[name]: copy for name, copy in self._copies.items()}
        self.optimizer = make(list(self._copies.values()))
        self._check_optimizer()
        self._plain = AllReduced(backend)
        self._averaging: Averaging = self._plain
        if compression is not None:
            names = {parameter: name for name, parameter in trained.items()}
            self._averaging = Compressed(compression, names, backend, feedback=unsent or FORGET)

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
                    f"rank {self._backend.rank}: {self._who}: the outer optimizer leaves out "
                    f"{name}, which would stay as it is: give it all parameters that it is called "
                    "with",
                    rank=self._backend.rank,
                    op=self._who,
                )

    @property
    def bytes_sent(self) -> int:
        """Of outer gradients."""
        whole = self._plain.bytes_sent if self._plain is not self._averaging else 0
        return self._averaging.bytes_sent + whole

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the parameters. Later only outer steps change the copies, so that whatever becomes
        of a rank's parameters they stay the same on all ranks.
        """
        for name, parameter in self._trained.items():
            self._copies[name].copy_(parameter)

    @torch.no_grad()
    def meet(self, label: str, *, whole: bool = False) -> None:
        """Average the outer gradients, step, and copy; or without a step, if they are not finite:
        then all are as they were when the period began.

        Raises `DesyncError` if the copies are not the same on all ranks: their hashes are compared,
        in a message of 16 bytes.
        """
        if self._unsent is not None and self._backend.world_size == 1:
            return

        def put(place: Tensor, parameter: Tensor) -> None:
            torch.sub(self._copy_of[parameter], parameter, out=place)  # type: ignore[index]

        unsent = None if whole else self._unsent
        averaging = self._plain if whole and self._unsent is not None else self._averaging
        flats = averaged(self._trained.values(), averaging, self._backend, label=label, put=put)
        self._check_copies()
        finite = all_finite(flats)
        if finite:
            for flat in flats:
                for parameter, gradient in flat.views():
                    self._copy_of[parameter].grad = gradient  # type: ignore[index]
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self._tell_skipped()
        for name, parameter in self._trained.items():
            parameter.copy_(self._copies[name])
            if unsent is not None:
                rest = unsent.take(name)
                if finite:
                    parameter.sub_(rest)
        self.alike = unsent is None or not finite

    def _check_copies(self) -> None:
        check_agreement(
            [describe_with_values(name, copy) for name, copy in self._copies.items()],
            self._backend,
            op=f"{self._who}, parameters as they were when the ranks last met",
            remedy="Load the same state on every rank: that of a checkpoint, or one that was taken "
            "right after sync()",
        )

    def _tell_skipped(self) -> None:
        self.skipped += 1
        log.warning(
            "rank %d: %s: %s is skipped on every rank, and parameters are those of the one "
            "before: they were not finite: %s. That rank's own optimizer may keep what is not "
            "finite: give it a new one",
            self._backend.rank,
            self._who,
            "an outer step" if self._unsent is None else "a meeting",
            in_words(not_finite_on(self._trained, self._backend)),
        )

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
