"""A plan: a schedule bound to one size of tensor, made once and used for every call of that kind.

    schedule   Send(peer, chunk)  Combine(peer, chunk)     chunk numbers   (schedules/)
    plan       SendBytes(peer, start, stop) ...            byte ranges     (here)
    work       the same, with memory and a sequence number                 (core/work.py)

The layout (layout.py) says which bytes a chunk is.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from phalanx.collectives.layout import STAGE, WORK, Cut, Exchanged, Held, Layout, chunk_ranges
from phalanx.collectives.reduce_op import (
    NARROW,
    WIDER,
    ReduceOp,
    Reduction,
    divide_,
    mean_of_two,
    reduction_for,
)
from phalanx.collectives.schedules import (
    ROOTED,
    Algorithm,
    Combine,
    Schedule,
    Send,
    for_root,
    row_for,
)
from phalanx.collectives.schedules.steps import Round as ChunkRound
from phalanx.collectives.schedules.steps import Step as ChunkStep
from phalanx.core.backend import Backend
from phalanx.core.steps import ReceiveBytes, Round, SendBytes

# ------------------------------------------------------------------------------
# The binder: rounds over chunk numbers become rounds over bytes.
#
#     schedule   Send(peer, chunk)  Combine(peer, chunk)     chunk numbers   (schedules/)
#     binder     SendBytes(peer, start, stop) ...            byte ranges     (here)
#
# Messages of no bytes are left out: both sides know that there is nothing to wait for. If several
# contributions to one chunk arrive in the same round, each is kept in a slot of the staging buffer,
# and all are reduced in rank order when the round is complete.


class ReduceStaged(NamedTuple):
    """Reduce elements [start, stop) of the work buffer with what is staged for them.

    `slots` has one entry for each contribution, in rank order: the byte in the stage where it
    begins, or None for this rank's own. `mean`: these are all contributions, and the result is
    divided by their number before it is rounded.
    """

    start: int
    stop: int
    slots: tuple[int | None, ...]
    mean: bool = False


class Divide(NamedTuple):
    """Elements [start, stop) of the work buffer are reduced completely: divide them for a mean."""

    start: int
    stop: int


class _Move(NamedTuple):
    """A step of a schedule, over bytes."""

    kind: type[ChunkStep]
    peer: int
    start: int
    stop: int
    buffer: int
    staged: bool  # one of several contributions to its chunk

    def part(self, cut: int, length: int) -> _Move:
        """A part of it: `length` bytes at most, from byte `cut` on."""
        start = self.start + cut
        return self._replace(start=start, stop=min(self.stop, start + length))


class Binder:
    """Binds the schedules of one rank to a layout.

    divide_staged              staged reductions divide, too, for a mean
    work_size, stage_size   bytes of these buffers that the rounds so far touch
    overwrites              whether they change the work buffer
    """

    def __init__(
        self, rank: int, layout: Layout, itemsize: int, *, divide_staged: bool = False
    ) -> None:
        self.rank = rank
        self.work_size = 0
        self.stage_size = 0
        self.overwrites = False
        self._layout = layout
        self._itemsize = itemsize
        self._divide_staged = divide_staged

    def bind(self, schedule: Schedule, piece: int | None = None) -> Iterator[Round | ReduceStaged]:
        """The rounds of a schedule, each followed by its local reductions.

        piece   bytes: longer messages are cut, and a round is several, so that the stage stays
                small and is reduced while it is in a cache. The same on every rank
        """
        for chunk_round in schedule:
            staged = _combined_more_than_once(chunk_round)
            moves = [move for step in chunk_round if (move := self._placed(step, staged))]
            longest = max((move.stop - move.start for move in moves), default=0)
            for cut in range(0, longest, piece or longest or 1):
                yield from self._round([move.part(cut, piece or longest) for move in moves])

    def _placed(self, step: ChunkStep, staged: set[int]) -> _Move | None:
        """Where the bytes of a step lie, if there are any."""
        buffer, first, last = self._layout.place(step.chunk, step.count)
        start, stop = first * self._itemsize, last * self._itemsize
        if start == stop:
            return None
        if buffer == WORK:
            self.work_size = max(self.work_size, stop)
        if not isinstance(step, Send):
            self.overwrites = True
        return _Move(type(step), step.peer, start, stop, buffer, step.chunk in staged)

    def _round(self, moves: list[_Move]) -> Iterator[Round | ReduceStaged]:
        """One round, and the local reductions after it."""
        sends: list[SendBytes] = []
        receives: list[ReceiveBytes] = []
        slots: dict[tuple[int, int], dict[int, int]] = {}
        used = 0
        for kind, peer, start, stop, buffer, staged in moves:
            if start >= stop:
                continue
            if kind is Send:
                sends.append(SendBytes(peer, start, stop, buffer))
            elif kind is Combine and staged:
                receives.append(ReceiveBytes(peer, used, used + stop - start, STAGE))
                slots.setdefault((start, stop), {})[peer] = used
                used += stop - start
            else:
                receives.append(ReceiveBytes(peer, start, stop, buffer, kind is Combine))
        self.stage_size = max(self.stage_size, used)
        if sends or receives:
            yield Round(tuple(sends), tuple(receives))
        for (start, stop), by_peer in slots.items():
            everyone: dict[int, int | None] = {**by_peer, self.rank: None}
            in_order = tuple(everyone[rank] for rank in sorted(everyone))
            first, last = start // self._itemsize, stop // self._itemsize
            yield ReduceStaged(first, last, in_order, self._divide_staged)

    def finish(self, chunks: range) -> Iterator[Divide]:
        """The division of these chunks, if they are a mean."""
        if len(chunks):
            _, start, stop = self._layout.place(chunks[0], len(chunks))
            if start < stop:
                self.overwrites = True
                yield Divide(start, stop)


def _combined_more_than_once(chunk_round: ChunkRound) -> set[int]:
    chunks = [step.chunk for step in chunk_round if isinstance(step, Combine)]
    return {chunk for chunk in chunks if chunks.count(chunk) > 1} if len(chunks) > 1 else set()


# ------------------------------------------------------------------------------

PAGE = 4096  # bytes, a multiple of every itemsize
STAGE_LIMIT = 48 << 20  # bytes of contributions that are staged at a time


class Mean(enum.Enum):
    """How a sum becomes a mean. Where it can be, it is divided before it is rounded."""

    SUMMED = "owners divide the sums that they have"
    SCALED = "every contribution is scaled down first, so that sums of a narrow dtype are finite"
    AT_ONCE = "all contributions are reduced at once, in a wider dtype, and divided there"
    PAIRED = "there are two contributions: combining them is taking their mean"


class Scale(NamedTuple):
    """Before anything else, every element is divided by `divisor`, a power of two.

    So the sums on the way to a mean stay in a range that is narrow, as float16's is.
    """

    divisor: int


PlanStep = Round | Scale | ReduceStaged | Divide

LISTED = 16  # ranks whose hosts a signature lists


class Key(NamedTuple):
    """What a plan depends on, besides the group's rank and size."""

    collective: str
    algorithm: str
    shape: tuple[int, ...]  # of the tensor that is cut into chunks, where a rank has it whole
    dtype: torch.dtype
    op: ReduceOp | None = None
    root: int = 0
    hosts: tuple[int, ...] | None = None  # of the ranks, where the algorithm goes by them
    tuning: str = ""  # the file by which the algorithm was picked, if one was


@dataclass(frozen=True)
class Plan:
    """One rank's part in a collective, for tensors of one shape and dtype."""

    key: Key
    program: tuple[PlanStep, ...]
    work_size: int  # bytes of the work buffer that this rank needs
    stage_size: int  # bytes
    overwrites: bool  # whether the work buffer is written; else it may be the caller's
    reduction: Reduction | None  # how contributions are combined, if they are
    divisor: float  # of what `Divide` divides
    signature: str  # what it is besides the collective's name, for messages
    fingerprint: int  # the hash of both

    def bytes_sent(self) -> int:
        """The payload that this rank sends."""
        return sum(
            send.stop - send.start
            for step in self.program
            if isinstance(step, Round)
            for send in step.sends
        )


def make_plan(key: Key, rank: int, size: int) -> Plan:
    """Bind the algorithm's schedule to byte ranges, for one rank."""
    row = row_for(key.collective, key.algorithm, key.hosts, key.root)
    mean = _way_to_a_mean(key, row, size)
    divide_staged = mean is Mean.AT_ONCE
    binder = Binder(
        rank, _layout(key, row, rank, size), key.dtype.itemsize, divide_staged=divide_staged
    )
    program: list[PlanStep] = []
    divisor: float = size
    if prod(key.shape) and size > 1:
        if row.reduce is not None:
            if mean is Mean.SCALED:
                scale = 1 << (size - 1).bit_length()
                program.append(Scale(scale))
                divisor = size / scale
            reduce = for_root(key.collective, row.reduce, key.root)(rank, size)
            program += binder.bind(reduce, _piece(row, size))
            if mean in (Mean.SUMMED, Mean.SCALED):
                program += binder.finish(row.owned((rank - key.root) % size, size))
        if row.spread is not None:
            program += binder.bind(for_root(key.collective, row.spread, key.root)(rank, size))
    signature = _signature(key)
    return Plan(
        key,
        tuple(program),
        binder.work_size,
        binder.stage_size,
        binder.overwrites or any(isinstance(step, Scale) for step in program),
        _reduction(key, mean),
        divisor,
        signature,
        xxhash.xxh3_64_intdigest(f"{key.collective} {signature}".encode()),
    )


def _piece(row: Algorithm, size: int) -> int | None:
    """The most bytes of a message where p-1 of them are staged; None: no limit."""
    if size == 2 or not row.at_once(size):
        return None
    return max(1, STAGE_LIMIT // (size - 1) // PAGE) * PAGE


def _way_to_a_mean(key: Key, row: Algorithm, size: int) -> Mean | None:
    if key.op is not ReduceOp.MEAN:
        return None
    if size == 2:  # where half of a sum is as exact as the sum, if that is finite
        return Mean.PAIRED if key.dtype in NARROW else Mean.SUMMED
    if key.dtype in WIDER and row.at_once(size):
        return Mean.AT_ONCE
    return Mean.SCALED if key.dtype in NARROW else Mean.SUMMED


def _reduction(key: Key, mean: Mean | None) -> Reduction | None:
    if key.op is None:
        return None
    reduction = reduction_for(key.op, key.dtype)
    return reduction._replace(combine=mean_of_two) if mean is Mean.PAIRED else reduction


def _layout(key: Key, row: Algorithm, rank: int, size: int) -> Layout:
    elements = prod(key.shape)
    if key.collective == "all_to_all":
        slices = chunk_ranges(elements, size)
        return Exchanged(rank, slices, slices)
    if key.collective in ("gather", "scatter") and rank != key.root:
        return Held(rank, size, elements // size)
    return Cut(chunk_ranges(elements, row.chunks(size)))


def _signature(key: Key) -> str:
    what = f"{str(key.dtype).removeprefix('torch.')} {list(key.shape)}"
    op = f", {key.op.value}" if key.op is not None else ""
    root = f", root {key.root}" if key.collective in ROOTED else ""
    tuning = f", tuning {key.tuning}" if key.tuning else ""
    return f"{what}{op}{root}, {key.algorithm}{_where(key.hosts)}{tuning}"


def _where(hosts: tuple[int, ...] | None) -> str:
    """The hosts of all ranks, as part of the signature; of many hosts, a hash."""
    if hosts is None:
        return ""
    listed = " ".join(map(str, hosts))
    if len(hosts) > LISTED:
        listed = f"{len(set(hosts))} hosts, {xxhash.xxh3_64_hexdigest(listed.encode())[:8]}"
    return f" ({listed})"


# ------------------------------------------------------------------------------
# A plan's reductions on the tensors of one call.

BLOCK = 1 << 16  # elements reduced at a time in a wider dtype; they fit the second-level cache


class Arithmetic:
    """Combines what comes into `work`, and carries out the plan's local steps on it."""

    def __init__(self, plan: Plan, work: Tensor, stage: Tensor | None, size: int) -> None:
        assert plan.reduction is not None
        self._flat = work.view(-1)
        self._stage = stage
        self._reduce = plan.reduction.combine
        self._wider = WIDER.get(work.dtype) if plan.reduction.adds_up else None
        self._size = size
        self._divisor = plan.divisor

    def combine(self, buffer: int, start: int, block: memoryview) -> None:
        """Reduce a block that came into the work buffer, from byte `start` on."""
        incoming = torch.frombuffer(block, dtype=self._flat.dtype)
        first = start // self._flat.itemsize
        own = self._flat[first : first + incoming.numel()]
        self._reduce(own, incoming, own)

    def carry_out(self, program: Iterable[PlanStep]) -> Iterator[Round]:
        """The rounds of a plan; local steps between them are done on the way."""
        for step in program:
            if isinstance(step, Round):
                yield step
            elif isinstance(step, ReduceStaged):
                self._reduce_staged(step)
            elif isinstance(step, Divide):
                divide_(self._flat[step.start : step.stop], self._divisor)
            else:
                self._flat.mul_(1 / step.divisor)

    def _reduce_staged(self, step: ReduceStaged) -> None:
        own = self._flat[step.start : step.stop]
        parts = [own if slot is None else self._staged(slot, own) for slot in step.slots]
        if self._wider is not None:
            for start in range(0, own.numel(), BLOCK):
                block = slice(start, start + BLOCK)
                self._reduce_wider(own[block], [p[block] for p in parts], self._wider, step.mean)
            return
        total = parts[0]
        for part in parts[1:]:
            self._reduce(total, part, total)
        if total is not own:
            own.copy_(total)

    def _reduce_wider(
        self, own: Tensor, parts: list[Tensor], wider: torch.dtype, mean: bool
    ) -> None:
        """Reduce `parts`, of which `own` is one, into it, and round once."""
        total = parts[0].to(wider)
        for part in parts[1:]:
            self._reduce(total, part.to(wider), total)
        if mean:
            divide_(total, self._size)
        own.copy_(total)

    def _staged(self, slot: int, like: Tensor) -> Tensor:
        assert self._stage is not None
        return self._stage[slot : slot + like.nbytes].view(like.dtype)


# ------------------------------------------------------------------------------
# The staging buffer, where contributions wait to be reduced in rank order.
#
# Fresh memory costs about as much as the reduction, since the kernel clears every page at its first
# use. So a backend keeps the staging buffer of one collective for the next. None is larger than
# a plan's `STAGE_LIMIT`.

LARGEST_KEPT = 64 << 20  # bytes, of one stage for each backend
_KEY = "the stage that is kept"


def borrow_stage(backend: Backend, size: int) -> Tensor:
    """At least `size` bytes, uninitialized, which no other call uses."""
    kept = backend.kept.pop(_KEY, None)
    if isinstance(kept, Tensor) and kept.nbytes >= size:
        return kept
    return torch.empty(size, dtype=torch.uint8)


def return_stage(backend: Backend, stage: Tensor) -> None:
    """Keep it for the next collective, unless it is too large."""
    if stage.nbytes <= LARGEST_KEPT:
        backend.kept[_KEY] = stage


def then_return(steps: Iterable[Round], backend: Backend, stage: Tensor) -> Iterator[Round]:
    """The same steps; after the last, the stage is returned. Of those that fail it is not."""
    yield from steps
    return_stage(backend, stage)
