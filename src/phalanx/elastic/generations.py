"""The driver of `membership.py`: it looks at the store, acts, and waits, until a decision is there.

a member      a rank is lost, or a vote asks for it   -> report ... -> the next generation
a newcomer    enters, renews its entry each second    -> a generation that has it
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from xxhash import xxh3_64_hexdigest

from phalanx.core.backend import Backend
from phalanx.elastic.membership import (
    Await,
    Bounds,
    Decision,
    Enter,
    HeldPart,
    JoinGeneration,
    Newcomer,
    NextAction,
    Propose,
    Report,
    StandBy,
    View,
    WriteReport,
    next_action,
)
from phalanx.elastic.site import LOOK, Site
from phalanx.elastic.stores import JobStore
from phalanx.errors import BackendUnavailableError, DesyncError, MembershipError
from phalanx.launch.report import AGAIN

log = logging.getLogger("phalanx")
_QUIET = 3.0  # seconds without a newcomer after which the first generation forms
_SILENT = 3.0  # seconds without a sign of life after which newcomers, or members, may be gone
_LATE = 2.0  # seconds: members notice that a generation has not formed, one after the other
_PENALTIES = 1.0, 60.0  # seconds that a newcomer waits who did not come, first and at most
_PIECE = 1.0  # seconds of waiting between two looks at the clock
_PAUSES = 0.02, 0.2  # seconds between two looks of who is expected soon, and of who stands by
_EACH = 0.005  # the least for each newcomer, before the first generation: each looks at all


class Ended(Exception):  # noqa: N818 -- no error
    """The training has come to its end before this process came."""

    exit_code = 0


class Left(Exception):  # noqa: N818 -- no error
    """This process is to leave, and there is no group that it would have to leave."""

    exit_code = AGAIN


class Newcomers:
    """Rank 0's knowledge of the processes that want to join.

    kept   a hash of what this process keeps: who keeps something else is not taken
    """

    def __init__(self, site: Site, kept: str) -> None:
        self._site, self._kept = site, kept
        self._seen: dict[str, tuple[Newcomer, float, bool]] = {}
        self._penalties: dict[str, tuple[float, float]] = {}
        self._end: Callable[[], None] | None = None
        self._beats = 0

    def look(self, store: JobStore) -> None:
        """Look at the entries; free those of processes that are gone; write a sign of life."""
        now, seen = self._site.now(), {}
        for slot, entry in store.newcomers().items():
            known = self._seen.get(entry.process)
            lives = not self._site.watches or (known is not None and known[0].beat != entry.beat)
            since = now if known is None or known[0].beat != entry.beat else known[1]
            if now - since > 3 * _SILENT:
                store.vacate(slot, entry)
                continue
            seen[entry.process] = entry, since, lives or (known is not None and known[2])
        self._seen = seen
        self._beats += 1
        store.write_note("alive", str(self._beats))

    def living(self, members: Sequence[str]) -> tuple[Newcomer, ...]:
        """Return those that live, keep the same, are no members, and may come now."""
        now = self._site.now()
        return tuple(
            entry
            for entry, since, lives in self._seen.values()
            if lives
            and entry.kept == self._kept
            and (now - since < _SILENT or not self._site.watches)
            and entry.process not in members
            and now >= self._penalties.get(entry.process, (0.0, 0.0))[1]
        )

    def joined(self, members: Sequence[str]) -> None:
        """Take these for newcomers no more: if they die soon, their entries are still fresh."""
        self._seen = {name: seen for name, seen in self._seen.items() if name not in members}

    def did_not_come(self, process: str) -> None:
        """Let it wait twice as long as before."""
        first, most = _PENALTIES
        seconds = min(2 * self._penalties.get(process, (first / 2, 0.0))[0], most)
        self._penalties[process] = seconds, self._site.now() + seconds

    def watch(self, *, wanted: bool) -> None:
        """Look once a second from now on, or no more."""
        if self._end is not None and not wanted:
            self._end()
            self._end, self._seen = None, {}
        elif wanted and self._end is None:
            self._end = self._site.watch(self.look)


class Waiting:
    """A wait for the next generation.

    held, gone        as for `Generations.next`
    silent            ranks that this process has not heard for a while
    began, last_sign  when it began, and when the job has last shown that it lives
    since             when the store could be used again, or since it began
    failure           why the store cannot be used, if it cannot
    awaits            what this process waits for
    """

    def __init__(self, held: tuple[HeldPart, ...], gone: set[int], now: float) -> None:
        self.held, self.gone, self.silent = held, gone, set[int]()
        self.began = self.since = self.last_sign = now
        self.failure, self.awaits = "", Await()


class Generations:
    """One process's way through the generations of a job.

    number, members   of the newest generation whose decision this process has read
    entered           the one whose group it has met, and has still
    leaving           whether this process is to leave
    """

    def __init__(
        self,
        site: Site,
        backend: Backend,
        bounds: Bounds,
        kept: Sequence[str],
        leaving: Callable[[], bool],
        *,
        wait: float,
        timeout: float,
    ) -> None:
        self.number, self.members = 0, tuple[str, ...]()
        self.entered, self._group = 0, tuple[str, ...]()
        self._formed, self._lost_at = 0, math.inf  # the last that has formed; when it was lost
        self._digest = xxh3_64_hexdigest("\n".join(kept).encode())
        self.newcomers, self.leaving = Newcomers(site, self._digest), leaving
        self._site, self.bounds, self._kept = site, bounds, tuple(kept)
        self._backend = backend
        self._wait, self._timeout = wait, timeout
        self._slot: int | None = None
        self._beat, self._renewed = 0, 0.0
        self._reports: dict[int, Report] = {}
        self._unread: Iterable[int] = ()
        self._invited: tuple[Newcomer, ...] = ()
        self._order: tuple[str, ...] = ()
        self._changed_at = 0.0
        self._beats: dict[str, tuple[int, float]] = {}
        self._signs: tuple[object, ...] = ()
        self._sign_at = math.inf  # when a newcomer has last seen one

    @property
    def _store(self) -> JobStore:
        assert self._site.store is not None
        return self._site.store

    def enter(self) -> None:
        """Take note that the backend is a rank of the last generation now."""
        self.entered, self._group = self.number, self.members

    def formed(self) -> None:
        """Take note that all ranks of the last generation have its state."""
        self._formed, self._lost_at = self.number, math.inf

    def next(self, held: Sequence[HeldPart], gone: set[int]) -> Decision:
        """Return the decision on a generation that has this process; block until there is one.

        held   what this process can give, if it is a member
        gone   ranks of the last generation that it has lost

        Raises `Ended`; `Left` if this process is to leave, and would have to wait for others;
        `MembershipError` if there are too few processes, or no store, for too long; `DesyncError`
        if this newcomer keeps something else than the others.
        """
        site = self._site
        if site.store is None:
            self.number, self.members = self.number + 1, (site.process,)
            return Decision(self.number, self.members, "")
        now = Waiting(tuple(held), gone, site.now())
        self._lost_at = min(self._lost_at, now.began)
        self._reports, self._unread = {}, range(len(self.members))
        self._invited = self.newcomers.living(self.members)
        while True:
            longest = _PAUSES[self._is_newcomer() and self.number > 0]
            longest = max(longest, _EACH * len(self._order))
            decision = self._store.wait(lambda: self._look(now), _PIECE, longest)
            if decision is not None:
                return decision
            if self.leaving() and (now.failure or now.awaits.lacking or self._is_newcomer()):
                raise Left
            if site.now() > (now.began if now.failure else now.last_sign) + self._wait:
                raise MembershipError(self._who_is_missing(now.failure, now.awaits))

    def _look(self, now: Waiting) -> Decision | None:
        """Look at the store once, and do what there is to do; return a decision that counts."""
        site = self._site
        overdue = site.now() > min(now.since + self._timeout, self._lost_at + self._wait)
        try:
            self._look_at_group(now)
            while True:
                action = next_action(self._view(now, overdue=overdue))
                decision = self._act(action)
                if not isinstance(action, StandBy):
                    break
                # A newcomer reads one decision after the other, without a pause.
                now.held, now.gone, now.silent, self._group = (), set(), set(), ()
            now.failure, now.awaits = "", action if isinstance(action, Await) else Await()
            if now.awaits.lacking:
                self._look_for_more()
            if self._has_signs() or not (now.awaits.lacking or self._is_newcomer()):
                now.last_sign = site.now()
        except BackendUnavailableError as error:
            now.failure, now.since = str(error), site.now()
            return None
        return decision

    def _look_at_group(self, now: Waiting) -> None:
        """Look which ranks of the last generation are lost, and which are silent.

        If they could not all meet, the group before is still there. Who has left it may have met
        the others; but whom this process has given up there, it cannot reach. If they have met, but
        the generation has not formed, who has left may have missed another one, and reports so.
        """
        ranks = {process: rank for rank, process in enumerate(self.members)}
        now.gone.discard(ranks.get(self._site.process, -1))  # others may say so of this one
        known = {old: ranks[name] for old, name in enumerate(self._group) if name in ranks}
        if not known:
            return
        lost = {known[old] for old in self._backend.lost() if old in known}
        silent = {known[old] for old in self._backend.silent() if old in known}
        if self.entered < self.number:
            lost &= silent
        elif self._formed < self.number:
            late = self._site.now() >= now.since + _LATE
            lost = {
                rank
                for rank in lost - self._reports.keys()
                if late or self._site.has_ended(self.members[rank])
            }
        now.gone |= lost
        now.silent = silent

    def _is_newcomer(self) -> bool:
        return self._site.process not in self.members

    def _act(self, action: NextAction) -> Decision | None:
        store = self._store
        if isinstance(action, WriteReport):
            store.write_report(action.report)
            self._reports[action.report.rank] = action.report
        elif isinstance(action, Enter):
            self._enter()
        elif isinstance(action, Propose):
            store.propose(action.decision)
        elif isinstance(action, Await):
            self._unread = action.ranks
        else:
            return self._decided(action)
        return None

    def _decided(self, action: JoinGeneration | StandBy) -> Decision | None:
        """Take the decision as known; return it if it has this process and is the newest."""
        decision, process = action.decision, self._site.process
        if process in self.members:
            self._store.drop_report(self.number, self.members.index(process))
        self.number, self.members = decision.generation, decision.members
        self.newcomers.joined(decision.members)
        self._reports, self._unread = {}, range(len(self.members))
        newer = self._store.decision(decision.generation + 1)
        if isinstance(action, StandBy) or newer is not None:
            return None
        if self._slot is not None:
            self._store.vacate(self._slot, self._own_entry())
            self._slot = None
        return decision

    def _view(self, now: Waiting, *, overdue: bool) -> View:
        store, site, quiet = self._store, self._site, False
        newcomers: tuple[Newcomer, ...] = ()
        decision, deserted = store.decision(self.number + 1), False
        if self._is_newcomer():
            silent = self.number > 0 and site.now() > self._sign_at + _SILENT
            deserted = silent and all(map(site.has_ended, self.members))
            begins = decision is None and (deserted or not self.number)
            newcomers = self._look_as_newcomer(decision, begins=begins)
            quiet = site.now() > self._changed_at + _QUIET
        else:
            for rank in self._unread if decision is None else ():
                report = store.report(self.number, rank)
                if report is not None:
                    self._reports[rank] = report
            newcomers = self._invited
        return View(
            site.process,
            site.address(),
            bounds=self.bounds,
            generation=self.number,
            members=self.members,
            lost=tuple(sorted(now.gone)),
            held=now.held,
            newcomers=newcomers,
            reports=tuple(self._reports.values()),
            decision=decision,
            quiet=quiet,
            overdue=overdue,
            silent=tuple(sorted(now.silent)),
            deserted=deserted,
        )

    def _look_for_more(self) -> None:
        """As there are too few: look, once a second, whether newcomers have come."""
        now = self._site.now()
        if not self._is_newcomer() and now >= self._renewed + LOOK:
            self._renewed = now
            self.newcomers.look(self._store)
            self._invited = self.newcomers.living(self.members)

    # As a newcomer ----------------------------------------------------------------------------

    def _look_as_newcomer(self, decision: Decision | None, *, begins: bool) -> tuple[Newcomer, ...]:
        """Return this newcomer's entry, if it is written; if a job `begins` with them, all."""
        if self._store.note("end") == (str(self.number),) and decision is None:
            log.warning(
                "process %s came after the job's last step, and ends with exit code 0. A second "
                "training is another job: see PHALANX_JOB",
                self._site.process,
            )
            raise Ended
        if self._slot is None:
            return ()
        now, mine = self._site.now(), self._own_entry()
        if now >= self._renewed + LOOK:
            self._beat, self._renewed = self._beat + 1, now
            mine = self._own_entry()
            self._store.renew(self._slot, mine)
        if not begins:
            self._check_kept(self._store.note("kept"))
            return (mine,)
        there = [each for each in self._store.newcomers().values() if self._is_fresh(each, now)]
        order = tuple(each.process for each in there)
        if order != self._order:
            self._order, self._changed_at = order, now
        if there:
            self._check_kept((there[0].kept,))
        return tuple(each for each in there if each.kept == self._digest)

    def _is_fresh(self, entry: Newcomer, now: float) -> bool:
        beat, since = self._beats.get(entry.process, (-1, now))
        if beat != entry.beat:
            since = now
        self._beats[entry.process] = entry.beat, since
        return now < since + _SILENT or not self._site.watches

    def _enter(self) -> None:
        self._store.write_note(f"kept/{self._digest}", *self._kept)
        self._renewed = self._site.now()
        self._slot = self._store.enter(self._own_entry())

    def _own_entry(self) -> Newcomer:
        site = self._site
        return Newcomer(site.process, site.address(), site.host, self._digest, self._beat)

    def _check_kept(self, told: tuple[str, ...] | None) -> None:
        """Raise `DesyncError` if the others keep something else, by the digest of it."""
        if told is None or told[0] == self._digest:
            return
        theirs = self._store.note(f"kept/{told[0]}") or ()
        pairs = zip_longest(self._kept, theirs, fillvalue="nothing")
        here, there = next(pair for pair in pairs if pair[0] != pair[1])
        raise DesyncError(
            f"process {self._site.process} keeps something else than the job that it wants to "
            f"join: it has {here}, and they have {there}. Every process runs the same script"
        )

    def tell_kept(self) -> None:
        """Tell newcomers what is kept here: rank 0's part, once it is in a generation."""
        if self._site.store is not None:
            self._store.write_note(f"kept/{self._digest}", *self._kept)
            self._store.write_note("kept", self._digest)

    def _has_signs(self) -> bool:
        """Return whether the job has shown that it lives since the last look."""
        if not self._is_newcomer() or not self.number:
            return False
        signs = self.number, self._store.note("alive")
        before, self._signs = self._signs, signs
        if signs != before:
            self._sign_at = self._site.now()
        return signs != before

    def _who_is_missing(self, failure: str, waits: Await) -> str:
        who = f"process {self._site.process}"
        if failure:
            return f"{who}: no store for {self._wait:g} s: {failure}"
        if self._is_newcomer() and self.number and not waits.lacking:
            return (
                f"{who} has waited to join for {self._wait:g} s, and nobody who trains has shown a "
                f"sign of life: of generation {self.number} ({', '.join(self.members)}) all may be "
                "gone. Start the job again, under another name or from its checkpoint"
            )
        there = len(self._order) if self._is_newcomer() else len(self._reports)
        missing = f"{waits.lacking} more" if waits.lacking else f"ranks {list(waits.ranks)}"
        return (
            f"{who} has waited for {self._wait:g} s for {missing}: {there} of at least "
            f"{self.bounds.min_ranks} processes are there (min_ranks). Start more, or ask for less"
        )
