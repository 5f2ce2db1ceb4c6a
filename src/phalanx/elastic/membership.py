"""Membership: which processes form the next generation of an elastic group, and with which state.

A pure function of one process's knowledge, without I/O and clock: `next_action(view)`. The driver
reads the store, builds a `View`, carries the action out, and looks again.

         a member of generation g                      a newcomer
         trains, until a loss or a vote ends it        |  ^
              |                                 ENTER  |  | STAND BY
              | REPORT, again at each new loss         v  |
              v                                     AWAIT |
            AWAIT the other reports                    |  |
              |                                        |  |
              | PROPOSE       key of generation g + 1  |  |
              +-------------> the first write stays <--+  | PROPOSE if nobody is a member
                                  |        |              |
                   has this       |        |  has it not  |
                   process: JOIN  v        +--------------+
         rendezvous of g + 1: a member of it, with no loss yet, whether it succeeds or not

    knowledge                                               a member     a newcomer
    decision on g + 1, which has this process               JOIN         JOIN
    decision on g + 1, which has it not                     STAND BY     STAND BY
    its own entry is not in the store, or is out of date    REPORT       ENTER
    it does not stay                                        AWAIT        .
    a member has neither reported nor is lost               AWAIT        .
    one that stays has not heard another for a while        AWAIT        .
    they lack a part that one cut off from them may have    AWAIT        .
    fewer processes than `min_ranks`                        AWAIT        AWAIT
    generation 0, newcomers still arrive                    .            AWAIT
    generation > 0, of which a member may live              .            AWAIT
    else                                                    PROPOSE      PROPOSE

**Who stays.** Members that have reported, but of two of which one has lost the other only one: that
which fewer reports call lost, else the lower rank. A member that has not reported is lost if one
that stays has lost it. Only a rank that stays proposes, since it cannot see whether those that it
has lost still live.

**Silence.** The network may end between several pairs, which notice it one after the other. So who
has not heard another for a while says it, and soon takes it back, or has lost the other. Else ranks
would meet that cannot. For the same reason a rank says only whom it has lost itself.

**Cut off.** If those who stay have no complete version, and lack the report of one that they have
lost in silence, they wait for it: one rank must not end a job that the others can go on with. Then
those who hear each other meet if they have a complete version, else those who may live, else all
who have reported: they try to, until they can.

**Overdue.** Who stays may die before it proposes, unnoticed by those that it had lost. A process
that has waited for too long (by the driver's clock) takes itself as one that stays, those who have
not reported as lost, and the silent as there; without a complete version it goes back to the newest
checkpoint. So no wait is for ever. Nothing hangs on who proposes: of two halves of a network, or
several proposers, the first to write goes on.

**Deserted.** If all members have ended, at once or before others could join, newcomers begin anew,
as in generation 0: with the newest checkpoint. They have to see that, and no sign of life for some
seconds; those of another host cannot, and wait.

**The state.** The newest version of which the reports of who stays have all parts, each in its
owner's memory or kept in memory that ranks of its host share. A step has counted on a rank if its
vote has returned, which needs each rank's vote, and each rank votes with its part of the next
version written. So a step that has counted on a member of g + 1 is in the version of g + 1, if
  * two versions are kept: the one that is written is invalid meanwhile;
  * those of the generation before stay until the first vote of this one;
  * a report ends the writing of what it says is held: a rank that was given up, and lives, changes
    no kept version that another has reported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import msgspec
from msgspec.structs import replace


class Bounds(msgspec.Struct, frozen=True):
    """How many ranks a generation has: `min_ranks` to `max_ranks`, a multiple of `multiple`."""

    min_ranks: int = 1
    max_ranks: int = 1 << 30
    multiple: int = 1

    def size(self, available: int) -> int:
        """Return how many of so many processes form a generation; 0: too few."""
        size = min(available, self.max_ranks) // self.multiple * self.multiple
        return size if size >= self.min_ranks else 0


class HeldPart(msgspec.Struct, frozen=True, array_like=True):
    """Part `part` of `parts` of the state at `version`, as generation `layout` has it.

    version   number of the next step. A replica is part 0 of 1
    """

    version: int
    layout: int
    part: int
    parts: int


class Newcomer(msgspec.Struct, frozen=True):
    """The entry of a process that wants to join.

    address   where it listens, as rank 0 would
    kept      a hash of what it keeps: its models and optimizers
    beat      a number that it increases while it lives
    """

    process: str
    address: str
    host: str = ""
    kept: str = ""
    beat: int = 0


class Report(msgspec.Struct, frozen=True):
    """What a member of a generation that ends tells the others.

    lost       ranks that it has lost, or that a timeout has named
    held       all whole parts that it can read: its own, and kept ones of its host
    newcomers  those that it knows of, and that live
    silent     ranks that it has not heard for a while; if it has lost them, they may still live
    """

    generation: int
    rank: int
    address: str
    lost: tuple[int, ...] = ()
    held: tuple[HeldPart, ...] = ()
    newcomers: tuple[Newcomer, ...] = ()
    silent: tuple[int, ...] = ()


class Decision(msgspec.Struct, frozen=True):
    """A generation: written once, and never changed.

    members    processes in the order of ranks: survivors, then newcomers
    survivors  the ranks that the first members had in the generation before
    lost       the ranks of that generation that are lost
    address    where rank 0 listens
    version    that it begins with, which generation `layout` has dealt out; None if none is
               complete: then the newest checkpoint, and before the first step rank 0's state
    """

    generation: int
    members: tuple[str, ...]
    address: str
    survivors: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    version: int | None = None
    layout: int = 0


class View(msgspec.Struct, frozen=True):
    """What one process knows when it looks.

    generation  the last one on which it knows the decision, and its members; 0 before the first
    lost, held, silent  see `Report`
    newcomers   those that live, in the order in which they have come, this one with them
    reports     those of `generation` in the store
    decision    that on `generation` + 1, if there is one
    quiet       no newcomer has come for a while; or `max_ranks` need not be waited for
    overdue     this process has waited for too long
    deserted    all members of `generation` have ended, which a newcomer of their host can see
    """

    process: str
    address: str
    bounds: Bounds = Bounds()
    generation: int = 0
    members: tuple[str, ...] = ()
    lost: tuple[int, ...] = ()
    held: tuple[HeldPart, ...] = ()
    newcomers: tuple[Newcomer, ...] = ()
    reports: tuple[Report, ...] = ()
    decision: Decision | None = None
    quiet: bool = False
    overdue: bool = False
    silent: tuple[int, ...] = ()
    deserted: bool = False


class WriteReport(msgspec.Struct, frozen=True):
    """REPORT: write this; whatever stands there is an older one of this process."""

    report: Report


class Enter(msgspec.Struct, frozen=True):
    """ENTER: write an entry among the newcomers' ones, and renew it."""


class Propose(msgspec.Struct, frozen=True):
    """PROPOSE: write this if nothing stands at its key; look again in either case."""

    decision: Decision


class JoinGeneration(msgspec.Struct, frozen=True):
    """JOIN: look for a still newer decision, then meet the other members."""

    decision: Decision


class StandBy(msgspec.Struct, frozen=True):
    """STAND BY: the generation is made without this process, which is a newcomer now."""

    decision: Decision


class Await(msgspec.Struct, frozen=True):
    """AWAIT: nothing to do until something changes.

    ranks    whose reports are missing, or will change
    lacking  how many processes, at least, are missing
    """

    ranks: tuple[int, ...] = ()
    lacking: int = 0


NextAction: TypeAlias = WriteReport | Enter | Propose | JoinGeneration | StandBy | Await


def next_action(view: View) -> NextAction:
    """Return what a process has to do that knows this."""
    if view.decision is not None:
        is_member = view.process in view.decision.members
        return (JoinGeneration if is_member else StandBy)(view.decision)
    if view.process in view.members:
        return _member_action(view)
    return _newcomer_action(view)


def _newcomer_action(view: View) -> NextAction:
    if view.process not in [each.process for each in view.newcomers]:
        return Enter()
    bounds, there = view.bounds, view.newcomers
    size = bounds.size(len(there))
    if view.generation and not view.deserted:
        return Await()
    if not size:
        return Await(lacking=_lacking(bounds, there))
    processes = tuple(each.process for each in there[:size])
    waits = not (view.quiet or len(there) >= bounds.max_ranks)
    if waits or view.process not in processes:
        return Await()
    lost = tuple(range(len(view.members)))
    return Propose(Decision(view.generation + 1, processes, there[0].address, lost=lost))


def _member_action(view: View) -> NextAction:
    rank = view.members.index(view.process)
    own = Report(
        view.generation, rank, view.address, view.lost, view.held, view.newcomers, view.silent
    )
    reports = {report.rank: report for report in view.reports}
    if reports.get(rank) != own:
        return WriteReport(own)
    staying = who_stays(reports, first=rank if view.overdue else None)
    lost = {each for member in staying for each in reports[member].lost}
    silent = {each for member in staying for each in reports[member].silent}
    everyone = {*range(len(view.members))}
    missing, unsure = everyone - reports.keys() - lost, silent & {*staying}
    if rank not in staying or ((missing or unsure) and not view.overdue):
        return Await(tuple(sorted(everyone if unsure else missing)))
    chosen = [reports[each] for each in staying]
    if newest_complete(chosen) is None and not view.overdue:
        if silent - reports.keys():
            return Await(tuple(sorted(everyone)))
        # Who has reported, and was not cut off, may only have missed a meeting.
        cut_off = {each.rank: _of_silent(each) for each in reports.values()}
        for together in (who_stays(cut_off), reports.keys() - (lost - silent), reports.keys()):
            if newest_complete([reports[each] for each in together]) is not None:
                chosen = [reports[each] for each in sorted(together)]
                break
    return _proposal(view, chosen)


def _of_silent(report: Report) -> Report:
    """Return a report without those that it has lost, but not because they were silent."""
    return replace(report, lost=tuple(each for each in report.lost if each in report.silent))


def who_stays(reports: Mapping[int, Report], *, first: int | None = None) -> list[int]:
    """Return the ranks of which none has lost another; `first` is one of them.

    Those that fewer have lost go before others, then the lower: of ranks that have lost each other
    the lower stays, and one that is lost to several does not outdo them.
    """
    accusers = {rank: sum(rank in each.lost for each in reports.values()) for rank in reports}
    staying: list[int] = []
    for rank in sorted(reports, key=lambda rank: (rank != first, accusers[rank], rank)):
        if not any(rank in reports[s].lost or s in reports[rank].lost for s in staying):
            staying.append(rank)
    return sorted(staying)


def newest_complete(reports: Collection[Report]) -> tuple[int, int] | None:
    """Return the highest version, and its layout, of which these hold all parts; None for none."""
    have: defaultdict[tuple[int, int, int], set[int]] = defaultdict(set)
    for report in reports:
        for held in report.held:
            have[held.version, held.layout, held.parts].add(held.part)
    complete = [key for key, parts in have.items() if len(parts) == key[2]]
    return max(complete)[:2] if complete else None


def _proposal(view: View, staying: Sequence[Report]) -> NextAction:
    known = {each.process: each for report in staying for each in report.newcomers}
    joining = [process for process in known if process not in view.members]
    available = [*staying, *joining]
    size = view.bounds.size(len(available))
    if not size:
        return Await(lacking=_lacking(view.bounds, available))
    survivors = _survivors(staying, size)
    stood = {report.rank for report in staying}
    version, layout = newest_complete(survivors) or (None, 0)
    decision = Decision(
        view.generation + 1,
        (*(view.members[each.rank] for each in survivors), *joining[: size - len(survivors)]),
        survivors[0].address,
        survivors=tuple(each.rank for each in survivors),
        lost=tuple(rank for rank in range(len(view.members)) if rank not in stood),
        version=version,
        layout=layout,
    )
    return Propose(decision)


def _survivors(staying: Sequence[Report], size: int) -> list[Report]:
    """Leave out those beyond `size`: from the end, and who holds a part alone as the last."""
    chosen = list(staying)
    while len(chosen) > size:
        newest = newest_complete(chosen)
        rests = ([each for each in chosen if each is not spare] for spare in reversed(chosen))
        chosen = next((rest for rest in rests if newest_complete(rest) == newest), chosen[:-1])
    return chosen


def _lacking(bounds: Bounds, available: Sequence[object]) -> int:
    """Return how many more processes make a generation."""
    least = -(-bounds.min_ranks // bounds.multiple) * bounds.multiple
    return least - len(available)
