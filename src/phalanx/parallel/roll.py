"""The roll call: each rank says what it is about to do, before it does it.

    rank 0   forward  | backward | over    | over
    rank 1   forward  | backward | forward | over        a column is one message of 16 bytes

So ranks that have no batch left know what the others wait for, and samples can be counted.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch

from phalanx.backends.base import Backend
from phalanx.collectives import all_gather
from phalanx.errors import DesyncError


class Turn(enum.IntEnum):
    """What a rank is about to do."""

    OVER = 0  # nothing: it has no batch left
    FORWARD = 1  # a forward pass, which begins with rank 0's buffers
    WEIGHING = 2  # a loss is weighted with a number of samples
    BACKWARD = 3  # a backward pass that averages gradients
    CATCHING_UP = 4  # accumulated gradients are averaged, outside a backward pass


_WORDS = {
    Turn.FORWARD: "begins a forward pass",
    Turn.WEIGHING: "weights a loss",
    Turn.BACKWARD: "begins a backward pass",
    Turn.CATCHING_UP: "averages accumulated gradients",
}


class Roll(NamedTuple):
    """What all ranks said.

    turn      what those do that have a batch; OVER if none has
    active    the ranks that have one, ascending
    samples   of each rank
    """

    turn: Turn
    active: list[int]
    samples: list[float]


def call_the_roll(turn: Turn, backend: Backend, samples: float = 0.0) -> Roll:
    """Say what this rank is about to do; blocks until all ranks have said what they are.

    Raises `DesyncError`, on every rank, if two of those that have a batch do different things.
    """
    row = torch.tensor([[float(turn), samples]], dtype=torch.float64)
    rows = all_gather(row, backend).tolist()
    turns = [Turn(int(row[0])) for row in rows]
    active = [rank for rank, theirs in enumerate(turns) if theirs is not Turn.OVER]
    if not active:
        return Roll(Turn.OVER, [], [])
    first = active[0]
    for rank in active:
        if turns[rank] is not turns[first]:
            raise DesyncError(
                f"rank {backend.rank}: DDP: rank {first} {_WORDS[turns[first]]} while rank {rank} "
                f"{_WORDS[turns[rank]]}. Every rank that has a batch has to do the same with it",
                rank=backend.rank,
                peer=rank if rank != backend.rank else first,
                op="DDP",
            )
    return Roll(turns[first], active, [row[1] for row in rows])
