"""The plan of a collective in shared memory: each member's writes, reads and waits.

Each rank shows its input, and after an epoch reads that of the others. All members choose the same
one of three algorithms, from sizes and from what all have shown:

    small      inputs are copied to slots, every rank reads all slots              1 epoch
    in place   inputs are read where they are: in shared memory, or in that of a   2, and 1 a block
               process that the kernel lets others read                            to pass on
    staged     inputs are copied to staging memory, piece by piece, while the      1 a piece
               piece before is read

Every rank reduces its own slice of all contributions, in rank order, and writes in no memory but
its own: n/p bytes are read from each of p members, and p-1 results of n/p collected.

An all-reduce, as each of its members does it; `|` is an epoch. Staging memory has two parts for
inputs and two for results, used in turn, so what is overwritten now was read before the last epoch:

    staged     stage 0 | reduce 0, stage 1 | collect 0, reduce 1, stage 2 | collect 1, reduce 2 | collect 2
    in place   show    | reduce 0          | collect 0, reduce 1          | collect 1, reduce 2 | collect 2 |

A member that only gives does not wait for those that take, unless its own tensor is read. It runs
ahead: it has slots for some collectives, and parts of the staging memory, in turn.

A plan touches no memory. `executor.py` carries it out; `tests/collectives/shm_model.py` steps the
ranks by hand, in every order.
"""  # noqa: E501 - the picture

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from phalanx.collectives.layout import chunk_ranges
from phalanx.collectives.plan import Key
from phalanx.collectives.request import SMALL
from phalanx.core.shared_group import Places, SharedGroup

# ------------------------------------------------------------------------------
# How each collective is done: a table.
#
# Every member gives a tensor, or only the root does; all get the result, or only the root.


class Form(NamedTuple):
    """One row of the table.

    sliced      slice j of a member's input is for member j; else all of it is for all
    reduced     a member reduces what it takes of all, in rank order
    joined      it puts that one after the other
    passed_on   a member's reduction is a slice of the result, which is collected
    from_root   only the root gives
    to_root     only the root gets the result
    """

    sliced: bool = False
    reduced: bool = False
    joined: bool = False
    passed_on: bool = False
    from_root: bool = False
    to_root: bool = False

    def gives(self, is_root: bool) -> bool:
        return is_root or not self.from_root

    def gets(self, is_root: bool) -> bool:
        return is_root or not self.to_root

    @property
    def is_broadcast(self) -> bool:
        """True if only the root gives, and all of it to all."""
        return self.from_root and not self.sliced


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

SHM_ALGORITHM: Mapping[str, str] = MappingProxyType(
    {name: "star" if name in ("gather", "scatter") else "direct" for name in FORMS}
)
"""The algorithm that this is, by the name that it has where messages are sent."""

# ------------------------------------------------------------------------------

LINE = 64  # bytes of a cache line


class Thresholds(NamedTuple):
    """Bytes at which the algorithm, or its step, changes.

    small            the most that is copied to a slot
    piece            the most that is staged at a time
    staged_by_all    of a sliced tensor, by all members: so others copy it from a core's cache
    block            reduced between two epochs in place: the fewer, the less often members meet,
    block_of_large   but for tensors from `large` on a block is half a core's cache, from which the
    large            others copy it: a quarter less time at 16 and 64 MiB (commit 2c0a94c)
    step             reduced at a time, in place
    read             of ordinary memory, by all members, that is copied to scratch at a time and
    read_least       reduced there, in the cache; of each member at least
    reduced_from     smallest input that is read in ordinary memory, if it is reduced; staging costs
    broadcast_from   less below; and if it is broadcast
    crowded_to       largest one, where ranks share cores: of a larger one the others copy what
                     was staged from the cache

    `make thresholds` measures each beside half and twice of it; docs/numbers.md has them.
    """

    small: int = SMALL
    piece: int = 2 << 20
    staged_by_all: int = 1 << 20
    block: int = 4 << 20
    block_of_large: int = 512 << 10
    large: int = 8 << 20
    step: int = 1 << 20
    read: int = 256 << 10
    read_least: int = 16 << 10
    reduced_from: int = 3 << 19
    broadcast_from: int = 2 << 20
    crowded_to: int = 4 << 20


THRESHOLDS = Thresholds()


class Turn(NamedTuple):
    """A member's turn between two epochs, with the pieces of these numbers; in this order.

    collect   copy the others' reductions of it
    take      reduce or copy it, from all who give
    stage     copy it to the staging memory, for the others
    """

    collect: int | None = None
    take: int | None = None
    stage: int | None = None


@dataclass(frozen=True)
class ShmPlan:
    """One member's part in a collective, for tensors of one shape and dtype. Sizes are in bytes.

    slices      the range of each member's slice in the whole that is sliced or joined
    given       the size of an input
    mine        the range of an input that this member takes: its slice of it, or all
    longest     the most that any member takes of one
    givers      the places of those who give
    gives       whether this member does
    gets        whether it gets the result
    runs_ahead  whether members who only give go on before the others have taken it
    waits_for   the members on whom an epoch of this member depends
    is_small    whether the algorithm is `small`; else it is `in place` if all have shown
    piece       the most of a slice that is staged at a time
    block       the most of a slice that is reduced between two epochs in place
    reads       whether inputs of ordinary memory are read in place, and not staged
    """

    form: Form
    thresholds: Thresholds
    place: int
    size: int
    itemsize: int
    slices: tuple[tuple[int, int], ...]
    given: int
    mine: tuple[int, int]
    longest: int
    givers: tuple[int, ...]
    gives: bool
    gets: bool
    runs_ahead: bool
    waits_for: Places
    is_small: bool
    piece: int
    block: int
    reads: bool

    @property
    def takes(self) -> bool:
        """True if this member reads inputs: for its result, or for others who collect."""
        return self.gets or self.form.passed_on

    def others(self, first: int, most: int) -> Iterator[tuple[int, int, int]]:
        """Yield of each other slice, from its byte `first` on: (member, place of that, length)."""
        for place, (start, stop) in enumerate(self.slices):
            length = min(most, stop - start - first)
            if place != self.place and length > 0:
                yield place, start + first, length

    def staged(self) -> Iterator[Turn]:
        """Yield the turns between epochs if inputs are staged; first comes an epoch for piece 0.

        The last piece is collected behind an epoch of its own.
        """
        count = -(-self.longest // self.piece)
        collects = self.form.passed_on and self.gets
        for number in range(count + self.form.passed_on):
            yield Turn(
                collect=number - 1 if collects and number else None,
                take=number if number < count else None,
                stage=number + 1 if number + 1 < count else None,
            )

    @cached_property
    def blocks(self) -> tuple[tuple[int, int, tuple[tuple[int, int, int], ...]], ...]:
        """The (first, last) byte of its slice to reduce before each epoch in place, and what there
        is to collect of the others' after it.

        As many for each member: `last` is below `first` if its slice is shorter.
        """
        length, block = self.mine[1] - self.mine[0], self.block
        return tuple(
            (first, min(first + block, length), tuple(self.others(first, block)))
            for first in range(0, self.longest, block)
        )

    def bytes_read(self, by: int, giver: int, root: int) -> int:
        """Return the number of bytes that one member reads of another one's memory."""
        form = self.form
        gets, gives = form.gets(by == root), form.gives(giver == root)
        if not gives or not (gets or form.passed_on):
            return 0
        if self.is_small and form.passed_on:  # who gets the result reduces all of it
            return self.given if gets else 0
        start, stop = self.slices[by] if form.sliced else (0, self.given)
        first, last = self.slices[giver] if form.passed_on and gets else (0, 0)
        return stop - start + last - first


def make_shm_plan(key: Key, shared: SharedGroup, thresholds: Thresholds) -> ShmPlan:
    """Plan a collective for the members of a shared group; pure, of its sizes only."""
    form, size, place = FORMS[key.collective], shared.size, shared.place
    itemsize = key.dtype.itemsize
    slices = tuple(
        (first * itemsize, last * itemsize) for first, last in chunk_ranges(prod(key.shape), size)
    )
    whole = slices[-1][1]
    given = whole if form.sliced or not form.joined else slices[0][1]
    longest = max(stop - start for start, stop in slices) if form.sliced else given
    is_root = place == key.root
    is_small = given <= min(thresholds.small, 2 * shared.slot_size // size)
    # Those who only give depend on nobody.
    runs_ahead = form.from_root or (form.to_root and is_small)
    waits_for: Places = None
    if runs_ahead and is_root == form.from_root:
        waits_for = ()
    elif form.from_root:
        waits_for = (key.root,)
    piece = min(thresholds.piece, shared.part_size)
    room = min(thresholds.staged_by_all, piece) // size if form.sliced else piece
    return ShmPlan(
        form=form,
        thresholds=thresholds,
        place=place,
        size=size,
        itemsize=itemsize,
        slices=slices,
        given=given,
        mine=slices[place] if form.sliced else (0, given),
        longest=longest,
        givers=(key.root,) if form.from_root else tuple(range(size)),
        gives=form.gives(is_root),
        gets=form.gets(is_root),
        runs_ahead=runs_ahead,
        waits_for=waits_for,
        is_small=is_small,
        piece=max(LINE, min(room, -(-longest // LINE) * LINE) // LINE * LINE),
        block=thresholds.block_of_large if given >= thresholds.large else thresholds.block,
        reads=shared.is_readable and _pays_to_read(form, given, shared, thresholds),
    )


def _pays_to_read(form: Form, given: int, shared: SharedGroup, at: Thresholds) -> bool:
    """Return whether an input of ordinary memory is read in place, and not staged."""
    if form.reduced:
        most = at.crowded_to if shared.share_of_cores == 0 else given
        return at.reduced_from <= given <= most
    return not form.is_broadcast or given >= at.broadcast_from
