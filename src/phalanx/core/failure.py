"""The reason why a group is broken, in a form that can be sent to its members."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from phalanx import errors
from phalanx.core.call import Call, Members, called_function
from phalanx.errors import CollectiveTimeoutError, DesyncError, DistributedError, MisuseError
from phalanx.wire.control import FailureNotice, shortened

SOMETHING_ELSE = "something else, or the same with other arguments"


class Failure(NamedTuple):
    """The first failure in a group. Ranks are those of the whole job."""

    error: type[errors.DistributedError]
    culprit: int
    reporter: int
    reason: str
    signature: str = ""  # operation of the reporter
    sequence: int = -1
    met: str = ""  # of a desync: operation of the culprit instead, or what is known of it

    @classmethod
    def desync(cls, group: Members, culprit: int, number: int, mine: str, theirs: str) -> Failure:
        """Return that this rank and `culprit` called different things as collective `number`."""
        text = disagreement(group, number, {group.here: mine, culprit: theirs})
        return cls(DesyncError, culprit, group.here, text, mine, number, theirs)

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
        f"rank {group.name}: {call.describe()} on a backend that is closed",
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
    culprit, reporter = failure.culprit, failure.reporter
    if failure.error is DesyncError and failure.met and reporter != culprit:
        theirs = (description_of(failure.sequence) if culprit == group.here else "") or failure.met
        calls = {reporter: failure.signature, culprit: theirs}
        reason = disagreement(group, failure.sequence, calls)
        text = f"{mine}: {broken}{reason}" if later or calls.get(group.here) != mine else reason
        # If this rank has seen with which of the two it disagrees, that is the one.
        if culprit == group.here or reporter == diverged:
            culprit = reporter
    else:
        reason = failure.reason
        if reporter not in (group.here, culprit):
            reason = f"{reason} (as rank {reporter} of the job found)"
        text = f"{mine}: {broken}{reason}"
    seconds = now - call.started
    return failure.error(
        f"rank {group.name}: {text}",
        rank=group.rank,
        peer=group.to_local.get(culprit),
        op=call.name,
        sequence=call.sequence,
        seconds=seconds if failure.error is CollectiveTimeoutError else None,
    )


def disagreement(group: Members, number: int, calls: dict[int, str]) -> str:
    """Return, in a line for each of two (global) ranks, that they called different things."""
    ranks = sorted(calls, key=lambda rank: group.to_local.get(rank, rank))
    lines = [f"two ranks disagree in collective #{number}:"]
    lines += [f"  rank {group.name_of_global(rank)} called {calls[rank]}" for rank in ranks]
    functions = [called_function(calls[rank]) for rank in ranks]
    if functions[0] != functions[1]:
        missed = " and ".join(f"{name}()" for name in functions if name)
        lines.append(f"all ranks of the group have to call {missed}, at the same point")
    return "\n".join(lines)
