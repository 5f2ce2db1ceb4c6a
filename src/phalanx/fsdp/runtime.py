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
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from phalanx.collectives import ReduceOp
from phalanx.collectives.request import in_place
from phalanx.collectives.resolve import start
from phalanx.compression import Compressor
from phalanx.core.backend import Backend
from phalanx.errors import MisuseError
from phalanx.fsdp.parameter_group import Call, Sites, Unit
from phalanx.fsdp.write_epoch import Writing
from phalanx.parallel.reducer import inside_backward, keeps_graph


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


# ------------------------------------------------------------------------------
# The backward pass: when each unit is gathered again, freed and reduced.
#
#     ... | compute 1 | free 1, reduce 1 ......
#           gather 0  | compute 0 | free 0, reduce 0
#                                            the end: wait, and give
#
# Hooks of what units have computed tell it where the pass is. Which units come next is known from
# the forward pass; which of their parameters are used is not. A unit's pass is over when all its
# gradients are in, or its inputs have theirs, or the pass comes to another one: whichever is first.


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


# ------------------------------------------------------------------------------
# The reduction: gradients of units become means of shards, one unit at a time.
#
#     backward    ... | compute 1 | reduce 1 .......... | wait
#                                   compute 0 ......... | reduce 0 ....
#                                                                  the end: wait, agree on what was
#                                                                  used, and give
#
# Full gradients take memory until they are reduced, so no more than one unit's are on their way.


class Reduction:
    """Of one FSDP on one rank.

    synchronize   whether backward passes reduce; if not, full gradients add up on this rank
    accumulated   whether there may be gradients, on some rank, that were not reduced

    What a compressor remembers counts when all means of a pass are finite, on all ranks.
    """

    def __init__(
        self, units: Sequence[Unit], backend: Backend, compressor: Compressor | None = None
    ) -> None:
        self.synchronize = True
        self.accumulated = False
        self._units = units
        self._backend = backend
        self._compressor = compressor
        self._under_way: Unit | None = None

    def begin(self, unit: Unit) -> None:
        """A unit has its gradients: reduce them, when those of the one before are on this rank."""
        if self._under_way is not None:
            self._under_way.finish_scattering()
        unit.reduce()
        self._under_way = unit

    @torch.no_grad()
    def finish(self, units: Iterable[Unit]) -> None:
        """Reduce what is left, of these units; then means of all become the gradients."""
        try:
            anywhere = self._averaged(units)
        except BaseException:
            if self._compressor is not None:
                self._compressor.rollback()
            raise
        if self._compressor is not None:
            infinite = anywhere.pop()
            (self._compressor.rollback if infinite else self._compressor.commit)()
        first = 0
        for unit in self._units:
            last = first + sum(len(flat.parameters) for flat in unit.flats)
            unit.give(anywhere[first:last])
            first = last
        self.accumulated = False

    def _averaged(self, units: Iterable[Unit]) -> list[bool]:
        """Wait for all means. Which parameters have one, on any rank, in the order of the units;
        with a compressor also whether some mean, of any rank's, is not finite.
        """
        for unit in dict.fromkeys(units):
            self.begin(unit)
        for unit in self._units:
            unit.finish()
        self._under_way = None
        mine = [came for unit in self._units for came in unit.came()]
        if self._compressor is not None:
            mine.append(not all(unit.finite for unit in self._units))
        flags = torch.tensor(mine, dtype=torch.uint8)
        if len(flags):
            task = in_place("all_reduce", flags, op=ReduceOp.MAX)
            start(task, self._backend, label="which parameters were used").wait()
        return [bool(flag) for flag in flags.tolist()]

    def finish_accumulated(self) -> None:
        """Reduce what was accumulated and not reduced since, if anything."""
        if self.accumulated:
            self.finish(self._units)

    def drop_accumulated(self) -> None:
        """Forget what was accumulated and not reduced."""
        self.accumulated = False
        for unit in self._units:
            unit.drop_accumulated()

    def forget(self) -> None:
        """The pass has failed: nothing of it counts."""
        self._under_way = None
        for unit in self._units:
            unit.forget()
        if self._compressor is not None:
            self._compressor.rollback()
