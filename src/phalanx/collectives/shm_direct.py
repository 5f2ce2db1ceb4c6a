"""Collectives in shared memory: each rank shows its input, and after an epoch reads its peers'.

Three ways. All members choose the same one, from sizes and from what all have shown:

    small      inputs are copied to slots, every rank reads all slots              1 epoch
    direct     inputs are read in place: they lie in shared memory, or in that     2, and 1 a piece
               of a process that the kernel lets others read (`cross_memory.py`)   to pass on
    pieces     inputs are staged, piece by piece, while the piece before is read   1 a piece

An all-reduce in pieces, as one rank does it. Staging memory and results have two halves, used in
turn, so what is overwritten now was read before the last epoch (`transport/shm/control.py`):

    stage 0  epoch  reduce 0, show it; stage 1  epoch  take result 0; reduce 1, show it; stage 2 ...

    | given 0: piece for member 0, 1, ... | given 1 ... | result 0 | result 1 |      the stage

Every rank reduces its own slice of all contributions, in rank order, and writes in no memory but
its own: n/p bytes are read from each of p members, and p-1 results of n/p taken.

Who only gives does not wait for those who take, unless its own tensor is read: it has small slots
for some collectives, and parts of the staging memory, in turn.

`tests/collectives/shm_direct_model.py` steps the ranks by hand, in every order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from phalanx.collectives.layout import chunk_ranges
from phalanx.collectives.plan import Plan
from phalanx.collectives.request import SMALL
from phalanx.core.counters import Counters, Taken
from phalanx.core.reduce_op import BLOCK, RankOrderReduction, ReduceOp, reduction_for
from phalanx.core.steps import Program
from phalanx.transport.shm.control import (
    AHEAD,
    GIVEN,
    ORDINARY,
    PARTS,
    RESULT,
    SLOT,
    STAGE,
    ControlBlock,
    Descriptors,
    Places,
    Region,
    ShmEpoch,
)
from phalanx.transport.shm.directory import UnreadableError
from phalanx.transport.shm.segments import tensor_at

# ------------------------------------------------------------------------------
# How each collective is done in shared memory: a table.
#
# Every member gives a tensor, or only the root does; all get the result, or only the root.


class Form(NamedTuple):
    """One row of the table.

    sliced      slice j of what is given is for member j; else all of it is for all
    reduced     what a member takes of all is reduced, in rank order
    joined      it is put one after the other
    passed_on   what each member has reduced is a slice of the result, which is collected
    from_root   only the root gives
    to_root     only the root gets the result
    """

    sliced: bool = False
    reduced: bool = False
    joined: bool = False
    passed_on: bool = False
    from_root: bool = False
    to_root: bool = False


# fmt: off
FORMS: Mapping[str, Form] = MappingProxyType({
    "all_reduce":     Form(sliced=True, reduced=True, passed_on=True),
    "reduce":         Form(sliced=True, reduced=True, passed_on=True, to_root=True),
    "reduce_scatter": Form(sliced=True, reduced=True),
    "all_gather":     Form(joined=True),
    "gather":         Form(joined=True, to_root=True),
    "broadcast":      Form(from_root=True),
    "scatter":        Form(from_root=True, sliced=True),
    "all_to_all":     Form(sliced=True, joined=True),
})
# fmt: on

SHM_DIRECT: Mapping[str, str] = MappingProxyType(
    {name: "star" if name in ("gather", "scatter") else "direct" for name in FORMS}
)
"""The algorithm that this is, by the name that it has where messages are sent."""

# ------------------------------------------------------------------------------

PIECE = STAGE // PARTS  # bytes staged at a time
STEP = 1 << 20  # bytes of a slice reduced at a time where nothing is staged

# Bytes that a member reduces before the others take them. Of large tensors so few that these take
# them from a core's cache, of which they fill a half; else more, so that members meet less often.
MEET, MEET_LARGE, LARGE = 4 << 20, 512 << 10, 8 << 20
SHARED = 1 << 20  # bytes that all members stage at a time of what is sliced: likewise

# Ordinary memory, in bytes: of all members together, and of each at least, that are read at a time,
# to be reduced in the cache. Of what sizes tensors are read where they lie; staging costs less
# below, and above where ranks share cores: what one has staged, others then read from the cache.
READ, READ_LEAST = 256 << 10, 16 << 10
READ_REDUCED, READ_BROADCAST = 3 << 19, 2 << 20
READ_CROWDED = 4 << 20
LINE = 64
KEPT = 1024  # views of shared memory that are remembered
KEPT_OF_OWN = 8  # and of a rank's ordinary memory

OwnParts: TypeAlias = "tuple[tuple[int, Tensor], ...]"
"""Parts of this rank's slice that are elsewhere: the element at which each begins, its values."""

Views: TypeAlias = dict[tuple[int, int], Tensor]
"""Memory as tensors, by address and length in bytes."""

copy = ctypes.memmove  # (to, from, count): as fast as torch's, and costs a third as much to call


class ShmDirect:
    """One collective of one control block, for tensors of one shape and dtype.

    taken   the bytes that it moves between this rank and each other, for the counters
    """

    def __init__(self, plan: Plan, control: ControlBlock) -> None:
        key, form = plan.key, FORMS[plan.key.collective]
        self.control = control
        self.size, self.me = control.size, control.place
        self.form = form
        self.dtype = key.dtype
        self._reduction = None
        if form.reduced:
            divisor = self.size if key.op is ReduceOp.MEAN else 1
            reduction = reduction_for(key.op, key.dtype)
            self._reduction = RankOrderReduction(reduction, key.dtype, divisor)
        # Where each slice begins and ends in what is sliced or joined, in bytes.
        self._slices = [
            (first * key.dtype.itemsize, last * key.dtype.itemsize)
            for first, last in chunk_ranges(prod(key.shape), self.size)
        ]
        whole = self._slices[-1][1]
        self._given = whole if form.sliced or not form.joined else self._slices[0][1]
        self._mine = self._slices[self.me] if form.sliced else (0, self._given)
        longest = max(stop - start for start, stop in self._slices)  # not always the first
        self._longest = longest if form.sliced else self._given
        is_root = self.me == key.root
        self._givers = [key.root] if form.from_root else list(range(self.size))
        self._gives = is_root or not form.from_root
        self._gets = is_root or not form.to_root
        self._takes = self._gets or form.passed_on
        self.is_small = self._given <= min(SMALL, 2 * SLOT // self.size)
        self._own_slots = [control.mine.slot_address(number) for number in range(2 + AHEAD)]
        # Those who only give go on before it is taken; they depend on nobody.
        self._runs_ahead = form.from_root or (form.to_root and self.is_small)
        self._depends_on: Places = None
        if self._runs_ahead and is_root == form.from_root:
            self._depends_on = ()
        elif form.from_root:
            self._depends_on = (key.root,)
        room = min(SHARED, PIECE) // self.size if form.sliced else PIECE
        self._piece = max(LINE, min(room, -(-self._longest // LINE) * LINE) // LINE * LINE)
        self._at_once = STEP  # bytes
        self._meet = MEET_LARGE if self._given >= LARGE else MEET
        self._is_broadcast = form.from_root and not form.sliced
        low = READ_REDUCED if form.reduced else READ_BROADCAST if self._is_broadcast else 0
        crowded = form.reduced and control.share_of_cores == 0
        high = READ_CROWDED if crowded else self._given
        self._reads = control.is_readable and low <= self._given <= high
        self.taken = Taken(
            [
                (rank, self._taken(place, self.me, key.root), self._taken(self.me, place, key.root))
                for place, rank in enumerate(control.ranks)
                if place != self.me
            ]
        )
        self._views: Views = {}
        self._own_views: Views = {}
        self._slot_views: dict[int, list[Tensor]] = {}

    def steps(
        self,
        source: Tensor | None,
        out: Tensor | None,
        own: OwnParts = (),
        counters: Counters | None = None,
    ) -> Iterator[Program]:
        """This rank's part. It keeps the tensors alive.

        own       parts of this rank's slice that are not in `source` yet, where their place is
        counters  to be told of it, when all have come that this rank depends on
        """
        if not self.is_small:
            return self._large(source, out, own, counters)
        if own:
            self._settle(source, own)
        return self._small(source, out, counters)

    def _taken(self, by: int, giver: int, root: int) -> int:
        """How many bytes one member reads of another one's memory."""
        form = self.form
        gets, gives = by == root or not form.to_root, giver == root or not form.from_root
        if not gives or not (gets or form.passed_on):
            return 0
        if self.is_small and form.passed_on:  # who gets the result reduces all of it
            return self._given if gets else 0
        start, stop = self._slices[by] if form.sliced else (0, self._given)
        first, last = self._slices[giver] if form.passed_on and gets else (0, 0)
        return stop - start + last - first

    def _settle(self, source: Tensor | None, own: OwnParts) -> None:
        """Put what is elsewhere in its place: not only this rank's reduction goes by it."""
        for element, values in own:
            assert source is not None
            start = source.data_ptr() + self._slices[self.me][0]
            copy(start + element * self.dtype.itemsize, values.data_ptr(), values.nbytes)

    # Small ----------------------------------------------------------------------------------

    def _small(
        self, source: Tensor | None, out: Tensor | None, counters: Counters | None
    ) -> Iterator[Program]:
        control = self.control
        if control.met < control.needed:
            yield from control.room()
        if self._runs_ahead:
            number = 2 + (control.turn + 1) % AHEAD
        else:
            control.side = number = 1 - control.side
        if source is not None:
            copy(self._own_slots[number], source.data_ptr(), self._given)
        yield ShmEpoch(control, first=True, places=self._depends_on)
        if counters is not None:
            counters.took(self.taken)
        if out is None or not self._gets:
            return
        if self._reduction is None:
            at = [(control.slot(giver).slot_address(number), None) for giver in self._givers]
            self._take_whole(at, out.data_ptr())
            return
        # Everyone who gets the result of an all-reduce reduces all of it.
        views = self._slot_views.get(number)
        if views is None:
            count, (start, stop) = self._given // self.dtype.itemsize, self._mine
            part = slice(None)
            if not self.form.passed_on:
                part = slice(start // self.dtype.itemsize, stop // self.dtype.itemsize)
            slots = (control.slot(place) for place in range(self.size))
            views = [slot.slot(number, count, self.dtype)[part] for slot in slots]
            self._slot_views[number] = views
        self._reduction.reduce(views, out if out.dim() == 1 else out.view(-1))

    # Where it is ----------------------------------------------------------------------------

    def _large(
        self,
        source_tensor: Tensor | None,
        out_tensor: Tensor | None,
        own: OwnParts,
        counters: Counters | None,
    ) -> Iterator[Program]:
        control = self.control
        self._set_pace()
        source = source_tensor.data_ptr() if source_tensor is not None else 0
        out = out_tensor.data_ptr() if out_tensor is not None else 0
        where = None  # all that this rank shows, if others can read it where it is
        if self._gives and not (self.form.passed_on and self.form.to_root):
            given = result = self._find(source)
            if source != out and self.form.passed_on:
                result = self._find(out)
            if given is not None and result is not None:
                where = Descriptors(given, result)
        if control.met < control.needed:
            yield from control.room()
        if where is None:
            self._settle(source_tensor, own)
            own = ()
            yield from self._stage(source, 0)
        yield ShmEpoch(control, first=True, shown=where, places=self._depends_on)
        if counters is not None:
            counters.took(self.taken)
        turn = control.turn
        shown = [control.slot(giver).shown(turn) for giver in self._givers]
        if all(shown):
            yield from self._direct(source, out, turn, own)
            return
        self._settle(source_tensor, own)
        if any(shown):  # some have not staged anything yet
            if where is not None:
                yield from self._stage(source, 0)
            yield ShmEpoch(control)
        yield from self._pieces(source, out)

    def _set_pace(self) -> None:
        # Threads of torch that have no core of their own would wait for each other at every step.
        crowded = torch.get_num_threads() > max(1, self.control.share_of_cores)
        self._at_once = BLOCK * self.dtype.itemsize if crowded else STEP

    def _find(self, address: int) -> tuple[int, int] | None:
        """Where others can read a tensor of this rank; None: it has to be staged."""
        control = self.control
        found = control.find(address, self._given)
        if found is not None or not self._reads:
            return found
        if self._is_broadcast and not control.is_crowded():
            return None  # a root stages a part while the others copy the one before
        return (ORDINARY, address) if control.can_be_read(address) else None

    def _direct(self, source: int, out: int, turn: int, own: OwnParts) -> Iterator[Program]:
        control = self.control
        given = self._regions(source, GIVEN[turn])
        try:
            if self.form.passed_on:
                results = self._regions(out, RESULT[turn])
                yield from self._direct_pieces(given, results, out, own)
            else:
                self._take_whole(given, out, own)
        except UnreadableError as error:
            yield from control.unreadable(error)
        # Who gives waits until it is read. Who only takes need not wait for others who do.
        is_read = not self.form.from_root or self._gives
        yield ShmEpoch(control, last=True, places=None if is_read else ())

    def _regions(self, mine: int, word: int) -> list[Region]:
        """Where the tensors of all givers are."""
        return [
            (mine, None) if giver == self.me else self.control.slot(giver).region(word)
            for giver in self._givers
        ]

    def _direct_pieces(
        self, given: list[Region], results: list[Region], out: int, own: OwnParts
    ) -> Iterator[Program]:
        """Reduce a piece of this rank's slice, and take what the others have reduced of theirs.

        A piece that this rank writes has been read by the one that has reduced it, before they met.
        """
        start, stop = self._mine
        at = [(address + start, peer) for address, peer in given]
        for first in range(0, self._longest, self._meet):
            self._reduce_slice(at, out + start, first, min(first + self._meet, stop - start), own)
            yield ShmEpoch(self.control)
            for place, begin, length in self._others(first, self._meet):
                address, peer = results[place]
                if peer is not None:
                    peer.read(out + begin, address + begin, length)
                else:
                    copy(out + begin, address + begin, length)

    def _others(self, first: int, most: int) -> Iterator[tuple[int, int, int]]:
        """Of each other slice, from its byte `first` on: (member, where that is, length)."""
        for place, (start, stop) in enumerate(self._slices):
            length = min(most, stop - start - first)
            if place != self.me and length > 0:
                yield place, start + first, length

    def _take_whole(self, given: Sequence[Region], out: int, own: OwnParts = ()) -> None:
        """Take what is for this rank of what the givers have, which lies at these addresses."""
        if not self._gets:
            return
        start, stop = self._mine
        at = [(address + start, peer) for address, peer in given]
        if self._reduction is not None:
            self._reduce_slice(at, out, 0, stop - start, own)
        else:
            self._copy(at, out, stop - start)

    def _copy(self, at: Sequence[Region], out: int, length: int) -> None:
        """Take so many bytes of each giver, which lie there."""
        for giver, (address, peer) in zip(self._givers, at, strict=True):
            into = out + self._slices[giver][0] if self.form.joined else out
            if peer is not None:
                peer.read(into, address, length)
            elif into != address:
                copy(into, address, length)

    def _reduce_slice(
        self, at: Sequence[Region], out: int, first: int, last: int, own: OwnParts
    ) -> None:
        """Reduce these bytes of a slice, this rank's own part from where it is.

        In steps, for the cache. `at` and `out` are where the slice begins.
        """
        for begin, end, address in self._stretches(at[self.me][0], first, last, own):
            for step in range(begin, end, STEP):
                here = [(other + step, peer) for other, peer in at]
                here[self.me] = address + step - begin, None
                self._reduce(here, out + step, min(STEP, end - step))

    def _stretches(
        self, mine: int, first: int, last: int, own: OwnParts
    ) -> Iterator[tuple[int, int, int]]:
        """Where these bytes of this rank's slice lie: (first one, last one, address)."""
        for element, values in own:
            start = element * self.dtype.itemsize
            stop = min(last, start + values.nbytes)
            if first < min(start, last):
                yield first, min(start, last), mine + first
            if max(first, start) < stop:
                yield max(first, start), stop, values.data_ptr() + max(first - start, 0)
            first = max(first, stop)
        if first < last:
            yield first, last, mine + first

    # Piece by piece -------------------------------------------------------------------------

    def _pieces(self, source: int, out: int) -> Iterator[Program]:
        """The first piece is staged, and all have met."""
        control, piece = self.control, self._piece
        collects = self.form.passed_on and self._gets
        count = -(-self._longest // piece)
        for number in range(count):
            part = control.part if self._runs_ahead else control.phase
            if number and collects:
                self._take_results(out, number - 1, 1 - part)
            self._take_piece(source, out, number, part)
            if self._runs_ahead:
                control.part_over(given=self._gives)
            else:
                control.phase = 1 - part
            if number + 1 < count:
                yield from self._stage(source, number + 1)
            elif not self.form.passed_on:
                break
            yield ShmEpoch(control, places=self._depends_on)
        if collects:
            self._take_results(out, count - 1, 1 - control.phase)
        if not self._runs_ahead:
            control.stage_over()

    def _stage(self, source: int, number: int) -> Iterator[Program]:
        """Show a piece of what this rank gives, when the others have read what was there."""
        control, piece = self.control, self._piece
        control.make_stage()
        if not self._gives:
            return
        yield from control.stage_free(ahead=self._runs_ahead)
        part = control.part if self._runs_ahead else control.phase
        stage = control.mine.stage_address + part * PIECE
        first = number * piece
        if self.form.sliced:
            for place, start, length in self._others(first, piece):
                copy(stage + place * piece, source + start, length)
        else:
            copy(stage, source + first, min(piece, self._given - first))

    def _take_piece(self, source: int, out: int, number: int, part: int) -> None:
        piece, me, control = self._piece, self.me, self.control
        first = number * piece
        start, stop = self._mine
        length = min(piece, stop - start - first)
        if length <= 0 or not self._takes:
            return
        inside = part * PIECE + (me * piece if self.form.sliced else 0)
        at: list[Region] = []
        for giver in self._givers:
            here = source + start + first
            at.append((here if giver == me else control.slot(giver).stage_address + inside, None))
        if self.form.passed_on:
            result = control.mine.stage_address + _results(part)
            self._reduce(at, result, length)
            if self._gets:
                copy(out + start + first, result, length)
        elif self._reduction is not None:
            self._reduce(at, out + first, length)
        else:
            self._copy(at, out + first, length)

    def _take_results(self, out: int, number: int, phase: int) -> None:
        """What the others have reduced of a piece."""
        for place, start, length in self._others(number * self._piece, self._piece):
            copy(out + start, self.control.slot(place).stage_address + _results(phase), length)

    # ----------------------------------------------------------------------------------------

    def _reduce(self, at: Sequence[Region], out: int, length: int) -> None:
        """Reduce what lies there. Of ordinary memory, a block at a time is read into scratch."""
        assert self._reduction is not None
        step, scratch = self._at_once, 0
        read = sum(peer is not None for _, peer in at)
        if read:
            step = min(step, max(READ_LEAST, READ // read // LINE * LINE))
            scratch = self.control.scratch(len(at) * step)
        for first in range(0, length, step):
            count = min(step, length - first)
            views = []
            for number, (address, peer) in enumerate(at):
                here = address + first
                if peer is not None:
                    here = scratch + number * step
                    peer.read(here, address + first, count)
                view = self._own_view if number == self.me else self._view
                views.append(view(here, count))
            self._reduction.reduce(views, self._own_view(out + first, count))

    def _own_view(self, address: int, length: int) -> Tensor:
        """Memory of this rank as a tensor.

        Of ordinary memory only a few views are remembered. The next tensor may lie elsewhere, and a
        small block of the heap that stays between large ones keeps them from being joined and used
        again.
        """
        view = self._own_views.get((address, length))
        if view is not None:
            return view
        if self.control.find(address, length) is not None:
            return self._view(address, length)
        return self._remember(self._own_views, KEPT_OF_OWN, address, length)

    def _view(self, address: int, length: int) -> Tensor:
        """Shared memory, or scratch, as a tensor. It keeps nothing alive, and is used while the
        memory is there."""
        view = self._views.get((address, length))
        return self._remember(self._views, KEPT, address, length) if view is None else view

    def _remember(self, views: Views, most: int, address: int, length: int) -> Tensor:
        if len(views) >= most:
            views.clear()
        view = tensor_at(address, length // self.dtype.itemsize, self.dtype, keeping=None)
        views[address, length] = view
        return view


def _results(phase: int) -> int:
    """Where in the stage results are: two halves for what is given, and then two for these."""
    return (2 + phase) * PIECE
