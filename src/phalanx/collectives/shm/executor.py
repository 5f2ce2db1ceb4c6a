"""Carry out the plan of a collective in shared memory: small, in place, or staged.

Addresses of this process, as ints, are handled here and nowhere else in the collectives.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from phalanx.collectives.pieces import Elsewhere, join
from phalanx.collectives.plan import Key
from phalanx.collectives.shm import plan as plans
from phalanx.collectives.shm.plan import LINE, make_shm_plan
from phalanx.core.counters import Counters, Taken
from phalanx.core.reduce_op import BLOCK, RankOrderReduction, ReduceOp, reduction_for
from phalanx.core.shared_group import Descriptors, Location, Region, SharedGroup, UnreadableError
from phalanx.core.steps import Program
from phalanx.wire.memory import tensor_at

RESULTS = 2  # the part of the staging memory for results of part 0; the next one, of part 1
KEPT = 1024  # views of shared memory that are remembered
KEPT_OF_OWN = 8  # and of a rank's ordinary memory

Views: TypeAlias = dict[tuple[int, int], Tensor]
"""Memory as tensors, by address and length in bytes."""

copy = ctypes.memmove  # (to, from, count): as fast as torch's, and costs a third as much to call


class ShmCollective:
    """One collective of one shared group, for tensors of one shape and dtype.

    taken   the bytes that it moves between this rank and each other, for the counters
    """

    def __init__(self, key: Key, shared: SharedGroup) -> None:
        self.shared = shared
        self.plan = plan = make_shm_plan(key, shared, plans.THRESHOLDS)
        self.dtype = key.dtype
        self._reduction = self._of_two = None
        if plan.form.reduced:
            divisor = plan.size if key.op is ReduceOp.MEAN else 1
            reduction = reduction_for(key.op, key.dtype)
            self._reduction = RankOrderReduction(reduction, key.dtype, divisor)
            self._of_two = self._reduction.of_two if plan.size == 2 else None
        me, root = plan.place, key.root
        self.taken = Taken(
            [
                (rank, plan.bytes_read(place, me, root), plan.bytes_read(me, place, root))
                for place, rank in enumerate(shared.ranks)
                if place != me
            ]
        )
        self._own_slots = [shared.slot_address(me, number) for number in range(shared.slots)]
        self._slot_views: dict[int, list[Tensor]] = {}
        self._views: Views = {}
        self._own_views: Views = {}
        self._step = plan.thresholds.step

    def steps(
        self,
        source: Tensor | None,
        out: Tensor | None,
        elsewhere: Elsewhere = (),
        counters: Counters | None = None,
        *,
        consume: bool = False,
    ) -> Iterator[Program]:
        """Yield this rank's part. It keeps the tensors alive.

        elsewhere  pieces of this rank's slice that are not in `source`
        counters   to be told of it, when all have come that this rank depends on
        consume    whether all ranks let `source` be overwritten: with slices of a result, too, that
                   another rank gets
        """
        if not self.plan.is_small:
            if consume and out is None and self.plan.form.passed_on:
                out = source
            return self._large(source, out, elsewhere, counters, consume=consume)
        if elsewhere and source is not None:
            join(source, elsewhere)
        return self._small(source, out, counters)

    # Small ----------------------------------------------------------------------------------

    def _small(
        self, source: Tensor | None, out: Tensor | None, counters: Counters | None
    ) -> Iterator[Program]:
        shared, plan = self.shared, self.plan
        wait = shared.wait_for_entry()
        if wait is not None:
            yield wait
        number = shared.next_slot(ahead=plan.runs_ahead)
        if source is not None:
            copy(self._own_slots[number], source.data_ptr(), plan.given)
        yield shared.epoch(first=True, places=plan.waits_for)
        if counters is not None:
            counters.took(self.taken)
        if out is None or not plan.gets:
            return
        if self._reduction is None:
            at = [(shared.slot_address(giver, number), None) for giver in plan.givers]
            self._take_whole(at, out.data_ptr(), ())
            return
        views = self._slot_views.get(number) or self._views_of_slots(number)
        flat = out if out.dim() == 1 else out.view(-1)
        if self._of_two is not None:
            self._of_two(*views, out=flat)
        else:
            self._reduction.reduce(views, flat)

    def _views_of_slots(self, number: int) -> list[Tensor]:
        """Return this rank's part of each slot: all of an all-reduce, which nobody passes on."""
        shared, plan, size = self.shared, self.plan, self.plan.itemsize
        start, stop = (0, plan.given) if plan.form.passed_on else plan.mine
        part, count = slice(start // size, stop // size), plan.given // size
        slots = (shared.slot(place, number, count, self.dtype) for place in range(plan.size))
        views = self._slot_views[number] = [slot[part] for slot in slots]
        return views

    # Large ----------------------------------------------------------------------------------

    def _large(
        self,
        source_tensor: Tensor | None,
        out_tensor: Tensor | None,
        elsewhere: Elsewhere,
        counters: Counters | None,
        *,
        consume: bool,
    ) -> Iterator[Program]:
        """Go on in place if all who give have shown their tensors; else staged."""
        shared, plan = self.shared, self.plan
        # Threads of torch that have no core of their own would wait for each other at every step.
        crowded = torch.get_num_threads() > max(1, shared.share_of_cores)
        self._step = BLOCK * plan.itemsize if crowded else plan.thresholds.step
        source = source_tensor.data_ptr() if source_tensor is not None else 0
        out = out_tensor.data_ptr() if out_tensor is not None else 0
        shown = self._show(source, out, consume=consume)
        wait = shared.wait_for_entry()
        if wait is not None:
            yield wait
        if shown is None:
            if source_tensor is not None and elsewhere:
                join(source_tensor, elsewhere)
                elsewhere = ()
            yield from self._stage(source, 0)
        yield shared.epoch(first=True, shown=shown, places=plan.waits_for)
        if counters is not None:
            counters.took(self.taken)
        regions = [shared.shown(giver) for giver in plan.givers]
        if None not in regions:
            yield from self._in_place([each for each in regions if each], out, elsewhere)
            return
        if source_tensor is not None and elsewhere:
            join(source_tensor, elsewhere)
        if any(regions):  # some have not staged anything yet
            if shown is not None:
                yield from self._stage(source, 0)
            yield shared.epoch()
        yield from self._staged(source, out)

    def _show(self, source: int, out: int, *, consume: bool) -> Descriptors | None:
        """Return the places of this rank's tensors for the others; None if it has to stage them."""
        plan = self.plan
        if not plan.gives or (plan.form.passed_on and plan.form.to_root and not consume):
            return None  # who gets no result has no place for its slice of it
        given = result = self._find(source)
        if source != out and plan.form.passed_on:
            result = self._find(out)
        return Descriptors(given, result) if given is not None and result is not None else None

    def _find(self, address: int) -> Location | None:
        shared, plan = self.shared, self.plan
        found = shared.find(address, plan.given)
        if found is not None or not plan.reads:
            return found
        if plan.form.is_broadcast and not shared.is_crowded():
            return None  # a root stages a part while the others copy the one before
        return shared.find_ordinary(address)

    # In place -------------------------------------------------------------------------------

    def _in_place(
        self, regions: list[tuple[Region, Region]], out: int, elsewhere: Elsewhere
    ) -> Iterator[Program]:
        """Read inputs and collect results, both in place."""
        shared, plan = self.shared, self.plan
        try:
            if plan.form.passed_on:
                yield from self._pass_on(regions, out, elsewhere)
            else:
                self._take_whole([given for given, _ in regions], out, elsewhere)
        except UnreadableError as error:
            yield shared.after(error)
        # A member that gives waits until it is read. One that only takes does not wait for takers.
        is_read = not plan.form.from_root or plan.gives
        yield shared.epoch(last=True, places=None if is_read else ())

    def _pass_on(
        self, regions: list[tuple[Region, Region]], out: int, elsewhere: Elsewhere
    ) -> Iterator[Program]:
        """Reduce a block of this rank's slice, and collect the others' blocks of theirs.

        A block that this rank writes has been read by the one that has reduced it, before they met.
        """
        shared, plan = self.shared, self.plan
        at = [(address + plan.mine[0], peer) for (address, peer), _ in regions]
        for first, last, others in plan.blocks:
            self._reduce_slice(at, out + plan.mine[0], first, last, elsewhere)
            yield shared.epoch()
            for place, start, length in others if plan.gets else ():
                address, peer = regions[place][1]
                if peer is not None:
                    peer.read(out + start, address + start, length)
                else:
                    copy(out + start, address + start, length)

    def _take_whole(self, given: Sequence[Region], out: int, elsewhere: Elsewhere) -> None:
        """Take this rank's part of inputs that lie at these addresses."""
        if not self.plan.gets:
            return
        start, stop = self.plan.mine
        at = [(address + start, peer) for address, peer in given]
        if self._reduction is not None:
            self._reduce_slice(at, out, 0, stop - start, elsewhere)
        else:
            self._copy(at, out, stop - start)

    def _copy(self, at: Sequence[Region], out: int, length: int) -> None:
        """Copy so many bytes of each giver, which lie there."""
        for giver, (address, peer) in zip(self.plan.givers, at, strict=True):
            into = out + self.plan.slices[giver][0] if self.plan.form.joined else out
            if peer is not None:
                peer.read(into, address, length)
            elif into != address:
                copy(into, address, length)

    def _reduce_slice(
        self, at: Sequence[Region], out: int, first: int, last: int, elsewhere: Elsewhere
    ) -> None:
        """Reduce bytes `first` to `last` of a slice, this rank's own part in place.

        In steps, for the cache. `at` and `out` are the addresses of the slice.
        """
        base, size, me = self.plan.mine[0], self.plan.itemsize, self.plan.place
        at_once = self.plan.thresholds.step
        for begin, end, piece in runs_of((base + first) // size, (base + last) // size, elsewhere):
            start, stop = begin * size - base, end * size - base
            mine = at[me][0] + start
            if piece is not None:
                mine = piece[1].data_ptr() + (begin - piece[0]) * size
            for step in range(start, stop, at_once):
                here = [(other + step, peer) for other, peer in at]
                here[me] = mine + step - start, None
                self._reduce(here, out + step, min(at_once, stop - step))

    # Staged ---------------------------------------------------------------------------------

    def _staged(self, source: int, out: int) -> Iterator[Program]:
        """Reduce piece after piece. The first one is staged, and all have met."""
        shared, plan = self.shared, self.plan
        for number, (collect, take, stage) in enumerate(plan.staged()):
            if number:
                yield shared.epoch(places=plan.waits_for)
            part = shared.part(ahead=plan.runs_ahead)
            if collect is not None:
                self._collect(out, collect, 1 - part)
            if take is not None:
                self._take(source, out, take, part)
                shared.leave_part(ahead=plan.runs_ahead, gave=plan.gives)
            if stage is not None:
                yield from self._stage(source, stage)
        if not plan.runs_ahead:
            shared.leave_stage()

    def _stage(self, source: int, number: int) -> Iterator[Program]:
        """Copy a piece of the input to the next part, when the others have read the one there."""
        shared, plan = self.shared, self.plan
        if not plan.gives:
            return
        wait = shared.wait_for_part(ahead=plan.runs_ahead)
        if wait is not None:
            yield wait
        stage = self._part_of(plan.place, shared.part(ahead=plan.runs_ahead))
        first = number * plan.piece
        if plan.form.sliced:
            for place, start, length in plan.others(first, plan.piece):
                copy(stage + place * plan.piece, source + start, length)
        else:
            copy(stage, source + first, min(plan.piece, plan.given - first))

    def _take(self, source: int, out: int, number: int, part: int) -> None:
        """Reduce or copy a piece; one to pass on is reduced to this rank's staging memory."""
        plan, me = self.plan, self.plan.place
        first = number * plan.piece
        start, stop = plan.mine
        length = min(plan.piece, stop - start - first)
        if length <= 0 or not plan.takes:
            return
        inside = me * plan.piece if plan.form.sliced else 0
        at: list[Region] = [
            (source + start + first if giver == me else self._part_of(giver, part) + inside, None)
            for giver in plan.givers
        ]
        if plan.form.passed_on:
            result = self._part_of(me, RESULTS + part)
            self._reduce(at, result, length)
            if plan.gets:
                copy(out + start + first, result, length)
        elif self._reduction is not None:
            self._reduce(at, out + first, length)
        else:
            self._copy(at, out + first, length)

    def _collect(self, out: int, number: int, part: int) -> None:
        """Copy the others' reduced parts of a piece."""
        piece = self.plan.piece
        for place, start, length in self.plan.others(number * piece, piece):
            copy(out + start, self._part_of(place, RESULTS + part), length)

    def _part_of(self, place: int, part: int) -> int:
        return self.shared.stage_address(place) + part * self.shared.part_size

    # ----------------------------------------------------------------------------------------

    def _reduce(self, at: Sequence[Region], out: int, length: int) -> None:
        """Reduce these inputs. Of ordinary memory, a block at a time is read into scratch."""
        assert self._reduction is not None
        step, scratch, limits = self._step, 0, self.plan.thresholds
        read = sum(peer is not None for _, peer in at)
        if read:
            step = min(step, max(limits.read_least, limits.read // read // LINE * LINE))
            scratch = self.shared.scratch(len(at) * step)
        for first in range(0, length, step):
            count = min(step, length - first)
            views = []
            for number, (address, peer) in enumerate(at):
                here = address + first
                if peer is not None:
                    here = scratch + number * step
                    peer.read(here, address + first, count)
                views.append(self._view(here, count, own=number == self.plan.place))
            into = self._view(out + first, count, own=True)
            if self._of_two is not None:
                self._of_two(*views, out=into)
            else:
                self._reduction.reduce(views, into)

    def _view(self, address: int, length: int, *, own: bool) -> Tensor:
        """Return memory as a tensor: shared, scratch, or this rank's own. It keeps nothing alive,
        and is used while the memory is there.

        Of ordinary memory only a few views are remembered. The next tensor may lie elsewhere, and a
        small block of the heap that stays between large ones keeps them from being joined and used
        again.
        """
        place, views, most = (address, length), self._views, KEPT
        view = self._own_views.get(place) if own else None
        if view is None:
            view = views.get(place)
        if view is None:
            if own and self.shared.find(address, length) is None:
                views, most = self._own_views, KEPT_OF_OWN
            if len(views) >= most:
                views.clear()
            view = tensor_at(address, length // self.plan.itemsize, self.dtype, keeping=None)
            views[place] = view
        return view


def runs_of(
    start: int, stop: int, elsewhere: Elsewhere
) -> Iterator[tuple[int, int, tuple[int, Tensor] | None]]:
    """Cut elements `start` to `stop` of a tensor into runs (first, last, piece that has it).

    The piece is None for a run that lies in the tensor.
    """
    for piece in elsewhere:
        first, values = piece
        last = min(stop, first + values.numel())
        if start < min(first, stop):
            yield start, min(first, stop), None
        if max(start, first) < last:
            yield max(start, first), last, piece
        start = max(start, last)
    if start < stop:
        yield start, stop, None
