"""The backward pass: when each unit is gathered again, freed and reduced.

    ... | compute 1 | free 1, reduce 1 ......
          gather 0  | compute 0 | free 0, reduce 0
                                           the end: wait, and give

Hooks of what units have computed tell it where the pass is. Which units come next is known from the
forward pass; which of their parameters are used is not. A unit's pass is over when all its
gradients are in, or its inputs have theirs, or the pass comes to another one: whichever is first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from phalanx.backends.base import Backend
from phalanx.errors import MisuseError
from phalanx.parallel.fsdp.reduction import Reduction
from phalanx.parallel.fsdp.sites import Sites
from phalanx.parallel.fsdp.unit import Call, Unit
from phalanx.parallel.fsdp.writing import Writing
from phalanx.parallel.passes import keeps_graph


class Backward:
    """Of one FSDP on one rank.

    open   whether a backward pass is under way, or was cut short by an error
    """

    def __init__(
        self,
        units: Sequence[Unit],
        sites: Sites,
        writing: Writing,
        reduction: Reduction,
        backend: Backend,
    ) -> None:
        self.open = False
        self._units = units
        self._sites = sites
        self._writing = writing
        self._reduction = reduction
        self._backend = backend
        self._keeps_graph = False
        self._makes_graph = False  # of itself, which will read full parameters, too
        self._touched: dict[Unit, None] = {}  # those that it has come to, in order
        self._calls: list[Call] = []  # that it has come to

    def watch(self, call: Call, inputs: Any, outputs: Any) -> None:
        """See to it that the backward pass through this call is noticed.

        So it is where it comes to what was computed from a full parameter, too; but then views of
        parameters may have been read before.
        """
        call.unit.waiting.add(call)
        before = [
            t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor) and t.requires_grad
        ]
        attached = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.grad_fn]
        for number, output in enumerate(attached):
            output.register_hook(lambda _, n=number: self._enters(call, n))  # type: ignore[no-untyped-call]
        # A leaf would collect the hooks of all passes.
        if attached and before and not any(tensor.is_leaf for tensor in before):
            call.inputs = len(before)
            for tensor in before:
                tensor.register_hook(lambda _: self._leaves(call))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """One is under way."""
        if not self.open:
            self.open = True
            self._keeps_graph = keeps_graph()
            self._sites.show()  # for checkpoints, which are computed again
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    # Where it is ----------------------------------------------------------------------------

    def _enters(self, call: Call, output: int) -> None:
        """The gradient of an output of a unit is there."""
        if output in call.spent:
            self._refuse(
                f"a second backward pass through one forward pass of {call.unit.title}: its graph "
                "is gone. Pass retain_graph=True to the first one, or run forward again"
            )
        self.reaches(call)
        call.through.add(output)

    def reaches(self, call: Call) -> None:
        """The backward pass of a unit comes next."""
        unit = call.unit
        if call.epoch != self._writing.epoch:
            self._refuse(
                f"backward through {unit.title}, whose parameters were written after its forward "
                "pass (an optimizer's step, load_state_dict): run forward again"
            )
        self.begin()
        self._makes_graph = torch.is_grad_enabled()
        if call in unit.reached:
            return
        if call.outer is not None:  # first, on all ranks, whose last computation it may be or not
            self.reaches(call.outer)
        self._calls.append(call)
        unit.waiting.discard(call)
        self._touch(unit)
        unit.reached.add(call)
        self._finish_others(unit)
        unit.gather()
        for earlier in call.earlier:
            earlier.begin_gather()

    def _touch(self, unit: Unit) -> None:
        unit.begin_backward()
        self._touched[unit] = None

    def _finish_others(self, unit: Unit) -> None:
        """The pass comes to a unit: those before are over, though they had not all gradients.

        Ranks on which a parameter was not used so keep the order of those on which it was.
        """
        for other in self._touched:
            apart = not (other is unit or other.is_around(unit) or unit.is_around(other))
            if apart and not (other.surrounds or other.waiting or other.finished):
                self._finish(other)

    def gradient_came(self, unit: Unit, flat: int, number: int) -> None:
        """A full parameter's gradient is complete."""
        self.begin()
        self._touch(unit)
        if self._reduction.synchronize:
            unit.put(flat, number)
        else:
            self._reduction.accumulated = True
        if unit.count() and not unit.surrounds:
            self._finish(unit)

    def _leaves(self, call: Call) -> None:
        """The gradient of an input of a unit is there."""
        call.inputs -= 1
        unit = call.unit
        if call.inputs or call not in unit.reached:
            return
        unit.reached.discard(call)
        if not unit.reached:  # all that will come has come; the rest was not used
            if self._reduction.synchronize and unit.owes:
                self._reduction.begin(unit)
            self._free(unit)

    # What is over ---------------------------------------------------------------------------

    def _finish(self, unit: Unit) -> None:
        """No gradients come for it any more."""
        unit.finished = True
        if self._reduction.synchronize:
            self._reduction.begin(unit)
        if not unit.has_frozen:
            self._free(unit)

    def _free(self, unit: Unit) -> None:
        """After its backward pass, unless another one is to go through that."""
        if not self._makes_graph:
            unit.free()

    def _end(self) -> None:
        for call in self._calls:
            if self._keeps_graph:
                call.unit.waiting.add(call)
            else:
                call.spent |= call.through
            call.through.clear()
        if self._reduction.synchronize:
            last = sorted(self._touched, key=lambda unit: unit.surrounds)
            self._reduction.finish([unit for unit in (*last, *self._units) if unit.owes])
        self._close()

    def forget(self) -> None:
        """It failed: nothing of it counts."""
        self._reduction.forget()
        self._close()

    def _close(self) -> None:
        self.open = False
        self._calls = []
        self._touched = {}
        self._sites.hide()
        for unit in self._units:
            unit.end_backward()
            self._free(unit)
        self._makes_graph = False

    def _refuse(self, problem: str) -> NoReturn:
        rank = self._backend.rank
        raise MisuseError(f"rank {rank}: FSDP: {problem}", rank=rank, op="FSDP")
