"""The watchdog: finds the rank to blame when a deadline passes.

Shortly before a deadline, the rank asks the ranks it waits for about their waits, then asks those,
and so on: the wait-for graph. The chain ends with a rank that waits for nobody, or that does not
answer because it is in no call:

    rank 0  waits for  rank 1  waits for  rank 2  ... which has not called: it is named

A chain without an end is a cycle: the ranks wait for each other, or bytes move too slowly.

A deadline may be half an hour away. So a call that has blocked for 30 s logs the same, once for
each group, and goes on waiting.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from phalanx.core.matching import is_full
from phalanx.core.posted import Wait
from phalanx.errors import CollectiveTimeoutError, MisuseError
from phalanx.wire.control import Answer, Ask, chain_of_waits, shortened

if TYPE_CHECKING:
    from phalanx.core.group import Group
    from phalanx.core.work import Work

log = logging.getLogger("phalanx")

VARIABLE = "PHALANX_WARN_AFTER"
WARN_AFTER = "30"  # seconds
LONGEST_QUERY = 0.4  # seconds before the deadline at which it begins
NOT_ASKED = Ask(-1, 0, "")


class Watchdog:
    """The deadlines of one rank, and the wait-for graph. The engine's lock is held in all of it.

    tell              sends a peer a control message about a group
    unexpected_bytes  bytes of each peer's messages that this rank keeps
    last_call         describes this rank's last call; "" if there was none
    warn_after        seconds after which a call that blocks is worth a line in the log
    waits             waits of this rank's threads, and their starts; oldest first
    queries           the waits near their deadline, and the ranks that they have asked
    full              peers that take no more messages for now, and their last answers
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        tell: Callable[[int, int, Ask | Answer], None],
        unexpected_bytes: Mapping[int, int],
        last_call: Callable[[], str],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.tell = tell
        self.unexpected_bytes = unexpected_bytes
        self.last_call = last_call
        self.warn_after = warn_after(os.environ)
        self.waits: dict[Wait, float] = {}
        self.full: dict[int, Answer] = {}
        self.queries: dict[Wait, WaitForGraph] = {}
        self._warned: set[int] = set()  # groups of which the log has said that a call waits
        self._numbers = itertools.count(1)

    def awaited_since(self, work: Work[Any]) -> float:
        """Return when a thread began to wait for a work, on the engine's clock; inf for none."""
        since = (began for wait, began in list(self.waits.items()) if work in wait.parts())
        return min(since, default=math.inf)

    def check_deadline(self, wait: Wait, now: float) -> float:
        """Check the deadline of a wait; return when to check again, on the same clock.

        Shortly before the deadline the rank asks for the wait-for graph; past it, the wait ends
        with an error.
        """
        ask_at = wait.deadline - query_lead_time(wait.timeout)
        if now < ask_at:
            return ask_at
        if not wait.over:
            query = self._query(wait)
            if now >= wait.deadline:
                wait.expire(query.timeout_error())
        return wait.deadline

    def check_patience(self, wait: Wait, now: float) -> float:
        """Log that a thread has waited long, once for each group; return when to check again."""
        began = self.waits.get(wait)
        if began is None:
            return math.inf
        warn_at = began + self.warn_after
        if wait.deadline <= warn_at or wait.over or wait.group.id in self._warned:
            return math.inf
        ask_at = warn_at - query_lead_time(self.warn_after)
        if now < ask_at:
            return ask_at
        query = self._query(wait)
        if now < warn_at:
            return warn_at
        self._warned.add(wait.group.id)
        self.forget(wait)  # its deadline asks again
        log.warning("%s", query.warning(self.warn_after))
        return math.inf

    def _query(self, wait: Wait) -> WaitForGraph:
        """Return the wait-for graph of this wait; ask for it if that was not done."""
        query = self.queries.get(wait)
        if query is None:
            query = self.queries[wait] = WaitForGraph(self, wait, next(self._numbers))
            query.begin()
        return query

    def forget(self, wait: Wait) -> None:
        """Forget a wait that is over, or has another deadline."""
        self.queries.pop(wait, None)

    def asked(self, peer: int, group: Group | None = None, ask: Ask = NOT_ASKED) -> None:
        """Tell a peer this rank's wait, and the number of bytes of its messages that are kept."""
        kept = self.unexpected_bytes[peer]
        obstacle = self._obstacle(group, ask.sequence)
        answer = Answer([], shortened(self.last_call()), kept, ask.query)
        if obstacle is not None:
            answer = Answer(
                obstacle.waits_for(),
                shortened(obstacle.describe()),
                kept,
                ask.query,
                obstacle.group.id,
                obstacle.sequence if obstacle.is_collective else -1,
            )
        self.tell(peer, 0, answer)

    def _obstacle(self, group: Group | None, sequence: int) -> Wait | None:
        """Return the wait that has to end before this rank can serve the peer's, if it is known.

        That is the collective itself, if it is under way here, or one before it; else any wait of a
        thread of this rank; else any work that is under way in that group.
        """
        under_way = group.under_way() if group is not None else []
        for work in under_way:
            if work.is_collective and work.sequence <= sequence:
                return work
        return next(iter([*self.waits, *under_way]), None)

    def answered(self, peer: int, answer: Answer) -> None:
        """Take a peer's answer about its wait."""
        if is_full(answer.kept):
            self.full[peer] = answer
        else:
            self.full.pop(peer, None)
        for query in list(self.queries.values()):
            if query.number == answer.query:
                query.answered(peer, answer)


def warn_after(environ: Mapping[str, str]) -> float:
    """Return the seconds in `PHALANX_WARN_AFTER`; infinity for never.

    Raises `MisuseError` for anything but a number of seconds.
    """
    text = environ.get(VARIABLE, "") or WARN_AFTER
    try:
        seconds = 0.0 if text == "off" else float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise MisuseError(
            f"{VARIABLE}={text!r}: it is the seconds after which a call that waits says so in the "
            f'log, such as {WARN_AFTER}; 0 or "off" for never'
        )
    return seconds or math.inf


def query_lead_time(timeout: float) -> float:
    """Return how many seconds before the deadline the rank asks for the wait-for graph."""
    return min(LONGEST_QUERY, timeout / 4)


class WaitForGraph:
    """The known wait-for graph of one wait. Ranks are global ranks."""

    def __init__(self, watchdog: Watchdog, wait: Wait, number: int) -> None:
        self._watchdog = watchdog
        self._wait = wait
        self._first = wait.waits_for()
        self.number = number
        sequence = wait.sequence if wait.is_collective else -1
        mine = Answer(list(self._first), "", group=wait.group.id, sequence=sequence)
        self._answers: dict[int, Answer | None] = {watchdog.rank: mine}
        self._to_follow: deque[Answer] = deque([mine])
        self._following = False

    def begin(self) -> None:
        """Ask the ranks that this wait waits for."""
        self._follow()

    def answered(self, peer: int, answer: Answer) -> None:
        """Take a rank's answer about its wait."""
        if peer in self._answers:
            self._answers[peer] = answer
            self._to_follow.append(answer)
            self._follow()

    def _follow(self) -> None:
        """Ask the ranks that those that answered wait for. Some answer before this returns."""
        if self._following:
            return
        self._following = True
        while self._to_follow:
            answer = self._to_follow.popleft()
            for rank in answer.waits_for:
                if rank not in self._answers and 0 <= rank < self._watchdog.world_size:
                    # A peer that takes no more cannot read the question: its last answer counts.
                    self._answers[rank] = self._watchdog.full.get(rank)
                    question = Ask(answer.sequence, 0, "", self.number)
                    self._watchdog.tell(rank, answer.group, question)
        self._following = False

    def timeout_error(self) -> CollectiveTimeoutError:
        """Return the error for the deadline that has passed."""
        wait = self._wait
        group = wait.group
        chain, _ = chain_of_waits(self._first, self._answers)
        # The end of the chain may be no member: then the last one that is, in this group's numbers.
        members = [rank for rank in chain if rank in group.to_local]
        return CollectiveTimeoutError(
            self._text(f"waited {wait.timeout:g} s", "timeout="),
            rank=group.rank,
            peer=group.to_local[members[-1]] if members else None,
            op=wait.name,
            sequence=wait.sequence,
            seconds=wait.timeout,
        )

    def warning(self, seconds: float) -> str:
        """Return the log's text for a wait that has lasted so long."""
        return f"{self._text(f'has waited {seconds:g} s', VARIABLE)}; it goes on waiting"

    def _text(self, waited: str, limit: str) -> str:
        """Return the graph in words. `limit` names the limit on a rank's slowness."""
        wait, group = self._wait, self._wait.group
        chain, ends = chain_of_waits(self._first, self._answers)
        head = group.head_of_queue(wait)
        behind = f" (it is queued behind {head.describe()})" if head is not wait else ""
        return (
            f"rank {group.name}: {wait.describe()} {waited} for {self._whom(chain)}{behind}"
            f"{''.join(self._explain(chain, ends, limit))}"
        )

    def _whom(self, chain: list[int]) -> str:
        # The chain goes on from its first rank, so that one comes last, before "which".
        ranks = sorted(self._first, key=lambda rank: rank in chain[:1])
        if not ranks:
            return "copies to or from its own device"
        names = ", ".join(self._wait.group.name_of_global(rank) for rank in ranks)
        return f"rank{'s' if len(ranks) > 1 else ''} {names}"

    def _explain(self, chain: list[int], ends: bool, limit: str) -> Iterator[str]:
        name = self._wait.group.name_of_global
        kept = self._watchdog.unexpected_bytes[chain[-1]] if chain else 0
        if chain and self._answers.get(chain[-1]) is None and is_full(kept):
            # It may have answered: its connection is paused.
            yield f", of whose messages this rank keeps {kept >> 20} MiB that nobody has received, "
            yield "and takes no more: receive those first"
            return
        it = ", which"
        for rank, next_rank in pairwise([*chain, *self._beyond(chain)]):
            answer = self._answers[rank]
            assert answer is not None
            if rank == chain[0] and is_full(answer.kept):
                yield f", which keeps {answer.kept >> 20} MiB of this rank's messages that nobody "
                yield "there has received, and takes no more"
                it = "; it"
            yield f"{it} waits in {answer.what} for rank {name(next_rank)}"
            it = ", which"
        if not chain:
            return
        last = self._answers.get(chain[-1])
        if not ends:
            yield ": either they wait for each other, or moving the bytes takes longer than "
            yield f"{limit} allows"
        elif last is None:
            yield f"{it} does not answer: it has made no matching call, and is in no other; or it "
            yield f"is slower than {limit} allows"
        else:
            last_call = f" (its last is {last.what})" if last.what else ""
            yield f"{it} has made no matching call{last_call}, or is slower than {limit} allows"

    def _beyond(self, chain: list[int]) -> list[int]:
        """Return the ranks that the last rank of a circle's first steps waits for."""
        answer = self._answers.get(chain[-1]) if chain else None
        return answer.waits_for[:1] if answer is not None else []
