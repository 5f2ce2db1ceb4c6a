"""The agreement of a pipeline's ranks before they send anything else.

Once, that they have the same pipeline. At the beginning of each step, that all begin the same call,
with equal numbers of samples and equal metadata. If a rank finds a problem, every rank raises:
nothing else has been sent, and the group stays usable.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from math import isnan, nan
from typing import NamedTuple, NoReturn

import msgspec
import torch
from torch import nn
from xxhash import xxh3_64_intdigest

from phalanx import errors
from phalanx.collectives import all_gather, all_gather_object
from phalanx.core.backend import Backend
from phalanx.core.device import device_kinds
from phalanx.errors import DesyncError, DistributedError, MisuseError, SizeMismatchError
from phalanx.parallel.guards import check_agreement, refuse
from phalanx.pipeline.stage_p2p import MessageLayout, Tree

CALLS = ("train_step", "evaluate", "join")
NO_BATCH = -1  # in place of a number of samples


class Begun(NamedTuple):
    """The ranks' agreement about a step: the batch's samples, a hash of all metadata, the batch's
    weight, NaN if losses are means, and the scale of losses that are sums.
    """

    samples: int
    metadata: int
    weight: float
    scale: float = 1.0


def check_same_plan(
    lines: Sequence[str], averages: int, problem: Exception | None, backend: Backend
) -> int:
    """Raise on every rank if one has a problem, or unless all have the same lines.

    averages   of this rank's layers, as of `check_averaging`

    Returns the largest of them. Costs messages of 16 and 8 bytes; the lines are exchanged only
    when they differ. The problem is raised on the rank that has it, an error of its kind on the
    others; different lines are a `DesyncError` that names the first.
    """
    rows = _exchange([averages], "Pipeline", "the making of a pipeline", problem, backend)
    remedy = "Give every rank the same layers, stages and configuration"
    check_agreement(lines, backend, op="Pipeline", remedy=remedy)
    return max(averages for (averages,) in rows)


def handshake(
    call: str,
    samples: tuple[int, int],
    metadata: int,
    weight: float,
    problem: Exception | None,
    backend: Backend,
    *,
    timeout: float | None = None,
) -> Begun:
    """Begin a step together. Blocks.

    call       one of `CALLS`
    samples    in this rank's inputs and targets; NO_BATCH if it has none
    metadata   this rank's `step_metadata`
    weight     that this rank was given; NaN for none. With 0 on one of them there is no batch

    Costs a message of 48 bytes. Raises on every rank: if one has a problem, an error of its kind;
    `DesyncError` for different calls or weights; `SizeMismatchError` if batches differ.
    """
    rank, number = backend.rank, CALLS.index(call)
    bits = int(torch.tensor(weight, dtype=torch.float64).view(torch.int64))
    mine = [number, *samples, metadata, bits]
    rows = _exchange(mine, call, f"the beginning of {call}", problem, backend, timeout)
    first_call, count, *_ = rows[0]
    for peer, row in enumerate(rows):
        if row[0] != first_call:
            began = f"rank 0 began {CALLS[first_call]} while rank {peer} began {CALLS[row[0]]}"
            other, rule = peer if peer != rank else 0, "Every rank has to make the same calls"
            refuse("Pipeline", rank, f"{began}. {rule}", DesyncError, other)
    weights = torch.tensor([row[4] for row in rows]).view(torch.float64).tolist()
    given = {peer: theirs for peer, theirs in enumerate(weights) if not isnan(theirs)}
    if len(set(given.values())) > 1:
        refuse("Pipeline", rank, f"the weights of a batch differ, by rank: {given}", DesyncError)
    weight = next(iter(given.values()), nan)
    if weight == 0:
        return Begun(0, 0, weight)
    for peer, row in enumerate(rows):
        for what, theirs in (("inputs", row[1]), ("targets", row[2])):
            if theirs not in (NO_BATCH, count):
                differ = (
                    f"the inputs on rank 0 have {count} samples, the {what} on rank {peer} "
                    f"{theirs}. Give all ranks the same batch, or None where it is not used"
                )
                refuse(call, rank, differ, SizeMismatchError)
    return Begun(count, _digest(number, *(row[3] for row in rows)), weight)


def step_metadata(module: nn.Module, inputs: Tree) -> int:
    """Return a hash of this rank's settings that shapes and dtypes in a step may depend on.

    Modes of submodules, frozen parameters, default dtype, autocast; and of the inputs, all but the
    number of samples. If it differs, layouts are sent anew.
    """
    layout, _ = MessageLayout.of(inputs, "inputs")
    kinds = sorted(device_kinds())
    return _digest(
        [submodule.training for submodule in module.modules()],
        [parameter.requires_grad for parameter in module.parameters()],
        str(torch.get_default_dtype()),
        [str(torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)],
        repr(layout.structure),
        [(spec.dtype, spec.shape[1:], spec.needs_grad) for spec in layout.specs],
    )


def _digest(*parts: object) -> int:
    """Return a hash of plain values, as an int that a tensor can hold."""
    return xxh3_64_intdigest(msgspec.json.encode(parts)) >> 1


def _exchange(
    row: list[int],
    call: str,
    doing: str,
    problem: Exception | None,
    backend: Backend,
    timeout: float | None = None,
) -> list[list[int]]:
    """Return every rank's row; raise on all of them if a rank has a problem."""
    try:
        mine = torch.tensor([[int(problem is not None), *row]])
        rows: list[list[int]] = all_gather(mine, backend, timeout=timeout).tolist()
    except DistributedError as error:
        rank = backend.rank
        error.message = f"{error.message.rstrip('.')}. Pipeline: rank {rank} was in {doing}"
        raise
    if any(has_problem for has_problem, *_ in rows):
        _raise_problem(call, problem, backend)
    return [rest for _, *rest in rows]


def _raise_problem(call: str, problem: Exception | None, backend: Backend) -> NoReturn:
    """Raise the error of this rank, or one like that of the first rank that has one."""
    mine = None if problem is None else [type(problem).__name__, str(problem)]
    gathered = all_gather_object(mine, backend)
    if problem is not None:
        if isinstance(problem, DistributedError) and not problem.message.startswith("rank "):
            problem.message = f"rank {backend.rank}: {call}: {problem.message}"
            problem.rank = backend.rank
        raise problem
    peer, name, text = next((peer, *said) for peer, said in enumerate(gathered) if said is not None)  # type: ignore[misc]
    if not text.startswith("rank "):
        text = f"rank {peer}: {text}"
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if kind in (ValueError, TypeError):
        raise kind(f"rank {backend.rank}: {call}: {text}")
    if not (isinstance(kind, type) and issubclass(kind, DistributedError)):
        kind = MisuseError
    raise kind(f"rank {backend.rank}: {call}: {text}", rank=backend.rank, peer=peer, op=call)
