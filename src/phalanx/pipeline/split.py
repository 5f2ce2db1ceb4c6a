"""Which layers are a stage: equal numbers of them, or equal costs."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import accumulate
from operator import index
from typing import NamedTuple


class PipelineStage(NamedTuple):
    """The layers [start_layer, end_layer), and the rank that they are on."""

    start_layer: int
    end_layer: int
    rank: int


def sizes_of(total: int, parts: int) -> list[int]:
    """The sizes of `parts` parts of `total`, which differ by at most one; the larger first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def split_into_stages(num_layers: int, num_stages: int) -> list[PipelineStage]:
    """Cut layers into stages one after the other, of sizes that differ by at most one.

        split_into_stages(7, 3)      [0, 3) on rank 0, [3, 5) on rank 1, [5, 7) on rank 2

    The larger stages come first. Raises ValueError for no stages, and for more than there are
    layers.
    """
    num_layers, num_stages = index(num_layers), index(num_stages)
    _check_number(num_layers, num_stages)
    return _stages(sizes_of(num_layers, num_stages))


def balance_stages(costs: Sequence[float], num_stages: int) -> list[PipelineStage]:
    """Cut layers into stages so that the one that costs most costs as little as it can.

    costs        of each layer, in any unit, 0 or more: seconds (see `measure_layer_costs`), FLOPs,
                 bytes of parameters

        balance_stages([1, 1, 1, 3], 2)      [0, 3) on rank 0, [3, 4) on rank 1

    A pipeline is as fast as its slowest stage. No stage is empty. Of several such splits this gives
    the one whose stages differ least (the sum of squares), and of those the one with the larger
    first: equal costs are split as by `split_into_stages`. Exact for floats, too; takes about
    n * n operations for n layers. Raises ValueError for a cost that is negative or not finite, and
    as `split_into_stages` does.
    """
    _check_number(len(costs), num_stages)
    for layer, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"the cost of layer {layer} is {cost!r}; it has to be 0 or more")
    upto = [0, *accumulate(_integers(costs))]
    most = _smallest_maximum(upto, num_stages)
    n = len(costs)

    @cache
    def best(start: int, stages: int) -> tuple[int | None, int]:
        """The least sum of squares of the layers from `start` on, None: impossible; first end."""
        if stages == 1:
            total = upto[n] - upto[start]
            return (total * total if total <= most else None), n
        found: tuple[int | None, int] = (None, n)
        furthest = min(bisect_right(upto, upto[start] + most) - 1, n - stages + 1)
        for end in range(furthest, start, -1):  # the longest first, which wins a tie
            rest = best(end, stages - 1)[0]
            if rest is None:
                break  # a shorter stage leaves even more to the others
            squares = (upto[end] - upto[start]) ** 2 + rest
            if found[0] is None or squares < found[0]:
                found = squares, end
        return found

    sizes, start = [], 0
    for stages in range(num_stages, 0, -1):
        end = best(start, stages)[1]
        sizes.append(end - start)
        start = end
    return _stages(sizes)


def _check_number(num_layers: int, num_stages: int) -> None:
    if num_stages < 1:
        raise ValueError(f"there have to be 1 or more stages, not {num_stages}")
    if num_stages > num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be {num_stages} stages: each needs a layer. Use fewer "
            "stages, or fewer chunks on each"
        )


def _stages(sizes: list[int]) -> list[PipelineStage]:
    ends = list(accumulate(sizes))
    return [
        PipelineStage(end - size, end, rank)
        for rank, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def _integers(costs: Sequence[float]) -> list[int]:
    """The costs times a power of two that makes them whole: sums of these are exact."""
    exact = [Fraction(cost) for cost in costs]
    whole = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * whole) for cost in exact]


def _smallest_maximum(upto: list[int], num_stages: int) -> int:
    """The least that the largest of `num_stages` stages can cost, by bisection."""

    def fits(most: int) -> bool:
        start = 0
        for _ in range(num_stages):
            start = bisect_right(upto, upto[start] + most) - 1
        return start == len(upto) - 1

    low, high = 0, upto[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
