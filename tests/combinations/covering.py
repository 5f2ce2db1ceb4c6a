"""Which cells the table has: pairs (wrapper, feature), and triples (wrapper, feature, feature).

Triples are covered by sets of features such that every two that fit together are in one of them, in
far fewer cells than there are triples: a cell with five features has ten pairs of them.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Sequence
from itertools import combinations

from expected import refusal_of, torch_refuses
from feature import Feature, fits
from wrappers import Way

Cell = tuple[Way, tuple[Feature, ...]]


def covering(features: Sequence[Feature], width: int, seed: int) -> list[tuple[Feature, ...]]:
    """Sets of at most `width` features, greedily; the same for the same seed.

    Sets with a feature that takes seconds are twice as wide, so that there are fewer of them.
    """
    draw = random.Random(seed)
    order = {one: number for number, one in enumerate(features)}
    left = {frozenset(pair) for pair in combinations(features, 2) if fits(*pair)}
    found: list[tuple[Feature, ...]] = []
    while left:
        first = min(left, key=lambda pair: sorted(order[one] for one in pair))
        chosen = sorted(first, key=order.__getitem__)
        others = [one for one in features if one not in first]
        draw.shuffle(others)
        while len(chosen) < width * (2 if any(one.slow for one in chosen) else 1):
            new = {
                one: sum(frozenset((one, other)) in left for other in chosen)
                for one in others
                if one not in chosen
                and all(fits(one, other) for other in chosen)
                and not torch_refuses([*chosen, one])
            }
            best = max(new, key=new.__getitem__, default=None)
            if best is None or not new[best]:
                break
            chosen.append(best)
        left -= {frozenset(pair) for pair in combinations(chosen, 2)}
        found.append(tuple(sorted(chosen, key=order.__getitem__)))
    return found


def pairs(ways: Sequence[Way], features: Sequence[Feature]) -> Iterator[Cell]:
    """Each wrapper with each feature that can be asked of it."""
    for way in ways:
        for one in features:
            if not one.lacks(way):
                yield way, (one,)


def triples(
    ways: Sequence[Way],
    features: Sequence[Feature],
    width: int,
    seed: int,
    wrong: Container[tuple[Way, Feature]] = (),
) -> Iterator[Cell]:
    """Each wrapper with sets of features in which any two that fit are together.

    wrong   which features are wrong with a wrapper alone already: they would hide others
    """
    for way in ways:
        able = [one for one in features if not one.lacks(way) and not refusal_of(way, [one])]
        able = [one for one in able if one.name != "plain"]
        for chosen in covering([one for one in able if (way, one) not in wrong], width, seed):
            yield way, chosen
