"""The words in which every algorithm is written: Send, Recv, Combine, and the round.

A schedule is one rank's part of an algorithm: a generator of rounds. A round is a tuple of steps
that may happen together. A step names a peer and a run of chunks. The executor cuts the tensor into
chunks: no schedule ever touches a tensor, a socket, a thread or a clock.

Every executor keeps these rules, and every schedule may count on them:

1. A message sent in a round carries its chunks as they were before that round's receives.
2. Messages from one rank to another arrive in the order in which they were sent; within a round
   that is the order of the steps. A Send and the Recv or Combine that it meets name the same
   chunks: the same `chunk`, the same `count`.
3. Rounds are not barriers. A rank goes on to its next round when its own sends and receives are
   done, however far the others are. A round may be empty.
4. If one round has several Combines into the same chunk, messages are held aside and then reduced
   together with the rank's own values in rank order: x0 + x1 + x2 + ...

The schedules of this package promise executors three things more, and the tests hold them to it:

5. All ranks yield the same number of rounds (some of them empty), and what a rank sends in its
   round k its peer receives in its own round k: the number of the round can be a message's tag.
6. No round receives into a chunk that it also sends, and none receives twice into a chunk unless
   both are Combines: executors may send from, and receive into, the tensor itself.
7. A world of one rank has no rounds.

Letters are the papers': p ranks; n bytes in the tensor, hence n/p in each of p chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias


class Send(NamedTuple):
    """The chunks [chunk, chunk + count) go to `peer`, as one message."""

    peer: int
    chunk: int
    count: int = 1  # type: ignore[assignment]  # hides tuple.count


class Recv(NamedTuple):
    """The chunks [chunk, chunk + count) are overwritten by a message from `peer`."""

    peer: int
    chunk: int
    count: int = 1  # type: ignore[assignment]  # hides tuple.count


class Combine(NamedTuple):
    """A message from `peer` is reduced into the chunks [chunk, chunk + count)."""

    peer: int
    chunk: int
    count: int = 1  # type: ignore[assignment]  # hides tuple.count


# Steps are tuples, so Send(1, 0) == Recv(1, 0): tell them apart by type, never by ==.
Step: TypeAlias = Send | Recv | Combine
Run: TypeAlias = tuple[int, int]  # (chunk, count)
Round: TypeAlias = tuple[Step, ...]
Schedule: TypeAlias = Iterator[Round]
ScheduleFunction: TypeAlias = Callable[[int, int], Schedule]  # (rank, size)


def then(first: ScheduleFunction, second: ScheduleFunction) -> ScheduleFunction:
    """One algorithm after the other."""

    def both(rank: int, size: int) -> Schedule:
        yield from first(rank, size)
        yield from second(rank, size)

    return both


def rooted(schedule: ScheduleFunction, root: int) -> ScheduleFunction:
    """The same algorithm with the ranks renumbered, in a circle, so that `root` plays rank 0.

    Chunks keep their numbers, which is right where they mean nothing to the outcome: after a
    broadcast or a reduction to the root all of them are in one place. Otherwise see `turned`.
    """

    def renumbered(rank: int, size: int) -> Schedule:
        for steps in schedule((rank - root) % size, size):
            yield tuple(step._replace(peer=(step.peer + root) % size) for step in steps)

    return renumbered


def turned(schedule: ScheduleFunction, root: int) -> ScheduleFunction:
    """`rooted`, with the chunks renumbered along with the ranks: chunk c stays rank c's.

    For scatter and gather, with one chunk for each rank. A run of chunks that goes on past the last
    one becomes two messages, one up to the last and one from the first on: with 4 ranks and root 3,
    `0 -2:4-> 2` becomes `3 -1:3-> 1`, and `0 -0:2-> 2` becomes `3 -3-> 1` and `3 -0-> 1`.
    """

    def renumbered(rank: int, size: int) -> Schedule:
        for steps in rooted(schedule, root)(rank, size):
            yield tuple(piece for step in steps for piece in _turn(step, root, size))

    return renumbered


def _turn(step: Step, root: int, size: int) -> tuple[Step, ...]:
    first = (step.chunk + root) % size
    before = size - first  # chunks before the circle closes
    if step.count <= before:
        return (step._replace(chunk=first),)
    return step._replace(chunk=first, count=before), step._replace(
        chunk=0, count=step.count - before
    )


def sparing(schedule: ScheduleFunction, spared: int) -> ScheduleFunction:
    """The same algorithm without the messages to rank `spared`, which has everything already.

    It makes a broadcast of an all-gather: the root need not be told what it has told the others.
    """

    def without(rank: int, size: int) -> Schedule:
        for steps in schedule(rank, size):
            if rank == spared:
                yield tuple(step for step in steps if isinstance(step, Send))
            else:
                yield tuple(
                    step for step in steps if not (isinstance(step, Send) and step.peer == spared)
                )

    return without


def backwards(
    schedule: ScheduleFunction, take: type[Recv] | type[Combine] = Combine
) -> ScheduleFunction:
    """The same algorithm from its end: a chunk's receiver sends it back, to be reduced there.

    It makes a reduction of anything that spreads each chunk from one rank to all, and in which
    everybody receives it once. With `take=Recv` it gathers what had been scattered.
    """

    def back(rank: int, size: int) -> Schedule:
        for steps in reversed(list(schedule(rank, size))):
            yield tuple(take(*step) if isinstance(step, Send) else Send(*step) for step in steps)

    return back


# ------------------------------------------------------------------------------
# Pictures of schedules: the ones in the docstrings of this package, which the tests redraw.
#
# A line is a round, a column a sender, and a cell a message:
#
#     0 -2-> 1       rank 0 sends its chunk 2 to rank 1, where it overwrites chunk 2
#     0 +2+> 1       ... where it is reduced into chunk 2
#     0 -2:5-> 1     ... chunks 2, 3 and 4, as Python writes ranges


def picture(schedule: ScheduleFunction, size: int) -> str:
    """Draw what `schedule` does with `size` ranks; it has the same number of rounds on every rank.

    >>> from phalanx.collectives.schedules import picture
    >>> from phalanx.collectives.schedules.tree import tree_reduce
    >>> print(picture(tree_reduce, 4))
    round 0   1 +0+> 0              3 +0+> 2
    round 1              2 +0+> 0
    """
    rounds = list(zip(*(schedule(rank, size) for rank in range(size)), strict=True))
    drawn = [[_messages(rank, ranks) for rank in range(size)] for ranks in rounds]
    columns = [max((len(line[rank]) for line in drawn), default=0) for rank in range(size)]
    width = max((len(cell) for line in drawn for cells in line for cell in cells), default=0)
    lines = []
    for number, line in enumerate(drawn):
        cells = [f"round {number}".ljust(len(f"round {len(drawn) - 1}"))]
        for rank in range(size):
            cells += line[rank] + [""] * (columns[rank] - len(line[rank]))
        lines.append("   ".join([cells[0], *(cell.ljust(width) for cell in cells[1:])]).rstrip())
    return "\n".join(lines)


def _messages(rank: int, ranks: tuple[Round, ...]) -> list[str]:
    """Return the messages of one rank in one round; `ranks` has every rank's steps in it."""
    drawn = []
    for step in ranks[rank]:
        if type(step) is Send:
            taken = Combine(rank, step.chunk, step.count)
            combined = any(type(other) is Combine and other == taken for other in ranks[step.peer])
            line = "+" if combined else "-"
            end = f":{step.chunk + step.count}" if step.count > 1 else ""
            drawn.append(f"{rank} {line}{step.chunk}{end}{line}> {step.peer}")
    return drawn
