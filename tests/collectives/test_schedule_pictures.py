"""Every picture in a docstring is what the schedule does."""

from __future__ import annotations

import inspect
import re
from functools import partial
from itertools import islice
from types import ModuleType

import pytest
from schedule_checker import ranks_in, run
from schedule_proof import start

from phalanx.collectives.schedules import (
    COLLECTIVES,
    Schedule,
    ScheduleFunction,
    Send,
    halving_doubling,
    linear,
    picture,
    tree,
    two_level,
)
from phalanx.collectives.schedules.halving_doubling import core_chunks
from phalanx.collectives.schedules.linear import direct_all_to_all
from phalanx.collectives.schedules.tree import tree_broadcast, tree_reduce
from phalanx.collectives.schedules.two_level import Agents

ALGORITHMS = {
    name: value
    for family in (linear, tree, halving_doubling, two_level)
    for name, value in vars(family).items()
    if inspect.isgeneratorfunction(value) and value.__module__ == family.__name__
    if "_" in name.strip("_") and not name.startswith("_")
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_picture_of_an_algorithm_is_what_it_does(name: str) -> None:
    text = inspect.getdoc(ALGORITHMS[name]) or ""
    drawn = re.search(r"[Ww]ith (\d+) ranks(?: on hosts\s([ \d]+))?:\n\n((?:    .+\n?)+)", text)
    assert drawn, "every algorithm has its picture"
    schedule = ALGORITHMS[name]
    if drawn[2]:
        schedule = partial(schedule, hosts=tuple(map(int, drawn[2].split())))
    lines = [line.removeprefix("    ") for line in drawn[3].splitlines()]
    assert lines == picture(schedule, int(drawn[1])).splitlines()


def test_the_example_of_picture_is_what_it_prints() -> None:
    example = (inspect.getdoc(picture) or "").split(">>> print(picture(tree_reduce, 4))\n")[1]
    assert example.splitlines() == picture(tree_reduce, 4).splitlines()


def test_the_ring_goes_around_twice_as_drawn() -> None:
    assert contents(COLLECTIVES["all_reduce"]["ring"].schedule, 3) in drawn_in(linear)


def test_the_tree_is_as_drawn() -> None:
    children = {
        rank: sorted(
            step.peer for steps in tree_broadcast(rank, 8) for step in steps if type(step) is Send
        )
        for rank in range(8)
    }

    def branches(rank: int, indent: str = "") -> list[str]:
        lines = []
        for child in children[rank]:
            last = child == children[rank][-1]
            lines.append(f"{indent}{'`-- ' if last else '|-- '}{child}")
            lines += branches(child, indent + ("    " if last else "|   "))
        return lines

    assert "\n".join(["0", *branches(0)]) in drawn_in(tree)


def test_the_core_of_halving_and_doubling_is_as_drawn() -> None:
    acts_for = [core_chunks(rank, 6) for rank in range(6)]
    numbers = iter(range(6))
    rows = [
        ("rank", [str(rank) for rank in range(6)]),
        ("new rank", [str(next(numbers)) if chunks else "." for chunks in acts_for]),
        ("acts for", [f"{c.start}:{c.stop}" if c else "." for c in acts_for]),
    ]
    for title, cells in rows:
        line = title.ljust(10) + "".join(cell.center(5) for cell in cells)
        assert line.rstrip() in drawn_in(halving_doubling)


def test_the_messages_of_an_all_to_all_are_numbered_as_drawn() -> None:
    rows = [" " * 10 + "   ".join(f"to {d}" for d in range(3))]
    for s in range(3):
        chunks = {
            step.peer: step.chunk
            for steps in direct_all_to_all(s, 3)
            for step in steps
            if type(step) is Send
        }
        chunks[s] = 3 * s + s
        rows.append(f"from {s}    " + "".join(f"  {chunks[d]}    " for d in range(3)).rstrip())
    assert "\n".join(rows) in drawn_in(linear)


def test_who_acts_for_whom_is_as_drawn() -> None:
    drawn = Agents((0, 0, 0, 1, 1), range(5))
    rows = [" " * 15 + "   ".join(map(str, range(5)))]
    for host, name in enumerate("AB"):
        acting = "   ".join(str(drawn.agent(chunk, host)) for chunk in range(5))
        ranks = " ".join(map(str, drawn.ranks_on[host]))
        rows.append(f"acts on {name}      {acting}      host {name}: ranks {ranks}")
    assert "\n".join(rows) in drawn_in(two_level)


def contents(schedule: ScheduleFunction, size: int) -> str:
    """Whose contributions, a, b, c, ..., each chunk holds, at the start and after each round."""

    def first(count: int) -> ScheduleFunction:
        def cut(rank: int, size: int) -> Schedule:
            return islice(schedule(rank, size), count)

        return cut

    def show(value: int) -> str:
        return "".join(chr(ord("a") + rank) for rank in ranks_in(value)).ljust(size)

    rounds = len(list(schedule(0, size)))
    states = [run(first(k), start("all_reduce", size, size)).state for k in range(rounds + 1)]
    titles = ["start", *(f"round {k}" for k in range(rounds))]
    width = size * (size + 1) + 2
    lines = [" " * 9 + "".join(title.ljust(width) for title in titles)]
    for rank in range(size):
        cells = [" ".join(show(value) for value in state[rank]) for state in states]
        lines.append(f"rank {rank}   " + "".join(cell.ljust(width) for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


def drawn_in(module: ModuleType) -> str:
    """The pictures of a module's docstring and of its sections' comments, without indentation."""
    comments = re.findall(r"^# (.*)$", inspect.getsource(module), re.MULTILINE)
    lines = [*(module.__doc__ or "").splitlines(), *comments]
    return "\n".join(line.removeprefix("    ") for line in lines if line.startswith("    "))
