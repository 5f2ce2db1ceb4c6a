"""The words in which pipeline schedules are written: `F3`, `B1`, and in chunks `F3.1`.

The layers are cut into p stages, or with v chunks a rank into p * v of them, which lie on the ranks
like cards that are dealt: stage s is chunk s // p of rank s % p. So with p = 2 and v = 2

    stage      0       1       2       3
    rank       0       1       0       1
    chunk      0       0       1       1

A schedule is one rank's part: a generator of actions. It touches no tensor, socket, thread or
clock. Every executor keeps these rules, and every schedule may count on them:

1. F of micro-batch j on stage s needs what F of j on stage s - 1 gave; B of j on stage s needs what
   B of j on stage s + 1 gave, and on the last stage F of j itself.
2. A rank takes its actions one after the other, and waits before one whose input is not there.
3. Sending waits for nobody.

Letters: p ranks, m micro-batches, v chunks on each rank; rank i, micro-batch j, chunk c.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

__all__ = ["Action", "B", "F", "Kind", "Schedule"]


class Kind(enum.IntEnum):
    """Forward or backward."""

    F = 0
    B = 1


class Action(NamedTuple):
    """One pass of one micro-batch through one of the rank's chunks."""

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.name}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


Schedule: TypeAlias = Iterator[Action]


def F(j: int, c: int = 0) -> Action:  # noqa: N802 - the papers' letters
    """The forward pass of micro-batch j through chunk c."""
    return Action(Kind.F, j, c)


def B(j: int, c: int = 0) -> Action:  # noqa: N802
    """The backward pass of micro-batch j through chunk c."""
    return Action(Kind.B, j, c)
