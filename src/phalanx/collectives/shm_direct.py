"""Collectives in shared memory: each rank shows its input, and after an epoch reads its peers'.

Three ways. All members choose the same one, from sizes and from what all have shown:

    small      inputs are copied to slots, every rank reads all slots              1 epoch
    direct     inputs lie in shared memory, and are read in place                  2, and 1 a piece
                                                                                   to pass on
    pieces     inputs are staged, piece by piece, while the piece before is read   1 a piece

An all-reduce in pieces, as one rank does it. Staging memory and results have two halves, used in
turn, so what is overwritten now was read before the last epoch (`transport/shm/control.py`):

    stage 0  epoch  reduce 0, show it; stage 1  epoch  take result 0; reduce 1, show it; stage 2 ...

    | given 0: piece for member 0, 1, ... | given 1 ... | result 0 | result 1 |      the stage

Every rank reduces its own slice of all contributions, in rank order, and writes in no memory but
its own: n/p bytes are read from each of p members, and p-1 results of n/p taken.

`tests/collectives/shm_direct_model.py` steps the ranks by hand, in every order.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from phalanx.collectives.layout import chunk_ranges
from phalanx.collectives.plan import Plan
from phalanx.collectives.reduce_op import WIDER, ReduceOp, divide_, reduction_for
from phalanx.core.steps import Program
from phalanx.transport.shm.control import (
    SLOT,
    STAGE,
    ControlBlock,
    Descriptors,
    PeerSlot,
    ShmEpoch,
)
from phalanx.transport.shm.segments import tensor_at

# ------------------------------------------------------------------------------
# Reducing contributions in rank order.

BLOCK = 256 << 10  # bytes reduced at a time in a wider dtype, or beside the result
LARGEST = 1 << 20  # bytes reduced at a time in the result itself


class RankOrderReduction:
    """A plan's reduction of `size` contributions, rounded once and divided for a mean.

    The order is that of the ranks, so that the bits are the same on every rank and backend as with
    `direct`. Short floating-point dtypes are reduced in a wider one.
    """

    def __init__(self, plan: Plan, size: int) -> None:
        dtype = plan.key.dtype
        reduction = reduction_for(plan.key.op, dtype)
        self._combine = reduction.combine
        self._wider = WIDER.get(dtype) if reduction.adds_up else None
        self._divisor = size if plan.key.op is ReduceOp.MEAN else 0
        self._block = BLOCK // dtype.itemsize
        self._scratch: Tensor | None = None

    def reduce(self, parts: list[Tensor], out: Tensor) -> None:
        """Reduce `parts`, at least two, into `out`, which may be the memory of one of them."""
        if self._wider is None and (len(parts) == 2 or self._fits(parts, out)):
            self._combine(parts[0], parts[1], out)
            for part in parts[2:]:
                self._combine(out, part, out)
            if self._divisor:
                divide_(out, self._divisor)
            return
        for start in range(0, out.numel(), self._block):
            block = slice(start, start + self._block)
            total = self._total_of([part[block] for part in parts])
            out[block].copy_(total)

    def _fits(self, parts: list[Tensor], out: Tensor) -> bool:
        """Whether `out` can hold partial results: it fits the cache, no later part lies in it."""
        if out.nbytes > LARGEST:
            return False
        address = out.data_ptr()
        return all(part.data_ptr() != address for part in parts[2:])

    def _total_of(self, parts: list[Tensor]) -> Tensor:
        if self._wider is not None:
            parts = [part.to(self._wider) for part in parts]
        total = self._room(parts[0])
        self._combine(parts[0], parts[1], total)
        for part in parts[2:]:
            self._combine(total, part, total)
        if self._divisor:
            divide_(total, self._divisor)
        return total

    def _room(self, like: Tensor) -> Tensor:
        """Scratch memory, since `out` may be that of a part which is still to be read."""
        if self._scratch is None:
            self._scratch = torch.empty(self._block, dtype=like.dtype)
        return self._scratch[: like.numel()]


# ------------------------------------------------------------------------------
# How each collective is done in shared memory: a table.
#
# Every member gives a tensor, or only the root does. Where it is *sliced*, slice j is for member j;
# else it is for all. What a member takes is *reduced* to one, or *joined*, or it is the
# root's. In some, each member reduces a slice, which is then *passed on* to all, or to the root.
#
#     collective       given by   sliced   taken by    then
#     all_reduce       all        yes      all: reduce passed on to all
#     reduce           all        yes      all: reduce passed on to the root
#     reduce_scatter   all        yes      all: reduce
#     all_gather       all        no       all: join
#     gather           all        no       root: join
#     broadcast        root       no       all
#     scatter          root       yes      all
#     all_to_all       all        yes      all: join


class Who(enum.Enum):
    """Which members."""

    ALL = "all"
    ROOT = "root"

    def includes(self, place: int, root: int) -> bool:
        """Whether it means this one."""
        return self is Who.ALL or place == root


class Form(NamedTuple):
    """One row of the table."""

    givers: Who
    takers: Who
    sliced: bool
    reduced: bool = False
    joined: bool = False
    passed_on: Who | None = None


# fmt: off
FORMS: Mapping[str, Form] = MappingProxyType({
    #                      givers    takers    sliced
    "all_reduce":     Form(Who.ALL,  Who.ALL,  True,  reduced=True, passed_on=Who.ALL),
    "reduce":         Form(Who.ALL,  Who.ALL,  True,  reduced=True, passed_on=Who.ROOT),
    "reduce_scatter": Form(Who.ALL,  Who.ALL,  True,  reduced=True),
    "all_gather":     Form(Who.ALL,  Who.ALL,  False, joined=True),
    "gather":         Form(Who.ALL,  Who.ROOT, False, joined=True),
    "broadcast":      Form(Who.ROOT, Who.ALL,  False),
    "scatter":        Form(Who.ROOT, Who.ALL,  True),
    "all_to_all":     Form(Who.ALL,  Who.ALL,  True,  joined=True),
})
# fmt: on


# ------------------------------------------------------------------------------

SHM_DIRECT: Mapping[str, str] = MappingProxyType(
    {name: "star" if name in ("gather", "scatter") else "direct" for name in FORMS}
)
"""The algorithm that this is, by the name that it has where messages are sent."""

SMALL = 64 << 10  # bytes that a member gives at most in a small collective
PIECE = STAGE // 4  # bytes staged at a time
STEP = 1 << 20  # bytes of a slice reduced at a time where nothing is staged
LINE = 64
KEPT = 256  # views of memory that are remembered

OwnParts: TypeAlias = "tuple[tuple[int, Tensor], ...]"
"""Parts of this rank's slice that are elsewhere: the element at which each begins, its values."""

copy = ctypes.memmove  # (to, from, count): as fast as torch's, and costs a third as much to call


class ShmDirect:
    """One collective of one control block, for tensors of one shape and dtype."""

    def __init__(self, plan: Plan, control: ControlBlock) -> None:
        key = plan.key
        self.control = control
        self.size, self.me = control.size, control.place
        self.root = key.root
        self.form = FORMS[key.collective]
        self.dtype = key.dtype
        self._reduction = RankOrderReduction(plan, self.size) if self.form.reduced else None
        elements = prod(key.shape)
        # Where each slice begins and ends in what is sliced or joined, in bytes.
        self._slices = [
            (first * key.dtype.itemsize, last * key.dtype.itemsize)
            for first, last in chunk_ranges(elements, self.size)
        ]
        whole = self._slices[-1][1]
        self._given = whole if self.form.sliced or not self.form.joined else self._slices[0][1]
        longest = max(stop - start for start, stop in self._slices)  # not always the first
        self._longest = longest if self.form.sliced else self._given
        self._givers = [g for g in range(self.size) if self.form.givers.includes(g, self.root)]
        self._gives = self.me in self._givers
        self._takes = self.form.takers.includes(self.me, self.root)
        self._gets_on = self.form.passed_on is not None and self.form.passed_on.includes(
            self.me, self.root
        )
        self.is_small = self._given <= min(SMALL, 2 * SLOT // self.size)
        room = PIECE // self.size if self.form.sliced else PIECE
        self._piece = max(LINE, min(room, -(-self._longest // LINE) * LINE) // LINE * LINE)
        self._own_slots = [control.mine.slot_address(turn) for turn in (0, 1)]
        self._views: dict[tuple[int, int], Tensor] = {}
        self._turn_views: dict[int, list[Tensor]] = {}

    def steps(
        self, source: Tensor | None, out: Tensor | None, own: OwnParts = ()
    ) -> Iterator[Program]:
        """This rank's part. It keeps the tensors alive.

        own   parts of this rank's slice that are not in `source` yet, where their place is
        """
        if self.is_small:
            if own:
                self._settle(source, own)
            if self.form.passed_on is not None:
                return self._small_reduce(source, out)
            return self._small(source, out)
        return self._large(source, out, own)

    def _settle(self, source: Tensor | None, own: OwnParts) -> None:
        """Put what is elsewhere in its place: not only this rank's reduction goes by it."""
        if own:
            assert source is not None
            start = source.data_ptr() + self._slices[self.me][0]
            for element, values in own:
                copy(start + element * self.dtype.itemsize, values.data_ptr(), values.nbytes)

    # Small ----------------------------------------------------------------------------------

    def _small_reduce(self, source: Tensor | None, out: Tensor | None) -> Iterator[Program]:
        """Everyone who gets the result reduces all of it."""
        assert source is not None
        control, turn = self.control, 1 - self.control.turn
        copy(self._own_slots[turn], source.data_ptr(), self._given)
        yield ShmEpoch(control, first=True)
        if out is not None:
            views = self._turn_views.get(turn)
            if views is None:
                count = self._given // self.dtype.itemsize
                slots = (control.slot(place) for place in range(self.size))
                views = [slot.slot(turn, count, self.dtype) for slot in slots]
                self._turn_views[turn] = views
            assert self._reduction is not None
            self._reduction.reduce(views, out if out.dim() == 1 else out.view(-1))

    def _small(self, source: Tensor | None, out: Tensor | None) -> Iterator[Program]:
        control, turn = self.control, 1 - self.control.turn
        if source is not None:
            copy(self._own_slots[turn], source.data_ptr(), self._given)
        yield ShmEpoch(control, first=True)
        if out is not None:
            slots = [control.slot(place).slot_address(turn) for place in range(self.size)]
            self._take_whole(slots, out.data_ptr())

    # Where it is ----------------------------------------------------------------------------

    def _large(
        self, source_tensor: Tensor | None, out_tensor: Tensor | None, own: OwnParts
    ) -> Iterator[Program]:
        control = self.control
        source = source_tensor.data_ptr() if source_tensor is not None else 0
        out = out_tensor.data_ptr() if out_tensor is not None else 0
        where = None  # all that this rank shows, if it lies in shared memory
        if self._gives and self.form.passed_on is not Who.ROOT:
            given = result = control.find(source, self._given)
            if source != out and self.form.passed_on is not None:
                result = control.find(out, self._given)
            if given is not None and result is not None:
                where = Descriptors(given, result)
        if where is None:
            self._settle(source_tensor, own)
            own = ()
            self._stage(source, 0)
        yield ShmEpoch(control, first=True, shown=where)
        turn = control.turn
        shown = [control.slot(giver).shown(turn) for giver in self._givers]
        if all(shown):
            yield from self._direct(source, out, turn, own)
            return
        self._settle(source_tensor, own)
        if any(shown):  # some have not staged anything yet
            if where is not None:
                self._stage(source, 0)
            yield ShmEpoch(control)
        yield from self._pieces(source, out)

    def _direct(self, source: int, out: int, turn: int, own: OwnParts) -> Iterator[Program]:
        control = self.control
        slots = [control.slot(place) for place in range(self.size)]
        given = [
            slot.given_address(turn) if place in self._givers else 0
            for place, slot in enumerate(slots)
        ]
        given[self.me] = source
        if self._gets_on:
            yield from self._direct_pieces(given, slots, out, turn)
        else:
            self._take_whole(given, out, own)
        yield ShmEpoch(control, last=True)  # or what others still read would be written

    def _direct_pieces(
        self, given: list[int], slots: list[PeerSlot], out: int, turn: int
    ) -> Iterator[Program]:
        """Reduce a piece of this rank's slice, and take what the others have reduced of theirs.

        In pieces, so that these are taken while they are still in a cache. A piece that this rank
        writes has been read by the one that has reduced it, before they met.
        """
        start, stop = self._slices[self.me]
        results = [slot.result_address(turn) for slot in slots]
        for first in range(0, self._longest, STEP):
            length = min(STEP, stop - start - first)
            if length > 0:
                at = [address + start + first for address in given]
                self._reduce(at, out + start + first, length)
            yield ShmEpoch(self.control)
            for place, (begin, end) in enumerate(self._slices):
                length = min(STEP, end - begin - first)
                if place != self.me and length > 0:
                    copy(out + begin + first, results[place] + begin + first, length)

    def _take_whole(self, given: list[int], out: int, own: OwnParts = ()) -> None:
        """Take what all have given, which lies at these addresses."""
        if not self._takes:
            return
        start, stop = self._slices[self.me] if self.form.sliced else (0, self._given)
        if self._reduction is not None:
            self._reduce_slice([address + start for address in given], out, stop - start, own)
            return
        for giver in self._givers:
            into = out + self._slices[giver][0] if self.form.joined else out
            if into != given[giver] + start:
                copy(into, given[giver] + start, stop - start)

    def _reduce_slice(self, at: list[int], out: int, length: int, own: OwnParts) -> None:
        """Reduce a slice, this rank's own part from where it is. In steps, for the cache."""
        for first, last, address in self._stretches(at[self.me], length, own):
            for begin in range(first, last, STEP):
                here = [other + begin for other in at]
                here[self.me] = address + begin - first
                self._reduce(here, out + begin, min(STEP, last - begin))

    def _stretches(self, mine: int, length: int, own: OwnParts) -> Iterator[tuple[int, int, int]]:
        """Where this rank's slice lies: (first byte of the slice, last one, address)."""
        done = 0
        for element, values in own:
            start = element * self.dtype.itemsize
            if done < start:
                yield done, start, mine + done
            done = start + values.nbytes
            yield start, done, values.data_ptr()
        if done < length:
            yield done, length, mine + done

    # Piece by piece -------------------------------------------------------------------------

    def _pieces(self, source: int, out: int) -> Iterator[Program]:
        """The first piece is staged, and all have met."""
        control, piece = self.control, self._piece
        count = -(-self._longest // piece)
        for number in range(count):
            phase = control.phase
            if number and self._gets_on:
                self._take_results(out, number - 1, 1 - phase)
            self._take_piece(source, out, number, phase)
            control.phase = 1 - phase
            if number + 1 < count:
                self._stage(source, number + 1)
            elif self.form.passed_on is None:
                return
            yield ShmEpoch(control)
        if self._gets_on:
            self._take_results(out, count - 1, 1 - control.phase)

    def _stage(self, source: int, number: int) -> None:
        """Show a piece of what this rank gives."""
        control, piece = self.control, self._piece
        control.make_stage()
        if not self._gives:
            return
        stage = control.mine.stage_address + control.phase * PIECE
        first = number * piece
        if not self.form.sliced:
            copy(stage, source + first, min(piece, self._given - first))
            return
        for place, (start, stop) in enumerate(self._slices):
            if place != self.me and start + first < stop:
                copy(
                    stage + place * piece, source + start + first, min(piece, stop - start - first)
                )

    def _take_piece(self, source: int, out: int, number: int, phase: int) -> None:
        if not self._takes:
            return
        piece, me = self._piece, self.me
        first = number * piece
        start, stop = self._slices[me] if self.form.sliced else (0, self._given)
        length = min(piece, stop - start - first)
        if length <= 0:
            return
        inside = phase * PIECE + (me * piece if self.form.sliced else 0)
        at = [
            (source + start + first if g == me else self.control.slot(g).stage_address + inside)
            for g in self._givers
        ]
        if self._reduction is None:
            for giver, address in zip(self._givers, at, strict=True):
                into = out + first + (self._slices[giver][0] if self.form.joined else 0)
                if into != address:
                    copy(into, address, length)
        elif self.form.passed_on is None:
            self._reduce(at, out + first, length)
        else:
            self._reduce(at, self.control.mine.stage_address + _results(phase), length)
            if self._gets_on:
                into = out + start + first
                copy(into, self.control.mine.stage_address + _results(phase), length)

    def _take_results(self, out: int, number: int, phase: int) -> None:
        """What the others have reduced of a piece."""
        first = number * self._piece
        for place, (start, stop) in enumerate(self._slices):
            length = min(self._piece, stop - start - first)
            if place != self.me and length > 0:
                address = self.control.slot(place).stage_address + _results(phase)
                copy(out + start + first, address, length)

    # ----------------------------------------------------------------------------------------

    def _reduce(self, addresses: list[int], out: int, length: int) -> None:
        if length:
            assert self._reduction is not None
            views = [self._view(address, length) for address in addresses]
            self._reduction.reduce(views, self._view(out, length))

    def _view(self, address: int, length: int) -> Tensor:
        """Memory as a tensor. It keeps nothing alive, and is used while the memory is there."""
        view = self._views.get((address, length))
        if view is None:
            if len(self._views) >= KEPT:
                self._views.clear()
            count = length // self.dtype.itemsize
            view = tensor_at(address, count, self.dtype, keeping=None)
            self._views[address, length] = view
        return view


def _results(phase: int) -> int:
    """Where in the stage results are: two halves for what is given, and then two for these."""
    return (2 + phase) * PIECE
