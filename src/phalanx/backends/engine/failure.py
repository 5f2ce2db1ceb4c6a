"""Why a group is broken, in a form that can be told to others."""

from __future__ import annotations

from typing import NamedTuple

from phalanx import errors
from phalanx.wire.messages import FailureNotice, shortened


class Failure(NamedTuple):
    """The first thing that went wrong in a group. Ranks are those of the whole job."""

    error: type[errors.DistributedError]
    culprit: int
    reporter: int
    reason: str
    signature: str = ""  # what the reporter was doing
    sequence: int = -1
    met: str = ""  # what the culprit was doing instead

    def notice(self) -> FailureNotice:
        """As it goes to the other members."""
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
        """As it came from another member."""
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
