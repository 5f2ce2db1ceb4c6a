"""What the runs of a row say together, and how they compare with dense ones of the same seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from math import isnan, nan
from typing import NamedTuple

from compressed_training.rows import DENSE, Row
from compressed_training.runs import Run, Runs

CLOSE = 0.03
"""By how much the loss of a target may be above dense at equal steps, as a part of that."""

FEWER = 30
"""How many times fewer bytes a target sends."""

SAME = 0.01
"""By how much what is counted and what the backend was given may differ: where no algorithm of an
all-reduce sends the least there is (three ranks, few bytes), a little."""

ROUNDING = 1e-4
"""By how much losses of the same batches may differ between one process and several."""


class Spread(NamedTuple):
    """The lowest, the middle and the highest of some numbers."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one; no numbers, if one of them is none."""
        if any(isnan(value) for value in values):
            return cls(nan, nan, nan)
        return cls(min(values), statistics.median(values), max(values))


class Summary(NamedTuple):
    """A row's runs.

    loss      held out, at the end
    above     that over dense's of the same seed, minus one; None: there is no dense run of a seed
    nbytes    that a rank has sent in all
    fewer     how many times fewer than dense; None, too
    seconds   a step's
    """

    row: str
    seeds: int
    loss: Spread
    above: Spread | None
    nbytes: float
    fewer: float | None
    seconds: float

    @property
    def reaches_target(self) -> bool:
        """Whether it is close to dense with few bytes, by its medians."""
        return (
            self.above is not None
            and self.fewer is not None
            and self.above.median <= CLOSE
            and self.fewer >= FEWER
        )


def summarize(runs: Runs, names: Iterable[str]) -> list[Summary]:
    """Of each of these rows that has runs, in this order."""
    dense = {run.seed: run for run in runs.of(DENSE)}
    return [_summary(name, mine, dense) for name in names if (mine := runs.of(name))]


def _summary(name: str, mine: list[Run], dense: dict[int, Run]) -> Summary:
    pairs = [(run, dense[run.seed]) for run in mine if run.seed in dense]
    above = [run.held_out[-1] / plain.held_out[-1] - 1 for run, plain in pairs]
    fewer = [plain.bytes_sent[-1] / run.bytes_sent[-1] for run, plain in pairs]
    return Summary(
        row=name,
        seeds=len(mine),
        loss=Spread.of([run.held_out[-1] for run in mine]),
        above=Spread.of(above) if pairs else None,
        nbytes=statistics.median(run.bytes_sent[-1] for run in mine),
        fewer=statistics.median(fewer) if pairs else None,
        seconds=statistics.median(run.seconds for run in mine),
    )


def curve(runs: Sequence[Run]) -> tuple[list[int], list[float]]:
    """Steps, and the median of the held-out losses of some runs of a row then."""
    columns = zip(*(run.held_out for run in runs), strict=True)
    return runs[0].steps, [statistics.median(column) for column in columns]


def complaints(run: Run, plain: Sequence[float]) -> list[str]:
    """What is wrong with a run, whatever its loss.

    plain   the first losses of one process with the joined batch
    """
    found, where = [], f"{run.row}, seed {run.seed}: "
    if not run.identical:
        found.append(where + "the ranks ended with other parameters")
    if abs(run.wire - run.counted) > SAME * run.wire:
        found.append(
            where + f"{run.counted:,.0f} bytes were counted, and {run.wire:,.0f} given to the "
            "backend"
        )
    if run.row == DENSE:
        for number, (ours, theirs) in enumerate(zip(run.training, plain, strict=False)):
            if not abs(ours - theirs) <= ROUNDING * theirs:
                found.append(
                    where + f"the loss of step {number} is {ours:.6f}, and that of one process "
                    f"with the joined batch {theirs:.6f}"
                )
                break
    return found


def verdicts(summaries: Sequence[Summary], table: dict[str, Row]) -> list[tuple[bool, str]]:
    """Of each target, whether it is reached, and that in words."""
    return [
        (
            one.reaches_target,
            f"{one.row}: {one.above.median:+.1%} of the dense loss with {one.fewer:.0f} times "
            f"fewer bytes: {'reaches' if one.reaches_target else 'MISSES'} the target of "
            f"{CLOSE:+.0%} with {FEWER}",
        )
        for one in summaries
        if one.row in table and table[one.row].target
        if one.above is not None and one.fewer is not None
    ]
