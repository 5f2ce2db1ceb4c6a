"""What the ranks of a pipeline tell each other before they send anything else.

Once, that they have been given the same pipeline; and at the beginning of each step, that all begin
the same one, how many samples it has, and what the shapes in it may depend on. A rank that finds
something wrong says so here: then every rank raises, nothing has been sent, and the group is whole.
"""

from __future__ import annotations

import builtins
import enum
from typing import NamedTuple, NoReturn

import msgspec
import torch
from xxhash import xxh3_64_intdigest

from phalanx import errors
from phalanx.collectives import all_gather, all_gather_object
from phalanx.collectives.check_same import difference
from phalanx.core.backend import Backend
from phalanx.errors import DesyncError, DistributedError, MisuseError, SizeMismatchError

NO_BATCH = -1


class Turn(enum.IntEnum):
    """What a rank begins."""

    TRAIN = 0
    EVALUATE = 1


_CALLS = {Turn.TRAIN: "train_step", Turn.EVALUATE: "evaluate"}


class Beginning(NamedTuple):
    """What all have agreed on.

    samples         in the batch
    circumstances   a hash of what shapes may depend on, over all ranks
    """

    samples: int
    circumstances: int


def digest_of(*parts: object) -> int:
    """A hash of plain values, as an int that a tensor can hold."""
    return xxh3_64_intdigest(msgspec.json.encode(parts)) >> 1


def check_same_plan(lines: list[str], problem: Exception | None, backend: Backend) -> None:
    """Raise on every rank if one has a problem, or unless all have the same lines.

    Costs messages of 8 and 16 bytes; the lines are exchanged only when they differ. The
    problem is raised on the rank that has it, an error of its kind on the others; different lines
    are a `DesyncError` that names the first.
    """
    rows = _gathered([int(problem is not None)], "the making of a pipeline", backend)
    if any(flag for [flag] in rows):
        _raise_the_problem("Pipeline", problem, backend)
    differ = difference(lines, backend, end="nothing more")
    if differ is None:
        return
    raise DesyncError(
        f"rank {backend.rank}: the ranks' pipelines differ: {differ.text}. Give every rank the "
        "same layers, stages and configuration",
        rank=backend.rank,
        peer=differ.odd[0],
        op="Pipeline",
    )


def begin(
    turn: Turn,
    samples: tuple[int, int],
    circumstances: int,
    problem: Exception | None,
    backend: Backend,
    *,
    timeout: float | None = None,
) -> Beginning:
    """Begin a step together; blocks until all ranks have come.

    samples         in this rank's inputs and targets; NO_BATCH where it has none
    circumstances   a hash of what shapes may depend on, on this rank

    Costs a message of 40 bytes. Raises on every rank: if one has a problem, an error of its kind;
    `DesyncError` if one trains and another evaluates; `SizeMismatchError` if batches differ.
    """
    rank, call = backend.rank, _CALLS[turn]
    mine = [int(problem is not None), turn, *samples, circumstances]
    rows = _gathered(mine, f"the beginning of {call}", backend, timeout)
    if any(row[0] for row in rows):
        _raise_the_problem(call, problem, backend)
    for peer, row in enumerate(rows):
        if row[1] != rows[0][1]:
            raise DesyncError(
                f"rank {rank}: Pipeline: rank 0 began {_CALLS[Turn(rows[0][1])]} while rank {peer} "
                f"began {_CALLS[Turn(row[1])]}. Every rank has to make the same calls",
                rank=rank,
                peer=peer if peer != rank else 0,
                op=call,
            )
    told = {
        f"{what} on rank {peer}": row[place]
        for peer, row in enumerate(rows)
        for place, what in ((2, "inputs"), (3, "targets"))
        if row[place] != NO_BATCH
    }
    count = rows[0][2]
    for where, theirs in told.items():
        if theirs != count:
            raise SizeMismatchError(
                f"rank {rank}: {call}: the inputs on rank 0 have {count} samples, the {where} "
                f"{theirs}. Give all ranks the same batch, or None where it is not used",
                rank=rank,
                op=call,
            )
    return Beginning(count, digest_of(turn, *(row[4] for row in rows)))


def _gathered(
    row: list[int], doing: str, backend: Backend, timeout: float | None = None
) -> list[list[int]]:
    try:
        rows = all_gather(torch.tensor([row]), backend, timeout=timeout)
    except DistributedError as error:
        rank = backend.rank
        error.message = f"{error.message.rstrip('.')}. Pipeline: rank {rank} was in {doing}"
        raise
    everyone: list[list[int]] = rows.tolist()
    return everyone


def _raise_the_problem(call: str, problem: Exception | None, backend: Backend) -> NoReturn:
    """The error of this rank, or one like that of the first rank that has one."""
    mine = None if problem is None else [type(problem).__name__, str(problem)]
    told = all_gather_object(mine, backend)
    if problem is not None:
        if isinstance(problem, DistributedError) and not problem.message.startswith("rank "):
            problem.message = f"rank {backend.rank}: {call}: {problem.message}"
            problem.rank = backend.rank
        raise problem
    peer, name, text = next((peer, *said) for peer, said in enumerate(told) if said is not None)  # type: ignore[misc]
    if not text.startswith("rank "):
        text = f"rank {peer}: {text}"
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if kind in (ValueError, TypeError):
        raise kind(f"rank {backend.rank}: {call}: {text}")
    if not (isinstance(kind, type) and issubclass(kind, DistributedError)):
        kind = MisuseError
    raise kind(f"rank {backend.rank}: {call}: {text}", rank=backend.rank, peer=peer, op=call)
