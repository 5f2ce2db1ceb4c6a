"""The words of errors: what a failure is called, as it looks from one operation of one rank."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from phalanx.errors import CollectiveTimeoutError, DesyncError, DistributedError, MisuseError

if TYPE_CHECKING:
    from phalanx.backends.engine.failure import Failure
    from phalanx.backends.engine.group import Group
    from phalanx.backends.engine.operation import Operation


def closed_error(operation: Operation) -> MisuseError:
    """The error of an operation on a backend that is closed."""
    rank = operation.group.rank
    return MisuseError(
        f"rank {rank}: {operation.describe()} on a backend that is closed",
        rank=rank,
        op=operation.name,
        sequence=operation.sequence,
    )


def error_for(failure: Failure, operation: Operation, *, later: bool = False) -> DistributedError:
    """The error of an operation that fails with its group; `later`: that had failed before."""
    group = operation.group
    broken = "the group is broken: " if later else ""
    mine = operation.describe()
    if failure.error is DesyncError and failure.signature:
        culprit, own, reason = _disagreement(failure, group)
        text = reason if own == mine and not later else f"{mine}: {broken}{reason}"
    else:
        culprit, reason = failure.culprit, failure.reason
        if failure.reporter not in (group.engine.rank, culprit):
            reason = f"{reason} (as rank {failure.reporter} of the job found)"
        text = f"{mine}: {broken}{reason}"
    return failure.error(
        f"rank {group.rank}: {text}",
        rank=group.rank,
        peer=group.to_local.get(culprit),
        op=operation.name,
        sequence=operation.sequence,
        seconds=monotonic() - operation.started
        if failure.error is CollectiveTimeoutError
        else None,
    )


def _disagreement(failure: Failure, group: Group) -> tuple[int, str, str]:
    """For a `DesyncError` on this rank: the other one, what this one did, and the sentence."""
    here = group.engine.rank
    if failure.culprit == here:
        other, theirs = failure.reporter, failure.signature
        own = failure.met or group.agreement.words_for(failure)
        name = group.name_of_whole(other)
        return other, own, f"{own or 'what this rank did'} met {theirs} from rank {name}"
    other, own = failure.culprit, failure.signature
    name = group.name_of_whole(other)
    reason = f"{own} met {failure.met} from rank {name}" if failure.met else failure.reason
    if failure.reporter == here:
        return other, own, reason
    return other, "", f"on rank {group.name_of_whole(failure.reporter)} {reason}"
