"""The protocol of membership as an explicit-state model: every interleaving, breadth first.

The model's processes act by `next_action`, nothing else decides for them. Around it stand

    a generation   j --move--> m --all have--> c --step--> h --vote--> v --all have--+
                                               ^                                     |
                                               +------ the step has counted ---------+
                   r: re-forming, from any of these; d: dead; n: a newcomer, whom rank 0 knows, and
                   for whom a vote may ask to re-form
                   w: still writing what has counted, which only a fault brings about
    one host       two kept versions of each rank's part, whose writing a report ends
    a store        linearizable; a write may arrive late or never, though its writer saw an error
                   and has gone on, or is dead
    faults         so many of each: deaths, noticed by each of the others at some time; doubts: a
                   rank that lives is lost to one other, and it to that one, or not; late writes

A process waits for too long (`overdue`) only if nothing else can happen. States are tuples; what
nobody can read any more is left out of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from phalanx.elastic.membership import (
    Await,
    Decision,
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

GROUP = "jmchvw"  # phases in which a process is in its generation's group


class Process(NamedTuple):
    """One process. Ranks are those of `generation`, sets of them are bits.

    own      whole parts in its own memory, as (version, layout)
    mapped   the oldest generation whose kept versions it can read
    says     the number of what its report says beside `lost`, while it re-forms
    version  the steps that have counted for it
    """

    phase: str
    generation: int = 0
    decision: int = 0
    lost: int = 0
    version: int = 0
    own: tuple[tuple[int, int], ...] = ()
    mapped: int = 0
    says: int = 0


class World(NamedTuple):
    """All processes and the store. Index 0 of what goes by generation is generation 1.

    kept       by generation and rank: the valid versions, the newest last
    closed     bits of generations whose kept versions are not written any more
    sent       by generation: bits of the ranks that have moved, then of those in each vote
    reports    of the newest generation, by rank: (lost, says), or None
    late       writes on their way: generation, rank or None for a decision, value
    """

    processes: tuple[Process, ...]
    kept: tuple[tuple[tuple[int, ...], ...], ...]
    closed: int
    sent: tuple[tuple[int, ...], ...]
    decisions: tuple[int, ...]
    reports: tuple[tuple[int, int] | None, ...]
    late: tuple[tuple[int, int | None, Any], ...]
    deaths: int
    doubts: int
    lates: int


class Violation(AssertionError):
    """What does not hold, and how it came to that."""


def newest_of(world: World) -> int:
    """The newest generation that is decided."""
    return sum(1 for each in world.decisions if each)


def put(items: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*items[:index], value, *items[index + 1 :])


class Model:
    """Members 0 ... n - 1 of generation 1, which has begun with version 1.

    steps   that may count in each generation; there are as many generations
    """

    def __init__(
        self, count: int, *, steps: tuple[int, ...], deaths: int, doubts: int = 0, lates: int = 0
    ) -> None:
        self.count, self.steps, self.last = count, steps, len(steps)
        self.faults = deaths, doubts, lates
        self.decided: list[Decision | None] = [None]
        self.numbers: dict[Any, int] = {}
        self.said: list[tuple[tuple[HeldPart, ...], tuple[Newcomer, ...]]] = [((), ())]
        self.actions: dict[tuple[Any, ...], NextAction] = {}

    # The protocol's decisions, each of which a planted fault replaces ------------------------

    def act(self, view: View) -> NextAction:
        return next_action(view)

    def write_decision(self, written: int, proposed: int) -> int:
        return written or proposed

    def begin_to_keep(self, valid: tuple[int, ...]) -> tuple[int, ...]:
        """What stays valid while the next version is written."""
        return valid[-1:]

    drops_at = 1  # in which signal's return kept versions of the generation before go: 0 the move
    votes_unkept = False  # whether ranks vote before their part is kept
    fences = True  # whether a report ends the writing of kept versions

    # -----------------------------------------------------------------------------------------

    @cached_property
    def initial(self) -> World:
        first = self.number(Decision(1, tuple(map(str, range(self.count))), "0", version=1))
        nobody, none = (0,) * (max(self.steps) + 1), (None,) * self.count
        later = self.last - 1
        return World(
            (Process("c", 1, first, version=1, own=((1, 1),), mapped=1),) * self.count,
            (((1,),) * self.count, *[((),) * self.count] * later),
            0,
            (nobody,) * self.last,
            (first, *[0] * later),
            none,
            (),
            *self.faults,
        )

    def number(self, decision: Decision) -> int:
        if decision not in self.numbers:
            self.numbers[decision] = len(self.decided)
            self.decided.append(decision)
        return self.numbers[decision]

    def members(self, decision: int) -> tuple[int, ...]:
        return tuple(map(int, self.decided[decision].members))

    def explore(self, most: int = 0) -> int:
        """Visit all states, or `most`; return how many. `Violation` tells a shortest way to it."""
        came: dict[World, tuple[World, str] | None] = {self.initial: None}
        queue = [self.initial]
        for world in queue:
            try:
                for label, after in self.successors(world):
                    if after not in came:
                        came[after] = world, label
                        queue.append(after)
            except Violation as violation:
                way, here = [str(violation)], world
                while (step := came[here]) is not None:
                    here, label = step
                    way.append(label)
                raise Violation("\n".join(reversed(way))) from None
            if most and len(queue) > most:
                break
        return len(came)

    def successors(self, world: World) -> Iterator[tuple[str, World]]:
        moves: list[tuple[str, World]] = []
        for number, process in enumerate(world.processes):
            if process.phase in GROUP:
                moves += self.group(world, number, process)
            if process.phase in GROUP + "r" and process.generation < self.last:
                moves += self.losses(world, number, process)
            if process.phase in "rn":
                moves += self.look(world, number)
        if not moves:
            for number, process in enumerate(world.processes):
                if process.phase == "r":
                    moves += self.look(world, number, overdue=True)
        if not moves:  # a late write may never arrive
            self.check_end(world)
        moves += self.writes(world)
        if world.deaths:
            moves += self.dying(world)
        return ((label, self.tidy(after)) for label, after in moves)

    # What happens to processes ---------------------------------------------------------------

    def dying(self, world: World) -> Iterator[tuple[str, World]]:
        for number, process in enumerate(world.processes):
            if process.phase not in "dn":
                dead = put(world.processes, number, Process("d"))
                yield f"{number} dies", world._replace(processes=dead, deaths=world.deaths - 1)

    def losses(self, world: World, number: int, process: Process) -> Iterator[tuple[str, World]]:
        """Who loses another re-forms, and reports, or reports once more."""
        if process.phase == "r" and world.decisions[process.generation]:
            return
        members = self.members(process.decision)
        others = [world.processes[each] for each in members]
        own, generation = members.index(number), process.generation
        for rank, other in enumerate(others):
            if rank == own or process.lost >> rank & 1:
                continue
            is_left = other.generation == generation and other.lost >> own & 1
            doubts = 0 if other.phase == "d" or is_left else 1
            if doubts <= world.doubts:
                label = f"{number} loses {members[rank]}{' which lives' * doubts}"
                after = world._replace(doubts=world.doubts - doubts)
                yield from self.reform(label, after, number, process.lost | 1 << rank)
        told = any(
            each.generation > generation or (each.phase, each.generation) == ("r", generation)
            for each in others
        )
        voted = process.phase == "c" and self.step_of(process) > 1
        asked = voted and any(each[:2] == ("n", generation) for each in world.processes)
        if process.phase in GROUP and (told or asked):
            yield from self.reform(f"{number} is {'told' if told else 'asked'}", world, number, 0)

    def reform(
        self, label: str, world: World, number: int, lost: int
    ) -> Iterator[tuple[str, World]]:
        process = world.processes[number]
        if process.phase in GROUP:
            says = self.said_by(world, number, process)
            process = process._replace(phase="r", says=says)
            world = world._replace(closed=world.closed | 1 << process.generation)
        after = world._replace(processes=put(world.processes, number, process._replace(lost=lost)))
        for action, reported in self.look(after, number):
            yield f"{label}, {action}", reported

    def group(self, world: World, number: int, process: Process) -> Iterator[tuple[str, World]]:
        generation, index = process.generation, process.generation - 1
        members = self.members(process.decision)
        rank, everybody = members.index(number), (1 << len(members)) - 1
        others = [world.processes[each] for each in members]
        sent, kept = world.sent[index], world.kept[index][rank]

        def to(label: str, after: Process, **changes: Any) -> tuple[str, World]:
            return f"{number} {label}", world._replace(
                processes=put(world.processes, number, after), **changes
            )

        def send(signal: int) -> dict[str, Any]:
            return {"sent": put(world.sent, index, put(sent, signal, sent[signal] | 1 << rank))}

        def keep(valid: tuple[int, ...]) -> dict[str, Any]:
            return {"kept": put(world.kept, index, put(world.kept[index], rank, valid))}

        phase, version = process.phase, process.version
        if phase == "j":
            decision = self.decided[process.decision]
            self.check_available(world, decision)
            there = all(each.generation == generation and each.phase in GROUP for each in others)
            if there:
                own = (*process.own, (decision.version, generation))
                yield to(
                    "moves",
                    process._replace(phase="m", own=own, version=decision.version),
                    **send(0),
                )
        elif phase == "m" and sent[0] == everybody:
            after = process._replace(phase="c", own=((version, generation),))
            yield to("begins", self.dropped(after, 0), **keep((version,)))
        elif phase == "c" and self.step_of(process) <= self.steps[index]:
            if not (self.fences and world.closed >> generation & 1):
                half = process._replace(phase="h", own=())
                signal = send(self.step_of(process)) if self.votes_unkept else {}
                yield to("steps", half, **keep(self.begin_to_keep(kept)), **signal)
        elif phase == "h":
            over = process._replace(phase="v", own=((version + 1, generation),))
            yield to("votes", over, **keep((*kept, version + 1)), **send(self.step_of(process)))
        elif phase == "w":
            whole = process._replace(phase="c", own=((version, generation),))
            yield to("has kept", whole, **keep((*kept, version)))
        counts = "hv" if self.votes_unkept else "v"
        if phase in counts and sent[self.step_of(process)] == everybody:
            after = process._replace(phase="w" if phase == "h" else "c", version=version + 1)
            yield to("counts", self.dropped(after, self.step_of(process)))

    def step_of(self, process: Process) -> int:
        """The number of its next vote in its generation."""
        return process.version - self.decided[process.decision].version + 1

    def dropped(self, process: Process, signal: int) -> Process:
        return process._replace(mapped=process.generation) if signal >= self.drops_at else process

    def said_by(self, world: World, number: int, process: Process) -> int:
        held = set()
        for version, layout in process.own:
            members = self.members(world.decisions[layout - 1])
            held.add(HeldPart(version, layout, members.index(number), len(members)))
        for layout in range(process.mapped, process.generation + 1):
            members = self.members(world.decisions[layout - 1])
            for rank in range(len(members)):
                for version in world.kept[layout - 1][rank]:
                    held.add(HeldPart(version, layout, rank, len(members)))
        parts = tuple(sorted(held, key=lambda each: (each.version, each.layout, each.part)))
        newcomers = tuple(
            Newcomer(str(other), str(other))
            for other, each in enumerate(world.processes)
            if each.phase == "n" and number == self.members(process.decision)[0]
        )
        words = parts, newcomers
        if words not in self.numbers:
            self.numbers[words] = len(self.said)
            self.said.append(words)
        return self.numbers[words]

    # The store -------------------------------------------------------------------------------

    def look(
        self, world: World, number: int, *, overdue: bool = False
    ) -> Iterator[tuple[str, World]]:
        process = world.processes[number]
        if process.generation == self.last:
            return
        index = process.generation - 1
        knows = (
            number,
            process.decision,
            process.lost,
            process.says,
            world.reports if process.generation == newest_of(world) else (),
            world.decisions[index + 1],
            overdue,
        )
        action = self.actions.get(knows)
        if action is None:
            action = self.actions[knows] = self.act(self.view(*knows))
        if isinstance(action, WriteReport):
            rank = self.members(process.decision).index(number)
            report = index, rank, (process.lost, process.says)
            yield from self.write(f"{number} reports", world, report)
        elif isinstance(action, Propose):
            self.check_proposal(world, process, action.decision, overdue)
            proposal = index + 1, None, self.number(action.decision)
            yield from self.write(f"{number} proposes {action.decision}", world, proposal)
        elif not isinstance(action, Await):
            assert isinstance(action, (JoinGeneration, StandBy))
            following = process.generation + 1, self.number(action.decision)
            after = Process("n", *following)
            if isinstance(action, JoinGeneration):
                mapped = process.mapped or process.generation + 1
                own, version = process.own, process.version
                after = Process("j", *following, version=version, own=own, mapped=mapped)
            label = f"{number} {type(action).__name__}"
            yield label, world._replace(processes=put(world.processes, number, after))

    def view(
        self,
        number: int,
        decision: int,
        lost: int,
        says: int,
        reports: tuple[tuple[int, int] | None, ...],
        following: int,
        overdue: bool,
    ) -> View:
        current = self.decided[decision]
        is_new = str(number) not in current.members

        def ranks(bits: int) -> tuple[int, ...]:
            return tuple(rank for rank in range(len(current.members)) if bits >> rank & 1)

        return View(
            str(number),
            str(number),
            generation=current.generation,
            members=current.members,
            lost=ranks(lost),
            held=self.said[says][0],
            newcomers=self.said[says][1] or (Newcomer(str(number), str(number)),) * is_new,
            reports=tuple(
                Report(
                    current.generation,
                    rank,
                    current.members[rank],
                    ranks(report[0]),
                    *self.said[report[1]],
                )
                for rank, report in enumerate(reports)
                if report is not None
            ),
            decision=self.decided[following],
            overdue=overdue,
        )

    def write(
        self, label: str, world: World, what: tuple[int, int | None, Any]
    ) -> Iterator[tuple[str, World]]:
        yield label, self.written(world, what)
        if world.lates and what not in world.late:
            yield (
                f"{label}, late",
                world._replace(late=(*world.late, what), lates=world.lates - 1),
            )

    def writes(self, world: World) -> Iterator[tuple[str, World]]:
        for what in world.late:
            rest = world._replace(late=tuple(each for each in world.late if each != what))
            yield f"late: {what}", self.written(rest, what)

    def written(self, world: World, what: tuple[int, int | None, Any]) -> World:
        index, rank, value = what
        if rank is not None:
            return world._replace(reports=put(world.reports, rank, value))
        before = world.decisions[index]
        after = self.write_decision(before, value)
        self.check(not before or after == before, f"generation {index + 1} is decided twice")
        if before:
            return world
        decisions = put(world.decisions, index, after)
        return world._replace(decisions=decisions, reports=self.initial.reports)

    def tidy(self, world: World) -> World:
        """Leave out what nobody can read any more."""
        newest = newest_of(world)
        processes = tuple(
            each._replace(lost=0, says=0)
            if each.phase == "r" and each.generation < newest and (each.lost or each.says)
            else each
            for each in world.processes
        )
        living = [each for each in processes if each.phase not in "dn"]
        groups = {each.generation for each in living if each.phase in GROUP}
        mapped = min((each.mapped for each in living), default=self.last + 1)
        return world._replace(
            processes=processes,
            kept=(((),) * self.count,) * (mapped - 1) + world.kept[mapped - 1 :],
            closed=sum(1 << each for each in groups if world.closed >> each & 1),
            sent=tuple(
                sent if generation in groups else self.initial.sent[0]
                for generation, sent in enumerate(world.sent, 1)
            ),
            late=tuple(each for each in world.late if each[1] is None or each[0] == newest - 1),
        )

    # What always holds -----------------------------------------------------------------------

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(what)

    def check_proposal(
        self, world: World, process: Process, decision: Decision, overdue: bool
    ) -> None:
        for rank, number in enumerate(self.members(process.decision)):
            other = world.processes[number]
            if other.phase in "dn" or other.generation != process.generation:
                continue
            if rank in decision.survivors:
                counts = decision.version is not None and other.version <= decision.version
                self.check(counts, f"a step that has counted for {number} is lost: {decision}")
            else:
                words = [each[0] for each in world.reports if each]
                words += [each.lost for each in world.processes]
                lost = any(each >> rank & 1 for each in words)
                self.check(
                    lost or overdue,
                    f"{number} lives, nobody has lost it, and it is left out: {decision}",
                )

    def check_available(self, world: World, decision: Decision) -> None:
        """Of what a generation begins with, each part is held by who lives, or kept."""
        if decision.generation < newest_of(world):
            return
        members = self.members(world.decisions[decision.layout - 1])
        joined = [
            each
            for each in map(world.processes.__getitem__, map(int, decision.members))
            if each.phase not in "dn"
        ]
        for rank, number in enumerate(members):
            holder = world.processes[number]
            own = holder in joined and (decision.version, decision.layout) in holder.own
            kept = decision.version in world.kept[decision.layout - 1][rank]
            mapped = any(each.mapped <= decision.layout for each in joined)
            self.check(own or (kept and mapped), f"part {rank} of {decision} is nowhere")

    def check_end(self, world: World) -> None:
        """Nothing happens any more: who lives is in the newest generation, or a newcomer."""
        newest = newest_of(world)
        for number, process in enumerate(world.processes):
            fine = process.phase in "dnc" and process.generation in (0, newest)
            self.check(
                fine or process.generation == self.last, f"{number} waits for ever: {process}"
            )
