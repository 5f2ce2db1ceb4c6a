"""Membership, model-checked: its promises hold in every interleaving, and planted faults are found.

steps    that may count in each generation; as many generations
deaths   of members; doubts: members that live are lost to others; lates: writes that arrive late
         or never, though their writers saw an error, or are dead
most     states, for what is too large to be seen whole
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from forms import LONG
from membership_model import Model, Violation, World

from phalanx.elastic.membership import NextAction, View

SHORT: list[tuple[int, dict[str, Any]]] = [
    (3, {"steps": (2, 1, 1), "deaths": 2}),
    (3, {"steps": (1, 1), "deaths": 2, "lates": 1}),
    (3, {"steps": (1, 1), "deaths": 1, "doubts": 1}),
    (3, {"steps": (2, 1), "deaths": 0, "doubts": 1}),
    (3, {"steps": (1, 1, 1), "deaths": 0, "doubts": 1}),  # who was given up comes back
    (4, {"steps": (1, 1), "deaths": 2, "most": 15_000}),
]
LONGER: list[tuple[int, dict[str, Any]]] = [
    (3, {"steps": (1, 1), "deaths": 2, "doubts": 1, "lates": 1}),
    (3, {"steps": (2, 1, 1), "deaths": 2, "lates": 1}),
    (3, {"steps": (1, 1, 1), "deaths": 1, "doubts": 1}),
    (4, {"steps": (1, 1), "deaths": 2}),
    (4, {"steps": (1, 1, 1), "deaths": 3, "doubts": 2, "lates": 1, "most": 500_000}),
]


@pytest.fixture(autouse=True)
def _keeps_all_states() -> Iterator[None]:
    """To look for garbage among them takes a quarter of the time."""
    gc.disable()
    yield
    gc.enable()


def name(case: object) -> str:
    return " ".join(f"{k}={v}" for k, v in case.items()) if isinstance(case, dict) else f"{case}"


@pytest.mark.parametrize(("count", "bounds"), SHORT + LONGER * LONG, ids=name)
def test_the_promises_hold_in_every_interleaving(count: int, bounds: dict[str, Any]) -> None:
    most = bounds.get("most", 0)
    faults = {key: value for key, value in bounds.items() if key != "most"}
    seen = Model(count, **faults).explore(most)
    assert seen > (most or 5_000)


class HasNoPatience(Model):
    """Any process may be overdue at any time: a clock that is wrong costs no step."""

    def successors(self, world: World) -> Iterator[tuple[str, World]]:
        yield from super().successors(world)
        for number, process in enumerate(world.processes):
            if process.phase == "r":
                for label, after in self.look(world, number, overdue=True):
                    yield f"{label}, overdue", self.tidy(after)


@pytest.mark.parametrize(
    "bounds", [{"steps": (1, 1), "deaths": 2}, {"steps": (2, 1, 1), "deaths": 1}]
)
def test_no_promise_hangs_on_a_clock(bounds: dict[str, Any]) -> None:
    assert HasNoPatience(3, **bounds).explore() > 5_000


class Overwrites(Model):
    def write_decision(self, written: int, proposed: int) -> int:
        return proposed


class ProposesTooEarly(Model):
    """Before all others have reported, or are lost."""

    def act(self, view: View) -> NextAction:
        return super().act(msgspec.structs.replace(view, overdue=True))


class WaitsForEver(Model):
    """For those whom only the dead had reason to take for lost."""

    def act(self, view: View) -> NextAction:
        return super().act(msgspec.structs.replace(view, overdue=False))


class VotesTooEarly(Model):
    """Before its part of the next version is kept."""

    votes_unkept = True


class KeepsOneVersion(Model):
    """Which is invalid while it is written."""

    def begin_to_keep(self, valid: tuple[int, ...]) -> tuple[int, ...]:
        return ()


class DropsTooEarly(Model):
    """What the generation before has kept, as soon as this one has its state."""

    drops_at = 0


class KeepsOnWriting(Model):
    """Though a rank of its host has reported."""

    fences = False


@pytest.mark.parametrize(
    ("fault", "bounds", "found"),
    [
        (Overwrites, {"steps": (1, 1), "deaths": 2, "lates": 1}, "generation 2 is decided twice"),
        (
            ProposesTooEarly,
            {"steps": (1, 1), "deaths": 1},
            "nobody has lost it, and it is left out",
        ),
        (WaitsForEver, {"steps": (1, 1), "deaths": 2, "doubts": 1}, "waits for ever"),
        (VotesTooEarly, {"steps": (1, 1), "deaths": 1}, "a step that has counted for . is lost"),
        (KeepsOneVersion, {"steps": (1, 1), "deaths": 1}, "a step that has counted for . is lost"),
        (DropsTooEarly, {"steps": (1, 1, 1), "deaths": 2}, "a step that has counted for . is lost"),
        (KeepsOnWriting, {"steps": (2, 1), "deaths": 0, "doubts": 1}, "part 1 of .* is nowhere"),
    ],
)
def test_a_planted_fault_is_found(fault: type[Model], bounds: dict[str, Any], found: str) -> None:
    with pytest.raises(Violation, match=found):
        fault(3, **bounds).explore()


def test_a_violation_tells_the_way_to_it() -> None:
    with pytest.raises(Violation) as raised:
        KeepsOneVersion(3, steps=(1, 1), deaths=1).explore()
    assert str(raised.value).splitlines()[:-1] == [
        "0 steps",
        "0 dies",
        "1 loses 0, 1 reports",
        "2 loses 0, 2 reports",
    ]
