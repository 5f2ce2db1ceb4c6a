"""A plan: a schedule bound to one size of tensor, made once and used for every call of that kind.

    schedule   Send(peer, chunk)  Combine(peer, chunk)     chunk numbers   (schedules/)
    plan       SendBytes(peer, start, stop) ...            byte ranges     (here, binder.py)
    operation  the same, with memory and a sequence number                 (backends/)

Which bytes a chunk is says the layout (layout.py).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import xxhash

from phalanx.backends.engine.rounds import Round
from phalanx.collectives.binder import Binder, Finish, Fold
from phalanx.collectives.chunks import chunk_ranges
from phalanx.collectives.layout import Cut, Exchanged, Held, Layout
from phalanx.collectives.reduce_op import (
    NARROW,
    WIDER,
    ReduceOp,
    Reduction,
    mean_of_two,
    reduction_for,
)
from phalanx.collectives.schedules import ROOTED, Algorithm, for_root, row_for

PAGE = 4096  # bytes, a multiple of every itemsize
STAGE_LIMIT = 48 << 20  # bytes of contributions that are held aside at a time


class Mean(enum.Enum):
    """How a sum becomes a mean. Where it can be, it is divided before it is rounded."""

    SUMMED = "owners divide the sums that they have"
    SCALED = "every contribution is scaled down first, so that sums of a narrow dtype are finite"
    FOLDED = "all contributions are folded at once, in a wider dtype, and divided there"
    PAIRED = "there are two contributions: combining them is taking their mean"


class Scale(NamedTuple):
    """Before anything else, every element is divided by `divisor`, a power of two.

    So the sums on the way to a mean stay in a range that is narrow, as float16's is.
    """

    divisor: int


PlanStep = Round | Scale | Fold | Finish

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
    divisor: float  # of what `Finish` divides
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
    fold_means = mean is Mean.FOLDED
    binder = Binder(rank, _layout(key, row, rank, size), key.dtype.itemsize, fold_means=fold_means)
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
    """Of how many bytes a message is at most: where p-1 of them are held aside, not too many."""
    if size == 2 or not row.at_once(size):
        return None
    return max(1, STAGE_LIMIT // (size - 1) // PAGE) * PAGE


def _way_to_a_mean(key: Key, row: Algorithm, size: int) -> Mean | None:
    if key.op is not ReduceOp.MEAN:
        return None
    if size == 2:  # where half of a sum is as exact as the sum, if that is finite
        return Mean.PAIRED if key.dtype in NARROW else Mean.SUMMED
    if key.dtype in WIDER and row.at_once(size):
        return Mean.FOLDED
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
    """The hosts of all ranks, which have to think alike of them; of many, a hash."""
    if hosts is None:
        return ""
    listed = " ".join(map(str, hosts))
    if len(hosts) > LISTED:
        listed = f"{len(set(hosts))} hosts, {xxhash.xxh3_64_hexdigest(listed.encode())[:8]}"
    return f" ({listed})"
