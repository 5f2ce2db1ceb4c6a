"""Checker: compares the members of a group: they have to do the same things in one order.

Four signs show that they do not, and each leads to the same question:

    a message that fits no receive        its fingerprint is another operation's
    a message that was not expected       the collective is over here, or needs nothing from there
    an epoch in shared memory             a peer arrives with another rolling hash: the two diverged
                                          here, or in an earlier collective
    a long wait                           each may wait for the other

        rank 1 (all_reduce #41)                     rank 2 (broadcast #41)
            | -- ASK #41, fingerprint, its words --->  |  compares with its own #41
            | <-- FAILURE: both, in words ----------   |  breaks the group, tells everyone

The rank that is asked knows both sides. It compares as soon as it can: with its past, present or
next operation. So it need not be in the same operation, nor in a wait. If it does not answer, the
rank that asked raises after a while all the same, and describes only its own side.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from phalanx.core.call import Call, CallSite, Members
from phalanx.core.failure import SOMETHING_ELSE, Failure
from phalanx.wire.control import Ask, shortened

KEPT = 64  # calls of a group that are remembered when they are over
ANSWER_WITHIN = 2.0  # seconds for the other side of a desync to describe its operation


# A rolling hash: all collectives that a rank has begun in a group, as one word.
#
#     rolling hash after #n  =  (rolling hash before it + fingerprint of #n + 1) * odd    (mod 2^64)
#
# Ranks with equal rolling hashes have issued the same collectives in the same order; others have
# diverged, now or long ago. One step is a bijection: two that differ in the last collective alone
# never have equal rolling hashes. Of any others that differ, one pair in some 2^60 has.

EMPTY_HASH = 0
WORD = 2**64 - 1
ODD = 0x9E3779B97F4A7C15  # spreads numbers over a word (Knuth 1998, multiplicative hashing)


class Desync(NamedTuple):
    """A group that will break: with the other side's words, or at `deadline` without them."""

    deadline: float
    failure: Failure


class Checker:
    """One rank's knowledge of the operations of one group's members.

    now    the engine's clock
    tell   sends a member (a global rank) a question
    fail   breaks the group
    strict  whether the call site is part of a collective's fingerprint

    issued       number of collectives that the group has begun; `rolling_hash` is of all of them
    calls        those of them that are not over, and the last finished ones, in their order
    early_asks   members' questions about a collective to come
    """

    def __init__(
        self,
        members: Members,
        now: Callable[[], float],
        tell: Callable[[int, Ask], None],
        fail: Callable[[Failure], None],
        *,
        strict: bool = False,
    ) -> None:
        self.issued = 0
        self.rolling_hash = EMPTY_HASH
        self.calls: deque[Call] = deque()
        self.early_asks: dict[int, Ask] = {}
        self.desync: Desync | None = None
        self.broken = False  # whether the group is, for any reason
        self._marks: dict[str, int] = {}  # operations since the last collective, and their numbers
        self._members = members
        self._now = now
        self._tell = tell
        self._fail = fail
        self._strict = strict

    def next_call(
        self,
        name: str,
        signature: str,
        fingerprint: int,
        site: CallSite,
        started: float,
        timeout: float,
    ) -> Call:
        """Return the next collective of this group, once its operation is known."""
        if self._marks:
            done = ", ".join(
                what if n == 1 else f"{n} times {what}" for what, n in self._marks.items()
            )
            signature = f"{signature}, after {done}" if signature else f"after {done}"
            fingerprint ^= xxh3_64_intdigest(done.encode())
            self._marks.clear()
        if self._strict:
            fingerprint ^= xxh3_64_intdigest(str(site).encode())
        sequence, calls, suffix = self.issued, self.calls, self._members.suffix
        rolling = (self.rolling_hash + fingerprint + 1) * ODD & WORD
        call = Call(name, sequence, signature, suffix, site, started, timeout, fingerprint, rolling)
        calls.append(call)
        self.issued, self.rolling_hash = sequence + 1, rolling
        while len(calls) > KEPT and calls[KEPT].ended:  # they end in their order
            calls.popleft()
        return call

    def mark(self, what: str) -> None:
        """Include `operation` in the next collective's hash: it was done before that."""
        self._marks[what] = self._marks.get(what, 0) + 1

    def compare_early(self, call: Call) -> None:
        """Compare a collective that begins with the questions that came about it before."""
        for peer, ask in list(self.early_asks.items()):
            if ask.sequence <= call.sequence:
                del self.early_asks[peer]
                if ask.sequence == call.sequence:
                    self.asked(peer, ask)

    def attend(self, now: float) -> float:
        """Break the group if the other side of a desync is silent; return when to look again."""
        desync = self.desync
        if desync is None:
            return math.inf
        if now >= desync.deadline:
            self._fail(desync.failure)
        return desync.deadline

    def ask(self, call: Call, peers: Iterable[int]) -> None:
        """Ask the (global) ranks that a collective waits for whether they are in it, too."""
        ask = Ask(call.sequence, call.fingerprint, shortened(call.describe()))
        for peer in peers:
            self._tell(peer, ask)

    def tell_neighbour(self, call: Call) -> None:
        """Tell the next member the rolling hash at a collective that another library does whole.

        It compares in that collective, or afterwards. No rank waits for an answer.
        """
        members = self._members
        peer = members.ranks[(members.rank + 1) % members.size]
        what = shortened(call.describe())
        self._tell(peer, Ask(call.sequence, call.fingerprint, what, 0, call.rolling_hash))

    def asked(self, peer: int, ask: Ask) -> None:
        """Take a (global) rank's question whether this rank is, was, or will be in that, too."""
        members, mine = self._members, self._known(ask.sequence)
        if mine is None:
            if ask.sequence >= self.issued:
                self.early_asks[peer] = ask
        elif mine.fingerprint != ask.fingerprint:
            self._fail(Failure.desync(members, peer, ask.sequence, mine.describe(), ask.what))
        elif ask.rolling_hash and ask.rolling_hash != mine.rolling_hash:
            self.has_diverged(mine, peer)

    def met_another(self, call: Call, peer: int) -> None:
        """Take a message from `peer` (a global rank) that another collective has sent."""
        self._open(peer, call, SOMETHING_ELSE)

    def has_diverged(self, call: Call, peer: int) -> None:
        """Take `peer` (a global rank) as in this collective with another rolling hash."""
        if self.desync is not None:
            return
        # The oldest first: it answers where they have diverged.
        past = [each for each in self.calls if each.sequence < call.sequence]
        self._open(peer, call, f"{SOMETHING_ELSE}, here or in a collective before it", past)

    def got_unexpected_message(self, number: int, peer: int) -> None:
        """Take a member's message for a collective that expected nothing from it."""
        call = self._known(number)
        theirs = f"{SOMETHING_ELSE}: it sent what was not expected"
        if call is not None:
            self._open(peer, call, theirs)
        else:
            mine = f"collective #{number}{self._members.suffix}"
            self._ask_about(peer, [Ask(number, 0, shortened(mine))], mine, theirs, number)

    def _open(self, peer: int, call: Call, theirs: str, past: Iterable[Call] = ()) -> None:
        asks = [
            Ask(each.sequence, each.fingerprint, shortened(each.describe()))
            for each in (*past, call)
        ]
        self._ask_about(peer, asks, call.describe(), theirs, call.sequence)

    def _ask_about(
        self, peer: int, asks: Iterable[Ask], mine: str, theirs: str, sequence: int
    ) -> None:
        """Break the group soon: with the other side's words, if they come in time."""
        if self.desync is not None or self.broken:
            return
        failure = Failure.desync(self._members, peer, sequence, mine, theirs)
        self.desync = Desync(self._now() + ANSWER_WITHIN, failure)
        for ask in asks:
            self._tell(peer, ask)

    def description_of(self, sequence: int) -> str:
        """Return this rank's collective of this number in words, if it is known."""
        known = self._known(sequence)
        return known.describe() if known is not None else ""

    def _known(self, sequence: int) -> Call | None:
        """Return a collective of this rank, if it is under way, or one of the last."""
        return next((each for each in reversed(self.calls) if each.sequence == sequence), None)
