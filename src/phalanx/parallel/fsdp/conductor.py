"""The conductor: says when each unit is gathered and freed; here in forward passes.

    forward             gather 0 | compute 0 | free 0
                          gather 1 ......... | compute 1 | free 1
                                               gather 2  ....
    backward            (backward.py) | compute 1 | free 1, reduce 1 ......      (reduction.py)
                                        gather 0  | compute 0 | free 0, reduce 0

Hooks of the model's modules tell it where a pass is. What comes next is guessed from the last
forward pass; a wrong guess costs time only. All ranks run the same model, and so do all this in
the same order. One that does not is told so by the collectives, whose labels name the unit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from phalanx.backends.base import Backend
from phalanx.compression import Compressor
from phalanx.parallel.fsdp.backward import Backward
from phalanx.parallel.fsdp.reduction import Reduction
from phalanx.parallel.fsdp.sites import Sites
from phalanx.parallel.fsdp.unit import Call, Unit
from phalanx.parallel.fsdp.writing import Writing
from phalanx.parallel.passes import inside_backward


class _Open(NamedTuple):
    """A unit's forward pass that is under way, and what error was being handled when it began."""

    call: Call
    error: BaseException | None


class Conductor:
    """Of one FSDP on one rank.

    reduction       of its gradients
    backward        its backward passes
    forwards        how many forward passes there were
    looked_ahead    whether units were gathered for a forward pass that has not come
    """

    def __init__(
        self,
        units: Sequence[Unit],
        sites: Sites,
        writing: Writing,
        backend: Backend,
        prefetch: int,
        compressor: Compressor | None = None,
    ) -> None:
        self.reduction = Reduction(units, backend, compressor)
        self.backward = Backward(units, sites, writing, self.reduction, backend)
        self.forwards = 0
        self.looked_ahead = False
        self._units = units
        self._sites = sites
        self._writing = writing
        self._prefetch = prefetch
        self._order: list[Unit] = list(units)  # of the last forward pass; before it, a guess
        self._seen: list[Unit] = []  # in the one under way, or over
        self._inside: list[_Open] = []  # units' forward passes inside each other

    # A forward pass -------------------------------------------------------------------------

    def begin_forward(self, unit: Unit) -> None:
        """A unit's module is about to compute."""
        again = inside_backward()  # a checkpoint is computed again
        if again:
            self.backward.begin()
        elif not self._inside:
            self._begin_pass()
        if again:
            place = len(self._seen) - self._seen[::-1].index(unit) if unit in self._seen else 0
        else:
            self._seen.append(unit)
            place = len(self._seen)
        earlier = self._seen[max(place - 1 - self._prefetch, 0) : max(place - 1, 0)][::-1]
        outer = self._inside[-1].call if self._inside else None
        call = Call(unit, self._writing.epoch, earlier, outer)
        self._inside.append(_Open(call, sys.exc_info()[1]))
        unit.gather()
        unit.presence.reached = lambda: self.backward.reaches(call)
        if not again:
            self._look_ahead(self._order[place : place + self._prefetch])

    def _begin_pass(self) -> None:
        if self.backward.open:
            self.backward.forget()
        self._writing.settle()
        self._sites.show()
        self._seen = []
        self.forwards += 1
        self.looked_ahead = False
        if not self.reduction.synchronize and torch.is_grad_enabled():
            self.reduction.accumulated = True  # on all ranks, whatever has gradients on this one

    def end_forward(self, unit: Unit, inputs: Any, outputs: Any) -> None:
        """It has computed, or failed."""
        while self._inside and self._inside[-1].call.unit is not unit:
            self._inside.pop()
        if not self._inside:
            return
        call, error = self._inside.pop()
        failed = sys.exc_info()[1] is not error
        if not failed and torch.is_grad_enabled():
            self.backward.watch(call, inputs, outputs)
        if inside_backward():
            return  # a checkpoint is computed again, and its backward pass comes at once
        if not failed:
            unit.free()
        if not self._inside:
            self._sites.hide()
            if not failed:
                self._order = self._seen
                self.free()

    def abandon_forward(self) -> None:
        """It was left by an error, of which torch tells no hooks if it is an interrupt."""
        if self._inside and not inside_backward():
            self._inside = []
            self._sites.hide()

    # Between passes -------------------------------------------------------------------------

    def free(self) -> None:
        """Free what is there, what was gathered in vain, too."""
        for unit in self._units:
            unit.free()

    def bring_up_to_date(self) -> None:
        """Gather what was written, and stays. Blocks."""
        self._writing.settle()
        for unit in self._units:
            unit.begin_gather()
        for unit in self._units:
            unit.gather()

    def look_at_first(self) -> None:
        """Begin to gather what the next forward pass begins with."""
        self._writing.settle()
        self.looked_ahead = True
        self._look_ahead(self._order[: 1 + self._prefetch])

    def _look_ahead(self, units: Sequence[Unit]) -> None:
        for unit in units:
            unit.begin_gather()
