"""Checker: whether the members of a group do the same things in the same order.

Four things show that they do not, and each leads to the same question:

    a message that fits no receive        its fingerprint is another operation's
    a message that was not expected       the collective is over here, or needs nothing from there
    an epoch in shared memory             the other arrives with another rolling hash: they diverged
                                          here, or in an earlier collective
    a long wait                           both may wait for the other

        rank 1 (all_reduce #41)                     rank 2 (broadcast #41)
            | -- ASK #41, fingerprint, what it is -->  |  compares with its own #41
            | <-- FAILURE: both, in words ----------   |  breaks the group, tells everyone

Whoever is asked knows both sides. It compares as soon as it can: with what it has done, does, or
will do. So it need not be in the same operation, nor in a wait; and if it stays away, the one that
asked raises after a while all the same, with only its own side of the story.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from phalanx.core.failure import Failure
from phalanx.core.recorder import Record
from phalanx.errors import DesyncError
from phalanx.wire.control import Ask, shortened

if TYPE_CHECKING:
    from phalanx.core.group import Group
    from phalanx.core.work import Operation
ASK_EVERY = 0.5  # seconds that a collective waits before it asks whether the others are in it, too
ANSWER_WITHIN = 0.4  # seconds for the other side of a desync to say what it was doing


class Desync(NamedTuple):
    """The group will break: with the other side's words, or at `deadline` without them."""

    deadline: float
    failure: Failure


class Checker:
    """One rank's knowledge of what the members of one group are doing."""

    def __init__(self, group: Group) -> None:
        self.desync: Desync | None = None
        self._group = group
        self._recent: deque[Record] = deque(maxlen=64)
        self._unexpected: dict[int, Ask] = {}  # member -> what it asked about an operation to come

    def ended(self, record: Record) -> None:
        """A collective is over on this rank."""
        self._recent.append(record)

    def is_busy(self) -> bool:
        """Whether somebody has asked something, or ranks disagree."""
        return bool(self._unexpected) or self.desync is not None

    def check(self, operation: Operation) -> None:
        """A collective begins: compare it with what others have asked about it before."""
        if not self._unexpected:
            return
        for peer, ask in list(self._unexpected.items()):
            if ask.sequence <= operation.sequence:
                del self._unexpected[peer]
                if ask.sequence == operation.sequence:
                    self.asked(peer, ask)

    def ask(self, operation: Operation) -> None:
        """Ask those it waits for whether they are in this collective, too."""
        group = self._group
        ask = Ask(operation.sequence, operation.fingerprint, shortened(operation.describe()))
        for peer in operation.waits_for_global():
            group.engine.ask(peer, group.id, ask)

    def asked(self, peer: int, ask: Ask) -> None:
        """A member (a rank of the job) asks whether this rank is, was, or will be in that, too."""
        mine = self._known(ask.sequence)
        if mine is None:
            if ask.sequence >= self._group.next_number:
                self._unexpected[peer] = ask
        elif mine[0] != ask.fingerprint:
            group = self._group
            reason = f"{mine[1]} met {ask.what} from rank {group.name_of_global(peer)}"
            here = group.engine.rank
            group.fail(
                Failure(DesyncError, peer, here, reason, mine[1], ask.sequence, met=ask.what)
            )

    def met_another(self, operation: Operation, peer: int) -> None:
        """A message came from `peer` (of the job) that another operation has sent."""
        name = self._group.name_of_global(peer)
        mine = operation.describe()
        reason = f"{mine} met another operation, or other arguments, from rank {name}"
        self._open(peer, operation.sequence, operation.fingerprint, mine, reason)

    def has_diverged(self, operation: Operation, peer: int) -> None:
        """`peer` (a global rank) arrived at an epoch with another rolling hash."""
        name = self._group.name_of_global(peer)
        mine = operation.describe()
        reason = (
            f"{mine} met another operation, or other arguments, from rank {name}, there or in a "
            "collective before it"
        )
        # The oldest first: it answers where they have diverged.
        past = [
            Ask(record.sequence, record.fingerprint, shortened(record.describe()))
            for record in self._recent
        ]
        self._open(peer, operation.sequence, operation.fingerprint, mine, reason, past)

    def got_unexpected_message(self, number: int, peer: int) -> None:
        """A member sent something for a collective in which nothing was expected from it."""
        group = self._group
        fingerprint, mine = self._known(number) or (0, f"collective #{number}{group.suffix}")
        name = group.name_of_global(peer)
        reason = (
            f"{mine} was sent something by rank {name} that it did not expect: the two called "
            "different things, or with other arguments"
        )
        self._open(peer, number, fingerprint, mine, reason)

    def _open(
        self,
        peer: int,
        sequence: int,
        fingerprint: int,
        mine: str,
        reason: str,
        past: Iterable[Ask] = (),
    ) -> None:
        group = self._group
        if self.desync is not None or group.failure is not None:
            return
        failure = Failure(DesyncError, peer, group.engine.rank, reason, mine, sequence)
        self.desync = Desync(monotonic() + ANSWER_WITHIN, failure)
        for ask in (*past, Ask(sequence, fingerprint, shortened(mine))):
            group.engine.ask(peer, group.id, ask)

    def description_for(self, failure: Failure) -> str:
        """What this rank was doing when it, as `failure` says, did not do what others did."""
        known = self._known(failure.sequence)
        return known[1] if known is not None else ""

    def _known(self, sequence: int) -> tuple[int, str] | None:
        """The fingerprint and description of a collective of this rank, if it is remembered."""
        for operation in self._group.queued():
            if operation.sequence == sequence:
                return operation.fingerprint, operation.describe()
        for record in reversed(self._recent):
            if record.sequence == sequence:
                return record.fingerprint, record.describe()
        return None


# ------------------------------------------------------------------------------
# A rolling hash: all that a rank has been asked to do together with a group, as one word.
#
#     rolling hash after #n  =  (rolling hash before it + fingerprint of #n + 1) * odd    (mod 2^64)
#
# Ranks with equal rolling hashes have issued the same collectives in the same order; others have
# diverged, now or long ago. One step is a bijection: two that differ in the last collective alone
# never have equal rolling hashes. Of any others that differ, one pair in some 2^60 has.

_WORD = 2**64 - 1
_ODD = 0x9E3779B97F4A7C15  # spreads numbers over a word (Knuth 1998, multiplicative hashing)

EMPTY_HASH = 0


def extend_hash(rolling_hash: int, fingerprint: int) -> int:
    """The rolling hash after one more collective."""
    return (rolling_hash + fingerprint + 1) * _ODD & _WORD
