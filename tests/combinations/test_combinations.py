"""Every wrapper and every feature, at least once; and a part of the table that the date chooses.

All of it is `make combinations`. What a cell is, and when it is right: `cells.py`.
"""

from __future__ import annotations

import multiprocessing
import random
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cells import WRONG, alone
from covering import Cell, covering, pairs
from expected import REFUSED, TORCH_IS_WRONG, TORCH_REFUSES, refusal_of
from feature import Feature, fits
from features import FEATURES
from places import Place, place_of
from table import names_in
from wrappers import WAYS, Way

HERE = Path(__file__).parent
CHOSEN = 16  # cells that the date chooses
SLOW = ("DDP", "FULL_SHARD", "1F1B")  # wrappers with which what takes seconds is tried here


def each_once() -> list[Cell]:
    """Each wrapper and each feature at least once: the features in turn, with one wrapper each."""
    found: list[Cell] = []
    for number, one in enumerate(FEATURES):
        able = [way for way in WAYS if not one.lacks(way)]
        if one.slow:
            able = [way for way in able if way.name in SLOW]
        if able:
            found.append((able[number % len(able)], (one,)))
    seen = {way for way, _ in found}
    plain = FEATURES[0]
    return found + [(way, (plain,)) for way in WAYS if way not in seen]


def seed() -> str:
    """The date of the commit; the same for all who test it."""
    command = ["git", "log", "-1", "--format=%cs"]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return done.stdout.strip() or "no commit"


def of_the_day() -> list[Cell]:
    """Some cells more, with one feature or two."""
    draw = random.Random(seed())
    quick = [one for one in FEATURES if not one.slow]
    every = list(pairs(WAYS, quick))
    found = [draw.choice(every) for _ in range(CHOSEN // 2)]
    while len(found) < CHOSEN:
        way = draw.choice(WAYS)
        able = [one for one in quick if not one.lacks(way) and not refusal_of(way, [one])]
        one, other = draw.sample(able, 2)
        if fits(one, other):
            found.append((way, (one, other)))
    return found


def name_of(cell: Cell) -> str:
    return "-".join([cell[0].name, *(one.name for one in cell[1])])


def check(place: Place, cell: Cell) -> None:
    verdict = place.run(*cell)
    assert verdict.status != WRONG, f"{place.name}: {verdict.words} (chosen by {seed()!r})"


@pytest.mark.parametrize("cell", each_once(), ids=name_of)
def test_each_wrapper_and_each_feature_is_right_or_refused(cell: Cell) -> None:
    check(Place(), cell)


@pytest.mark.parametrize("cell", of_the_day(), ids=name_of)
def test_the_part_of_the_day_is_right_or_refused(cell: Cell) -> None:
    print(f"the seed of this part of the table is {seed()!r}")
    check(Place(), cell)


@pytest.fixture(scope="module", params=["shm", "tcp"])
def processes(request: pytest.FixtureRequest) -> Iterator[Place]:
    place = place_of(request.param)
    yield place
    place.close()


def test_each_wrapper_is_right_where_ranks_are_processes(processes: Place) -> None:
    for way in WAYS:
        check(processes, (way, (FEATURES[0],)))


# The table itself -------------------------------------------------------------------------------


def test_every_two_features_that_fit_are_together_in_a_set() -> None:
    sets = covering(FEATURES, 5, seed=1)
    together = {frozenset(pair) for chosen in sets for pair in combinations(chosen, 2)}
    assert together == {frozenset(p) for p in combinations(FEATURES, 2) if fits(*p)}
    assert all(fits(*pair) for chosen in sets for pair in combinations(chosen, 2))


def test_what_is_refused_is_in_the_table() -> None:
    names = {one.name for one in FEATURES}
    assert {row.feature for row in REFUSED} <= names
    assert len(names) == len(FEATURES)
    assert frozenset().union(*TORCH_REFUSES, *TORCH_IS_WRONG) <= names


REFUSED_AT_ONCE = [
    names for names in TORCH_REFUSES if not any(one.slow for one in FEATURES if one.name in names)
]


@pytest.mark.parametrize("names", REFUSED_AT_ONCE, ids=lambda names: " x ".join(sorted(names)))
def test_one_process_refuses_what_is_no_cell(names: frozenset[str]) -> None:
    with pytest.raises(Exception, match=TORCH_REFUSES[names]):
        alone(WAYS[0], tuple(one for one in FEATURES if one.name in names))


def test_a_cell_that_one_process_refuses_is_wrong_where_ranks_do_not() -> None:
    clips = tuple(one for one in FEATURES if one.name in ("clip_grad_norm_", "sparse gradients"))
    verdict = Place().run(WAYS[0], clips)
    assert verdict.status == WRONG
    assert "does torch refuse it?" in verdict.words


def test_a_cell_that_fails_leaves_no_process_of_a_loader() -> None:
    before = set(multiprocessing.active_children())
    names = "DataLoader", "one rank fails in backward"
    check(Place(), (WAYS[0], tuple(one for one in FEATURES if one.name in names)))
    assert set(multiprocessing.active_children()) <= before


def test_names_of_wrappers_and_features_may_have_commas_and_exist() -> None:
    parser, known = ArgumentParser(), ["checkpoint", "checkpoint, async", "join"]
    assert names_in(parser, "--features", "join, checkpoint, async,checkpoint", known) == [
        *("join", "checkpoint, async", "checkpoint")
    ]
    assert names_in(parser, "--features", "", known) == known
    with pytest.raises(SystemExit):
        names_in(parser, "--features", "join,checkpoin", known)


@pytest.mark.parametrize("way", [way for way in WAYS if way.local or way.parts > 1], ids=str)
def test_a_wrong_value_is_found(way: Way) -> None:
    """What one process comes to depends on each part of the batch."""
    whole: tuple[Feature, ...] = (FEATURES[0],)
    first, last = alone(way, whole)[0], alone(way, whole)[-1]
    assert first.states[""].keys() == last.states[""].keys()
    moved = [(first.states[""][n] - v).abs().max() for n, v in first.first.items()]
    assert max(moved) > 0.01
