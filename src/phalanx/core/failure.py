"""The reason why a group is broken, in a form that can be sent to its members."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from phalanx import errors
from phalanx.core.call import Call, Members
from phalanx.errors import CollectiveTimeoutError, DesyncError, DistributedError, MisuseError
from phalanx.wire.control import FailureNotice, shortened


class Failure(NamedTuple):
    """The first failure in a group. Ranks are those of the whole job."""

    error: type[errors.DistributedError]
    culprit: int
    reporter: int
    reason: str
    signature: str = ""  # operation of the reporter
    sequence: int = -1
    met: str = ""  # operation of the culprit instead

    def notice(self) -> FailureNotice:
        """Return it as sent to the other members."""
        return FailureNotice(
            self.error.__name__,
            self.culprit,
            self.reporter,
            shortened(self.reason),
            shortened(self.signature),
            self.sequence,
            shortened(self.met),
        )

    @classmethod
    def from_notice(cls, notice: FailureNotice) -> Failure:
        """Return the failure in another member's notice."""
        kind = getattr(errors, notice.error, errors.DistributedError)
        if not (isinstance(kind, type) and issubclass(kind, errors.DistributedError)):
            kind = errors.DistributedError
        return cls(
            kind,
            notice.culprit,
            notice.reporter,
            notice.reason,
            notice.signature,
            notice.sequence,
            notice.met,
        )


# ------------------------------------------------------------------------------
# Error texts: a failure, as seen from one operation of one rank.


def closed_error(call: Call, group: Members) -> MisuseError:
    """Return the error of a call on a backend that is closed."""
    return MisuseError(
        f"rank {group.rank}: {call.describe()} on a backend that is closed",
        rank=group.rank,
        op=call.name,
        sequence=call.sequence,
    )


def forked_error(rank: int, process: int) -> MisuseError:
    """Return the error of every call, in a forked child, on its parent's backends."""
    return MisuseError(
        f"rank {rank}: this process ({os.getpid()}) was forked from rank {rank} (process "
        f"{process}), and cannot use what that has made: make a backend anew here, or start it by "
        "spawn instead of fork",
        rank=rank,
    )


def error_for(
    failure: Failure,
    call: Call,
    group: Members,
    *,
    now: float,
    description_of: Callable[[int], str],
    diverged: int | None = None,
    later: bool = False,
) -> DistributedError:
    """Return the error of a call that fails with its group.

    description_of   describes this rank's collective of some number, if it is known
    diverged         the global rank that has been seen to diverge from this one
    later            whether the group had failed before
    """
    broken = "the group is broken: " if later else ""
    mine = call.describe()
    if failure.error is DesyncError and failure.signature:
        culprit, own, reason = _disagreement(failure, group, description_of, diverged)
        text = reason if own == mine and not later else f"{mine}: {broken}{reason}"
    else:
        culprit, reason = failure.culprit, failure.reason
        if failure.reporter not in (group.here, culprit):
            reason = f"{reason} (as rank {failure.reporter} of the job found)"
        text = f"{mine}: {broken}{reason}"
    seconds = now - call.started
    return failure.error(
        f"rank {group.rank}: {text}",
        rank=group.rank,
        peer=group.to_local.get(culprit),
        op=call.name,
        sequence=call.sequence,
        seconds=seconds if failure.error is CollectiveTimeoutError else None,
    )


def _disagreement(
    failure: Failure,
    group: Members,
    description_of: Callable[[int], str],
    diverged: int | None,
) -> tuple[int, str, str]:
    """Return, for a `DesyncError` here, the other rank, this rank's operation, and the sentence."""
    here = group.here
    if failure.culprit == here:
        other, theirs = failure.reporter, failure.signature
        own = failure.met or description_of(failure.sequence)
        name = group.name_of_global(other)
        return other, own, f"{own or 'what this rank did'} met {theirs} from rank {name}"
    other, own = failure.culprit, failure.signature
    name = group.name_of_global(other)
    reason = f"{own} met {failure.met} from rank {name}" if failure.met else failure.reason
    if failure.reporter == here:
        return other, own, reason
    # Two others disagree. If this rank has seen which of them it disagrees with, that is the one.
    blamed = failure.reporter if failure.reporter == diverged else other
    return blamed, "", f"on rank {group.name_of_global(failure.reporter)} {reason}"
