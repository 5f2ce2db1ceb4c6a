"""Ranks that share memory without an engine: a test steps each of them by hand.

    members(3, reads=False)           three ranks' control blocks on each other
    Performance(member, call, ...)    one rank's part in one collective
    perform(...)                      all ranks' parts in several, in an order that the test chooses

What a rank does between two epochs is one step here. Two steps of different ranks that may be
under way at the same time come in either order, as the test chooses. So if one of them writes what
the other reads, there is an order in which the values are wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple, cast

import torch
from collective_reference import reduced, values_of
from torch import Tensor

from phalanx import ReduceOp
from phalanx.collectives.layout import chunk_ranges
from phalanx.collectives.plan import Key
from phalanx.collectives.shm.executor import ShmCollective
from phalanx.collectives.shm.plan import SHM_ALGORITHM
from phalanx.core.call import Members
from phalanx.core.work import Call as CoreCall
from phalanx.transport.shm.control import PARTS, ControlBlock
from phalanx.transport.shm.domain import HostDomain
from phalanx.transport.shm.epoch import FlagWait
from phalanx.transport.shm.peer_slot import AHEAD, FLAG

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "gather", "broadcast", "scatter")
IN_PLACE = ("all_reduce", "reduce", "broadcast", "all_gather", "gather")


class Call(NamedTuple):
    """What all ranks do together; `registered` and `in_place` have a bit for each rank.

    slice_   elements of what each rank gives or gets; or, of all that is not divided, a p-th of
             them, and `rest` more
    own      of an all_reduce in place and a reduce_scatter: in how many parts each rank's own slice
             is cut, every second of which lies elsewhere; of a reduce, whether what all have given
             is overwritten
    """

    collective: str
    slice_: int
    rest: int = 0
    dtype: torch.dtype = torch.float32
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    registered: int = 0
    results_registered: int = 0
    in_place: int = 0
    own: int = 0

    def shape(self, size: int) -> int:
        """Elements of the tensor that is cut into chunks."""
        divided = self.collective not in ("all_reduce", "reduce", "broadcast")
        return self.slice_ * size + (0 if divided else self.rest)

    def given(self, rank: int, size: int, seed: int) -> Tensor:
        """What a rank gives."""
        joined = self.collective in ("all_gather", "gather")
        return values_of((self.shape(size) // (size if joined else 1),), self.dtype, rank, seed)

    def everything(self, size: int, seed: int) -> Everything:
        """What all ranks give, and what each of them gets."""
        every = [self.given(rank, size, seed) for rank in range(size)]
        total = reduced(every, self.op) if self.collective in REDUCING else torch.cat(every)
        return Everything(every, [self._expected(rank, every, total) for rank in range(size)])

    def _expected(self, rank: int, every: list[Tensor], total: Tensor) -> Tensor | None:
        size = len(every)
        if self.collective in ("reduce", "gather") and rank != self.root:
            return None
        if self.collective == "reduce_scatter":
            return total.chunk(size)[rank]
        if self.collective in (*REDUCING, "all_gather", "gather"):
            return total
        if self.collective == "broadcast":
            return every[self.root]
        if self.collective == "scatter":
            return every[self.root].chunk(size)[rank]
        return torch.cat([values.chunk(size)[rank] for values in every])


class Everything(NamedTuple):
    """For each rank."""

    given: list[Tensor]
    expected: list[Tensor | None]


class Member:
    """A rank: its host domain, and its control block on the others'."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.domain = HostDomain(rank, size)
        self.control: ControlBlock | None = None
        self.flats: dict[Key, ShmCollective] = {}

    def empty(self, count: int, dtype: torch.dtype, *, registered: bool) -> Tensor:
        """Memory in the arena, or not."""
        if registered:
            return self.domain.empty((count,), dtype)
        return torch.empty(count, dtype=dtype)

    def make_control(self, ident: int, ranks: tuple[int, ...]) -> ControlBlock:
        """A group is made."""
        control = self.domain.shared(Members(ident, ranks, self.rank))
        assert control is not None
        return control

    def flat(self, call: Call) -> ShmCollective:
        """How this rank does it: worked out once, as `collectives/run.py` does."""
        assert self.control is not None
        op = call.op if call.collective in REDUCING else None
        shape = (call.shape(self.size),)
        key = Key(call.collective, SHM_ALGORITHM[call.collective], shape, call.dtype, op, call.root)
        if key not in self.flats:
            self.flats[key] = ShmCollective(key, self.control)
        return self.flats[key]


@contextmanager
def members(size: int, *, reads: bool = False) -> Iterator[list[Member]]:
    """So many ranks, in one group; whether they read each other's ordinary memory."""
    all_ = [Member(rank, size) for rank in range(size)]
    for one in all_:
        for other in all_:
            if other is not one:
                there = other.domain
                one.domain.add_peer(other.rank, os.getpid(), there.memory, there.wakeup_end)
    for one in all_:
        if reads:
            one.domain.try_reading()
    for one in all_:
        one.control = one.make_control(0, tuple(range(size)))
    try:
        yield all_
    finally:
        for one in all_:
            one.domain.close()


class Performance:
    """One rank's part in one collective. What it gives is overwritten when it is over."""

    def __init__(self, member: Member, call: Call, everything: Everything) -> None:
        rank, size = self.rank, self.size = member.rank, member.size
        self.expected = everything.expected[rank]
        given = everything.given[rank]
        gives = call.collective not in ("broadcast", "scatter") or rank == call.root
        self.registered = bool(call.registered >> rank & 1)
        self.out = None
        if self.expected is not None:
            registered = bool(call.results_registered >> rank & 1)
            count = self.expected.numel()
            self.out = member.empty(count, call.dtype, registered=registered)
        if call.in_place >> rank & 1 and call.collective in IN_PLACE and self.out is not None:
            joined = call.collective in ("all_gather", "gather")
            source = self.out.chunk(size)[rank] if joined else self.out
        else:
            source = member.empty(given.numel(), call.dtype, registered=self.registered)
        self.before = given
        self.source = source.copy_(given) if gives else None
        self.is_in_place = source is self.out or (
            self.out is not None and source.data_ptr() == self.out.data_ptr() + rank * given.nbytes
        )
        self.own: list[tuple[int, Tensor]] = []
        in_place = call.collective == "all_reduce" and self.is_in_place
        if call.own and (in_place or call.collective == "reduce_scatter"):
            self.own = self._take_out(call)
        consumes = self.consumes = call.collective == "reduce" and bool(call.own)
        flat, own = member.flat(call), tuple(self.own)
        self.steps = flat.steps(self.source, self.out, own, consume=consumes)
        self.epoch: FlagWait | None = None

    def _take_out(self, call: Call) -> list[tuple[int, Tensor]]:
        """Parts of this rank's slice of what it gives, which is overwritten there."""
        assert self.source is not None
        first, last = chunk_ranges(self.source.numel(), self.size)[self.rank]
        slice_ = self.source[first:last]
        cuts = [slice_.numel() * part**2 // call.own**2 for part in range(call.own + 1)]
        own = []
        for start, stop in list(pairwise(cuts))[::2]:
            own.append((first + start, slice_[start:stop].clone()))
            slice_[start:stop].view(torch.uint8).fill_(0xA5)
        return own

    def may_go_on(self) -> bool:
        """Whether everybody has come to where this rank waits."""
        if self.epoch is None:
            return True
        absent = self.epoch.waits_for()
        assert self.epoch.diverged() is None
        return not absent

    def go_on(self, sequence: int) -> bool:
        """One step; False when it was the last."""
        self.epoch = cast("FlagWait | None", next(self.steps, None))
        if self.epoch is None:
            return False
        self.epoch.begin(cast("CoreCall", SimpleNamespace(rolling_hash=sequence)))
        return True

    def check_and_overwrite(self, what: str) -> None:
        """The result is right, what was given is as it was; then it is not any more."""
        if self.expected is not None:
            assert self.out is not None
            assert same_bits(self.out, self.expected), what
        kept = not (self.is_in_place or self.own or self.consumes)
        if self.source is not None and kept:
            assert same_bits(self.source, self.before), f"{what}: what was given has changed"
        for tensor in (self.source, self.out, *(values for _, values in self.own)):
            if tensor is not None:
                tensor.view(torch.uint8).fill_(0xA5)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are the same to the last bit."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


Choose = Callable[[list[int]], int]


def perform(everyone: list[Member], calls: list[Call], choose: Choose, seed: int = 0) -> None:
    """All ranks do these, one after the other. `choose` says who of those that can goes on."""
    size = len(everyone)
    now: list[Performance | None] = [None] * size
    begun = [0] * size
    everything = [call.everything(size, seed + number) for number, call in enumerate(calls)]
    while True:
        able = [
            member.rank
            for member, part in zip(everyone, now, strict=True)
            if (part.may_go_on() if part is not None else begun[member.rank] < len(calls))
        ]
        if not able:
            break
        rank = choose(able)
        number = begun[rank] - 1
        part = now[rank]
        if part is None:
            number = begun[rank]
            begun[rank] += 1
            part = now[rank] = Performance(everyone[rank], calls[number], everything[number])
        if not part.go_on(number):
            part.check_and_overwrite(f"rank {rank} of {size}, #{number}: {calls[number]}")
            now[rank] = None
        flags = [member.control.words[FLAG] for member in everyone if member.control is not None]
        ahead = AHEAD + PARTS if any(call.collective in ROOTED for call in calls) else 1
        assert max(flags) - min(flags) <= ahead, "somebody is too far ahead"
    assert now == [None] * size, "nobody can go on"
    assert begun == [len(calls)] * size
