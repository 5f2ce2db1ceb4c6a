"""What others have said of groups that are not made here yet: they may be ahead of this rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.backends.engine.failure import Failure
from phalanx.wire.messages import Ask

MOST_GROUPS = 4096  # the oldest are forgotten then


@dataclass
class Foretold:
    """Of one group: why it is broken, if it is; who has left it; and what they asked about it."""

    failure: Failure | None = None
    leavers: set[int] = field(default_factory=set)
    asks: dict[int, Ask] = field(default_factory=dict)


class FutureGroups:
    """The groups that others speak of, by their identity."""

    def __init__(self) -> None:
        self._known: dict[int, Foretold] = {}

    def of(self, group: int) -> Foretold:
        """What is known of a group, to be added to."""
        if group not in self._known:
            if len(self._known) >= MOST_GROUPS:
                del self._known[next(iter(self._known))]
            self._known[group] = Foretold()
        return self._known[group]

    def take(self, group: int) -> Foretold:
        """The group is made: what was known of it."""
        return self._known.pop(group, None) or Foretold()
