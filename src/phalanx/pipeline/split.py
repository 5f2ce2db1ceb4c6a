"""How layers are cut into stages: by equal numbers of layers, or by equal costs."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise
from operator import index
from typing import NamedTuple


class PipelineStage(NamedTuple):
    """The layers [start_layer, end_layer), and the rank that they are on."""

    start_layer: int
    end_layer: int
    rank: int


def even_sizes(total: int, parts: int) -> list[int]:
    """Cut `total` into sizes that differ by at most one; the larger first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def split_into_stages(num_layers: int, num_stages: int) -> list[PipelineStage]:
    """Cut layers into stages one after the other, of sizes that differ by at most one.

        split_into_stages(7, 3)      [0, 3) on rank 0, [3, 5) on rank 1, [5, 7) on rank 2

    The larger stages come first. Raises ValueError for no stages, and for more than there are
    layers.
    """
    num_layers, num_stages = index(num_layers), index(num_stages)
    _check_number(num_layers, num_stages)
    return _stages([0, *accumulate(even_sizes(num_layers, num_stages))])


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
    exact = [Fraction(cost) for cost in costs]
    scale = math.lcm(*(cost.denominator for cost in exact))  # sums of whole numbers are exact
    upto = [0, *accumulate(int(cost * scale) for cost in exact)]
    most = _smallest_maximum(upto, num_stages)
    n = len(costs)

    @cache
    def best(start: int, stages: int) -> tuple[float, int]:
        """The least sum of squares of the layers from `start` on, and where its first stage ends.

        It is infinite if these layers cannot be so many stages.
        """
        if stages == 1:
            total = upto[n] - upto[start]
            return (total * total if total <= most else math.inf), n
        least, first_end = math.inf, n
        furthest = min(bisect_right(upto, upto[start] + most) - 1, n - stages + 1)
        for end in range(furthest, start, -1):  # the longest first, which wins a tie
            rest, _ = best(end, stages - 1)
            if rest == math.inf:
                break  # a shorter stage leaves even more to the others
            squares = (upto[end] - upto[start]) ** 2 + rest
            if squares < least:
                least, first_end = squares, end
        return least, first_end

    ends = [0]
    for stages in range(num_stages, 0, -1):
        ends.append(best(ends[-1], stages)[1])
    return _stages(ends)


def _check_number(num_layers: int, num_stages: int) -> None:
    if num_stages < 1:
        raise ValueError(f"there have to be 1 or more stages, not {num_stages}")
    if num_stages > num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be {num_stages} stages: each needs a layer. Use fewer "
            "stages, or fewer chunks on each"
        )


def _stages(ends: list[int]) -> list[PipelineStage]:
    return [PipelineStage(start, end, rank) for rank, (start, end) in enumerate(pairwise(ends))]


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
