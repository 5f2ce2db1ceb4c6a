"""Pipeline schedules: GPipe, 1F1B, interleaved 1F1B and zero bubble, as generators of actions.

All give the same gradients. They differ in how many activations are alive at a time, and in how
long ranks wait. In the pictures a line is a rank, a column a unit of time, and a dot is time in
which the rank waits: the bubble. A forward pass is drawn as long as a backward pass; the bubble's
share is the same if it is not. The zero bubble schedules cut a backward pass into two: B, the
gradient of the stage's input, for which another rank waits, and W, the gradients of its weights. W
fills the time in which the rank would wait. Each is drawn as long as a forward pass.

                          bubble's share            activations alive on rank i, of 1/v stage each
    gpipe                 (p-1) / (m+p-1)           m
    1f1b                  (p-1) / (m+p-1)           min(m, p-i)
    interleaved_1f1b      (p-1) / (v m + p-1)       min(v m, (v-1) g + 2(p-i-1) + 1)
    zb_h1                 (p-1) / (3 m + p-1)       min(m, p), until W
    zb_v                  (p-1) / (6 m + p-1)       min(2 m, m + 1 + i, 2 p), until W

Letters: p ranks, m micro-batches, v chunks on each rank; rank i, micro-batch j, chunk c; g is about
p: m divided by m // p, rounded up. The schedules with several chunks pay for a shorter bubble with
v times as many messages. The shares hold for m >= p, for zb_v from m = 2 p - 1 on; for fewer
micro-batches those of `interleaved_1f1b`, `zb_h1` and `zb_v` are larger (`ScheduleRow.bubble`).

The layers are cut into p * v stages. Stage s is chunk s // p of rank s % p. If a schedule is
V-shaped, it is a chunk of the ranks in turn from the first to the last and back. So with p = 2 and
v = 2

    stage                  0       1       2       3
    chunk                  0       0       1       1
    rank                   0       1       0       1
    rank, V-shaped         0       1       1       0

A schedule is one rank's part. It touches no tensor, socket, thread or clock, and may count on these
rules, which every executor keeps:

1. F of micro-batch j on stage s needs the result of F of j on stage s - 1; B of j on stage s needs
   that of B of j on stage s + 1, and on the last stage that of F of j itself. W of j on a stage
   needs B of j there.
2. A rank takes its actions one after the other, and waits before one whose input is not there.
3. Sending does not block.

    Y. Huang et al.: GPipe: Efficient training of giant neural networks using pipeline parallelism.
    NeurIPS 2019.
    D. Narayanan et al.: Memory-efficient pipeline-parallel DNN training. ICML 2021.
    D. Narayanan et al.: Efficient large-scale language model training on GPU clusters using
    Megatron-LM. SC 2021; section 2.2.
    P. Qi et al.: Zero bubble pipeline parallelism. ICLR 2024.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from msgspec import Struct


class ActionKind(enum.IntEnum):
    """F, forward; B, backward or, if that is cut in two, for the stage's input; W, for weights."""

    F = 0
    B = 1
    W = 2


class Action(NamedTuple):
    """One pass of one micro-batch through one of the rank's chunks: `F3`, `B1`, `F3.2`."""

    kind: ActionKind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.name}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


Schedule: TypeAlias = Iterator[Action]


def F(j: int, c: int = 0) -> Action:  # noqa: N802 - the papers' letters
    """Return the forward pass of micro-batch j through chunk c."""
    return Action(ActionKind.F, j, c)


def B(j: int, c: int = 0) -> Action:  # noqa: N802
    """Return the backward pass of micro-batch j through chunk c; without W, if there is one."""
    return Action(ActionKind.B, j, c)


def W(j: int, c: int = 0) -> Action:  # noqa: N802
    """Return the rest of B of micro-batch j through chunk c: the gradients of its weights."""
    return Action(ActionKind.W, j, c)


def gpipe(i: int, p: int, m: int, v: int = 1) -> Schedule:
    """All forward passes, then all backward passes, the last micro-batch first (Huang et al. 2019).

    With 3 stages and 4 micro-batches:

        rank 0   F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0
        rank 1   .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .
        rank 2   .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .
    """
    for j in range(m):
        yield F(j)
    for j in reversed(range(m)):
        yield B(j)


def one_f_one_b(i: int, p: int, m: int, v: int = 1) -> Schedule:
    """One forward, one backward in turn, as soon as there is one (Narayanan et al. 2021, ICML).

    So rank i holds the activations of p - i micro-batches and not of m. PipeDream-Flush in the
    paper. With 3 stages and 4 micro-batches:

        rank 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        rank 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        rank 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    """
    yield from _in_turn([F(j) for j in range(m)], [B(j) for j in range(m)], ahead=p - i - 1)


def interleaved_1f1b(i: int, p: int, m: int, v: int = 2) -> Schedule:
    """1F1B with v chunks on each rank, so that a pass takes a v-th of the time (ibid., SC 2021).

    Micro-batches go in groups of p: a group goes through all chunks, one chunk after the other,
    before the next one begins. With 2 stages, 4 micro-batches and 2 chunks:

        rank 0   F0 F1 F0.1 F1.1 F2   B0.1 F3   B1.1 F2.1 B0 F3.1 B1   .    B2.1 .    B3.1 B2 B3
        rank 1   .  F0 F1   F0.1 B0.1 F1.1 B1.1 F2   B0   F3 B1   F2.1 B2.1 F3.1 B3.1 B2   B3 .

    In the paper m has to be a multiple of p. If it is not, groups are as even as they can be, of p
    to 2p - 1 micro-batches, the larger first; no rank waits longer then. With a group of less than
    p, a rank would wait for the first rank to end its part of the group.
    """
    groups, forward, backward = even_sizes(m, max(1, m // p)), [], []
    for size, end in zip(groups, accumulate(groups), strict=True):
        group = range(end - size, end)
        forward += [F(j, c) for c in range(v) for j in group]
        backward += [B(j, c) for c in reversed(range(v)) for j in group]
    yield from _in_turn(forward, backward, ahead=(v - 1) * groups[0] + 2 * (p - i - 1))


def _in_turn(forward: list[Action], backward: list[Action], ahead: int) -> Schedule:
    """Yield `ahead` forward passes; then one forward and one backward in turn, and the rest."""
    ahead = min(ahead, len(forward))
    yield from forward[:ahead]
    for one_f, one_b in zip(forward[ahead:], backward, strict=False):
        yield one_f
        yield one_b
    yield from backward[len(forward) - ahead :]


def even_sizes(total: int, parts: int) -> list[int]:
    """Cut `total` into sizes that differ by at most one; the larger first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def zb_h1(i: int, p: int, m: int, v: int = 1) -> Schedule:
    """1F1B in which W waits for i more micro-batches, where it fills gaps (Qi et al. 2024, ZB-H1).

    No rank holds the activations of more than p micro-batches, as many as rank 0 in 1F1B.
    With 3 stages and 4 micro-batches:

        rank 0   F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
        rank 1   .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        rank 2   .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    """
    more = max(m - p, 0)
    order = "F " * (p - i) + "B F " * i + "B W F " * more + "B W " * (p - i) + "W " * i
    yield from _numbered(order, m)


def zb_v(i: int, p: int, m: int, v: int = 2) -> Schedule:
    """Two chunks in a V: the layers go from the first rank to the last, and back (ibid., ZB-V).

    So a micro-batch's forward pass ends on rank 0, where its backward pass begins at once. Half as
    long a bubble as that of ZB-H1, for as many activations, as 2 p halves of stages are p.
    With 2 stages, 3 micro-batches and 2 chunks:

        rank 0   F0 F1 F2   F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 B0 W0   F2.1 B2.1 W2.1 B1   W1 B2 W2   .
        rank 1   .  F0 F0.1 F1   F1.1 B0.1 W0.1 F2   B0   W0 F2.1 B1.1 W1.1 B1   B2.1 B2 W1 W2.1 W2
    """
    every = max(m, 2 * p - 1)  # shorter runs are this one without the last micro-batches
    order = (
        "F0 " * (2 * (p - i) - 1)
        + "F1 F0 " * i
        + "F1 B1 W1 " * (p - i)
        + "F0 B0 W0 F1 B1 W1 " * (every - 2 * p + i + 1)
        + "B0 W0 F1 B1 W1 " * (p - i - 1)
        + "B0 B1 " * i
        + "B0 W0 " * (p - i)
        + "W1 " * i
        + "W0 " * i
    )
    yield from _numbered(order, m)


def _numbered(order: str, m: int) -> Schedule:
    """Yield actions such as `F B F1`, each of the next micro-batch of its kind, up to m."""
    begun: Counter[str] = Counter()
    for name in order.split():
        if begun[name] < m:
            yield Action(ActionKind[name[0]], begun[name], int(name[1:] or 0))
        begun[name] += 1


class ScheduleRow(NamedTuple):
    """A schedule.

    generator     rank i of p, m micro-batches, v chunks -> its actions
    waits         p, m, v -> number of passes of a chunk a rank waits for, if all take equally long
    passes        of each micro-batch through a chunk: F, B, and W if backward is cut in two
    chunks        on each rank, by default
    more_chunks   whether a rank may have more than that
    v_shaped      whether the odd chunks go from the last rank to the first
    """

    generator: Callable[[int, int, int, int], Schedule]
    waits: Callable[[int, int, int], int]
    passes: int = 2
    chunks: int = 1
    more_chunks: bool = False
    v_shaped: bool = False

    def bubble(self, p: int, m: int, v: int = 1) -> float:
        """Return the share of the time in which ranks wait, if all passes took equally long."""
        waits = self.waits(p, m, v)
        return waits / (self.passes * v * m + waits)

    def rank_of(self, stage: int, p: int) -> int:
        """Return the rank that a stage is on."""
        c, i = divmod(stage, p)
        return p - 1 - i if self.v_shaped and c % 2 else i


SCHEDULES: Mapping[str, ScheduleRow] = MappingProxyType(
    {
        "gpipe": ScheduleRow(gpipe, lambda p, m, v: 2 * (p - 1)),
        "1f1b": ScheduleRow(one_f_one_b, lambda p, m, v: 2 * (p - 1)),
        "interleaved_1f1b": ScheduleRow(
            interleaved_1f1b,
            lambda p, m, v: 2 * (p - 1 + (v - 1) * max(0, p - m)),
            chunks=2,
            more_chunks=True,
        ),
        "zb_h1": ScheduleRow(zb_h1, lambda p, m, v: p - 1 + max(0, p - m), passes=3),
        "zb_v": ScheduleRow(
            zb_v,
            lambda p, m, v: max(p - 1, 4 * p - 2 - 2 * m),
            passes=3,
            chunks=2,
            v_shaped=True,
        ),
    }
)
"""By the name that a configuration gives them."""


class PipelineBubble(Struct, frozen=True):
    """The share of the ranks' time in which they did not compute.

    measured   of the last train_step
    theory     of its schedule: stages take equally long, B as long as W, messages no time
    """

    measured: float
    theory: float

    def __str__(self) -> str:
        return f"bubble {self.measured:.1%}, in theory {self.theory:.1%}"
