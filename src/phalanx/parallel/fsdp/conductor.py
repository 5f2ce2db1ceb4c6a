"""The conductor: says when each unit is gathered, freed and reduced.

    forward             gather 0 | compute 0 | free 0
                          gather 1 ......... | compute 1 | free 1
                                               gather 2  ....
    backward    ... | compute 1 | free 1, reduce 1 ......
                      gather 0  | compute 0 | free 0, reduce 0
                                                       the end: wait, and give

Hooks of the model's modules tell it where a pass is. What comes next is guessed from the last
forward pass; a wrong guess costs time only. All ranks run the same model, and so do all this in
the same order. One that does not is told so by the collectives, whose labels name the unit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from phalanx.backends.base import Backend
from phalanx.collectives import ReduceOp
from phalanx.collectives.run import start
from phalanx.collectives.task import in_place
from phalanx.errors import MisuseError
from phalanx.parallel.fsdp.sites import Sites
from phalanx.parallel.fsdp.unit import Call, Unit
from phalanx.parallel.fsdp.writing import Writing
from phalanx.parallel.passes import inside_backward, keeps_graph


class _Open(NamedTuple):
    """A unit's forward pass that is under way, and what error was being handled when it began."""

    call: Call
    error: BaseException | None


class Conductor:
    """Of one FSDP on one rank.

    synchronize     whether backward passes reduce; if not, full gradients add up on this rank
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
    ) -> None:
        self.synchronize = True
        self.forwards = 0
        self.looked_ahead = False
        self._units = units
        self._sites = sites
        self._writing = writing
        self._backend = backend
        self._prefetch = prefetch
        self._order: list[Unit] = list(units)  # of the last forward pass; before it, a guess
        self._seen: list[Unit] = []  # in the one under way, or over
        self._inside: list[_Open] = []  # units' forward passes inside each other
        self._open = False  # a backward pass is under way
        self._keeps_graph = False
        self._makes_graph = False  # of itself, which will read full parameters, too
        self._touched: dict[Unit, None] = {}  # those that it has come to, in order
        self._calls: list[Call] = []  # that it has come to
        self._reducing: Unit | None = None
        self._accumulated = False  # gradients that were not reduced

    # Forward --------------------------------------------------------------------------------

    def begin_forward(self, unit: Unit) -> None:
        """A unit's module is about to compute."""
        again = inside_backward()  # a checkpoint is computed again
        if again:
            self._begin_backward()
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
        unit.presence.reached = lambda: self._backward_reaches(call)
        if not again:
            self._look_ahead(self._order[place : place + self._prefetch])

    def _begin_pass(self) -> None:
        if self._open:
            self._forget()
        self._writing.settle()
        self._sites.show()
        self._seen = []
        self.forwards += 1
        self.looked_ahead = False
        if not self.synchronize and torch.is_grad_enabled():
            self._accumulated = True  # on all ranks, whatever of it has gradients on this one

    def end_forward(self, unit: Unit, inputs: Any, outputs: Any) -> None:
        """It has computed, or failed."""
        while self._inside and self._inside[-1].call.unit is not unit:
            self._inside.pop()
        if not self._inside:
            return
        call, error = self._inside.pop()
        failed = sys.exc_info()[1] is not error
        if not failed and torch.is_grad_enabled():
            self._watch(call, inputs, outputs)
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
        for unit in self._order[: 1 + self._prefetch]:
            unit.begin_gather()

    def _look_ahead(self, units: Sequence[Unit]) -> None:
        for unit in units:
            unit.begin_gather()

    def _watch(self, call: Call, inputs: Any, outputs: Any) -> None:
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
            output.register_hook(lambda _, n=number: self._backward_enters(call, n))  # type: ignore[no-untyped-call]
        # A leaf would collect the hooks of all passes.
        if attached and before and not any(tensor.is_leaf for tensor in before):
            call.inputs = len(before)
            for tensor in before:
                tensor.register_hook(lambda _: self._backward_leaves(call))  # type: ignore[no-untyped-call]

    # Backward -------------------------------------------------------------------------------

    def _backward_enters(self, call: Call, output: int) -> None:
        """The gradient of an output of a unit is there."""
        if output in call.spent:
            self._refuse(
                f"a second backward pass through one forward pass of {call.unit.title}: its graph "
                "is gone. Pass retain_graph=True to the first one, or run forward again"
            )
        self._backward_reaches(call)
        call.through.add(output)

    def _backward_reaches(self, call: Call) -> None:
        """The backward pass of a unit comes next."""
        unit = call.unit
        if call.epoch != self._writing.epoch:
            self._refuse(
                f"backward through {unit.title}, whose parameters were written after its forward "
                "pass (an optimizer's step, load_state_dict): run forward again"
            )
        self._begin_backward()
        self._makes_graph = torch.is_grad_enabled()
        if call in unit.reached:
            return
        if call.outer is not None:  # first, on all ranks, whose last computation it may be or not
            self._backward_reaches(call.outer)
        self._calls.append(call)
        unit.waiting.discard(call)
        self._touch(unit)
        unit.reached.add(call)
        self._finish_others(unit)
        unit.gather()
        self._look_ahead(call.earlier)

    def _begin_backward(self) -> None:
        if not self._open:
            self._open = True
            self._keeps_graph = keeps_graph()
            self._sites.show()  # for checkpoints, which are computed again
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

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
        self._begin_backward()
        self._touch(unit)
        if self.synchronize:
            unit.put(flat, number)
        else:
            self._accumulated = True
        if unit.count() and not unit.surrounds:
            self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        """No gradients come for it any more."""
        unit.finished = True
        if self.synchronize:
            self._reduce(unit)
        if not unit.has_frozen:
            self._free(unit)

    def _backward_leaves(self, call: Call) -> None:
        """The gradient of an input of a unit is there."""
        call.inputs -= 1
        unit = call.unit
        if call.inputs or call not in unit.reached:
            return
        unit.reached.discard(call)
        if not unit.reached:  # all that will come has come; the rest was not used
            if self.synchronize and unit.owes:
                self._reduce(unit)
            self._free(unit)

    def _free(self, unit: Unit) -> None:
        """After its backward pass, unless another one is to go through that."""
        if not self._makes_graph:
            unit.free()

    def _reduce(self, unit: Unit) -> None:
        """One at a time: full gradients take memory until they are reduced."""
        if self._reducing is not None:
            self._reducing.finish_scattering()
        unit.reduce()
        self._reducing = unit

    def _end_backward(self) -> None:
        for call in self._calls:
            if self._keeps_graph:
                call.unit.waiting.add(call)
            else:
                call.spent |= call.through
            call.through.clear()
        if self.synchronize:
            last = sorted(self._touched, key=lambda unit: unit.surrounds)
            self._reduce_rest([unit for unit in (*last, *self._units) if unit.owes])
        self._close()

    def reduce_accumulated(self) -> None:
        """Reduce what was accumulated and not reduced since, if anything."""
        if self._accumulated:
            self._reduce_rest(self._units)

    def drop_accumulated(self) -> None:
        """Forget what was accumulated and not reduced."""
        self._accumulated = False
        for unit in self._units:
            unit.drop_accumulated()

    @torch.no_grad()
    def _reduce_rest(self, units: Iterable[Unit]) -> None:
        """What is left of this pass and earlier ones; then means become the gradients."""
        for unit in dict.fromkeys(units):
            self._reduce(unit)
        used = [flag for unit in self._units for flag in unit.used()]
        flags = torch.tensor(used, dtype=torch.uint8)
        for unit in self._units:
            unit.finish()
        self._reducing = None
        if len(flags):
            task = in_place("all_reduce", flags, op=ReduceOp.MAX)
            start(task, self._backend, label="which parameters were used").wait()
        anywhere = [bool(flag) for flag in flags.tolist()]
        first = 0
        for unit in self._units:
            last = first + sum(len(flat.parameters) for flat in unit.flats)
            unit.give(anywhere[first:last])
            first = last
        self._accumulated = False

    def _close(self) -> None:
        self._open = False
        self._calls = []
        self._touched = {}
        self._sites.hide()
        for unit in self._units:
            unit.end_backward()
            self._free(unit)
        self._makes_graph = False

    # When something went wrong --------------------------------------------------------------

    def _forget(self) -> None:
        """A backward pass failed: nothing of it counts."""
        self._reducing = None
        for unit in self._units:
            unit.forget()
        self._close()

    def _refuse(self, problem: str) -> NoReturn:
        rank = self._backend.rank
        raise MisuseError(f"rank {rank}: FSDP: {problem}", rank=rank, op="FSDP")
