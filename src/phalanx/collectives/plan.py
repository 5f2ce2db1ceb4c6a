"""A plan: a schedule bound to one size of tensor, made once and used for every call of that kind.

schedule   Send(peer, chunk)  Combine(peer, chunk)     chunk numbers   (schedules/)
plan       SendBytes(peer, start, stop) ...            byte ranges     (here, by layout.py)
work       the same, with memory and a sequence number                 (core/work.py)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from phalanx.collectives.layout import (
    Binder,
    Divide,
    Layout,
    ReduceStaged,
    chunk_ranges,
    cut,
    exchanged,
    held,
)
from phalanx.collectives.schedules import ROOTED, Algorithm, for_root, row_for
from phalanx.core.backend import Backend
from phalanx.core.reduce_op import (
    BLOCK,
    NARROW,
    WIDER,
    RankOrderReduction,
    ReduceOp,
    divide_,
    reduction_for,
)
from phalanx.core.steps import Round

PAGE = 4096  # bytes, a multiple of every itemsize
STAGE_LIMIT = 48 << 20  # bytes of contributions that are staged at a time

PlanStep = Round | ReduceStaged | Divide

LISTED = 16  # ranks whose hosts a signature lists


class Key(NamedTuple):
    """The key of a plan, besides the group's rank and size."""

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
    reduction: RankOrderReduction | None  # how contributions are combined, if they are
    scale: int  # divides every contribution at first, so that sums of a narrow dtype stay finite
    divisor: float  # of `Divide`
    signature: str  # what it is besides the collective's name, for messages
    fingerprint: int  # the hash of both


def make_plan(key: Key, rank: int, size: int) -> Plan:
    """Bind the algorithm's schedule to byte ranges, for one rank."""
    row = row_for(key.collective, key.algorithm, key.hosts, key.root)
    binder = Binder(rank, _layout(key, row, rank, size), key.dtype.itemsize)
    reduction, scale, divisor = None, 1, 1.0
    if key.op is not None:
        reduction, scale, divisor = _reduction(key, row, size)
    program: list[PlanStep] = []
    if prod(key.shape) and size > 1:
        if row.reduce is not None:
            reduce = for_root(key.collective, row.reduce, key.root)(rank, size)
            program += binder.bind(reduce, _piece(row, size))
            if divisor != 1:
                program += binder.finish(row.owned((rank - key.root) % size, size))
        if row.spread is not None:
            program += binder.bind(for_root(key.collective, row.spread, key.root)(rank, size))
    signature = _signature(key, size)
    return Plan(
        key,
        tuple(program),
        binder.work_size,
        binder.stage_size,
        binder.overwrites or scale != 1,
        reduction,
        scale,
        divisor,
        signature,
        xxhash.xxh3_64_intdigest(f"{key.collective} {signature}".encode()),
    )


def _piece(row: Algorithm, size: int) -> int | None:
    """Return the most bytes of a message if p-1 of them are staged; None: no limit."""
    if size == 2 or not row.at_once(size):
        return None
    return max(1, STAGE_LIMIT // (size - 1) // PAGE) * PAGE


def _reduction(key: Key, row: Algorithm, size: int) -> tuple[RankOrderReduction, int, float]:
    """Return the reduction of contributions, and for a mean the plan's `scale` and `divisor`.

    If possible, a mean is divided before it is rounded, or while it is in a cache.
    """
    reduction, dtype = reduction_for(key.op, key.dtype), key.dtype
    if key.op is not ReduceOp.MEAN:
        return RankOrderReduction(reduction, dtype), 1, 1
    if size == 2 and (dtype.is_floating_point or dtype.is_complex):
        return RankOrderReduction(reduction, dtype, size), 1, 1
    if size > 2 and dtype in WIDER and row.at_once(size):
        return RankOrderReduction(reduction, dtype, size), 1, 1
    if size > 2 and dtype in NARROW:
        scale = 1 << (size - 1).bit_length()
        return RankOrderReduction(reduction, dtype), scale, size / scale
    # Half of a sum of two is as exact as the sum.
    return RankOrderReduction(reduction, dtype), 1, size


def _layout(key: Key, row: Algorithm, rank: int, size: int) -> Layout:
    elements = prod(key.shape)
    if key.collective == "all_to_all":
        slices = chunk_ranges(elements, size)
        return exchanged(rank, slices, slices)
    if key.collective in ("gather", "scatter") and rank != key.root:
        return held(rank, size, elements // size)
    return cut(chunk_ranges(elements, row.chunks(size)))


def _signature(key: Key, size: int) -> str:
    given = list(key.shape)
    if key.collective in ("all_gather", "gather"):  # of which the shape is that of the result
        given[0] //= size
    what = f"{str(key.dtype).removeprefix('torch.')} {given}"
    op = f", {key.op.value}" if key.op is not None else ""
    root = f", root {key.root}" if key.collective in ROOTED else ""
    tuning = f", tuning {key.tuning}" if key.tuning else ""
    return f"{what}{op}{root}, {key.algorithm}{_where(key.hosts)}{tuning}"


def _where(hosts: tuple[int, ...] | None) -> str:
    """Return the hosts of all ranks, as part of the signature; of many hosts, a hash."""
    if hosts is None:
        return ""
    listed = " ".join(map(str, hosts))
    if len(hosts) > LISTED:
        listed = f"{len(set(hosts))} hosts, {xxhash.xxh3_64_hexdigest(listed.encode())[:8]}"
    return f" ({listed})"


# ------------------------------------------------------------------------------
# A plan's reductions on the tensors of one call.


class Arithmetic:
    """Combines messages into `work`, and carries out the plan's local steps on it."""

    def __init__(self, plan: Plan, work: Tensor, backend: Backend) -> None:
        assert plan.reduction is not None
        self.stage = borrow_stage(backend, plan.stage_size) if plan.stage_size else None
        self._plan = plan
        self._flat = work.view(-1)
        self._backend = backend
        self._reduction = plan.reduction

    def combine(self, buffer: int, start: int, block: memoryview) -> None:
        """Reduce a block that came into the work buffer, from byte `start` on."""
        incoming = torch.frombuffer(block, dtype=self._flat.dtype)
        first = start // self._flat.itemsize
        own = self._flat[first : first + incoming.numel()]
        if incoming.numel() <= BLOCK or torch.get_num_threads() == 1:
            self._reduction.combine(own, incoming, out=own)
        else:  # in this thread: others would be waited for after every block
            for begin in range(0, incoming.numel(), BLOCK):
                part = own[begin : begin + BLOCK]
                self._reduction.combine(part, incoming[begin : begin + BLOCK], out=part)

    def carry_out(self) -> Iterator[Round]:
        """Yield the rounds of the plan; do the local steps between them on the way."""
        plan, flat = self._plan, self._flat
        if plan.scale != 1:
            flat.mul_(1 / plan.scale)
        for step in plan.program:
            if isinstance(step, Round):
                yield step
            elif isinstance(step, ReduceStaged):
                own = flat[step.start : step.stop]
                parts = [own if slot is None else self._staged(slot, own) for slot in step.slots]
                self._reduction.reduce(parts, own)
            else:
                divide_(flat[step.start : step.stop], plan.divisor)
        if self.stage is not None:  # which those that fail do not return
            return_stage(self._backend, self.stage)

    def _staged(self, slot: int, like: Tensor) -> Tensor:
        assert self.stage is not None
        return self.stage[slot : slot + like.nbytes].view(like.dtype)


# ------------------------------------------------------------------------------
# The staging buffer, where contributions wait to be reduced in rank order.
#
# Fresh memory costs about as much as the reduction, since the kernel clears every page at its first
# use. So a backend keeps the staging buffer of one collective for the next. None is larger than
# a plan's `STAGE_LIMIT`.

LARGEST_KEPT = 64 << 20  # bytes, of one stage for each backend
_KEY = "the stage that is kept"


def borrow_stage(backend: Backend, size: int) -> Tensor:
    """Return at least `size` bytes, uninitialized, which no other call uses."""
    kept = backend.kept.pop(_KEY, None)
    if isinstance(kept, Tensor) and kept.nbytes >= size:
        return kept
    return torch.empty(size, dtype=torch.uint8)


def return_stage(backend: Backend, stage: Tensor) -> None:
    """Keep it for the next collective, unless it is too large."""
    if stage.nbytes <= LARGEST_KEPT:
        backend.kept[_KEY] = stage
