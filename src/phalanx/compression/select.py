"""The k largest magnitudes, exactly, ties and all, in time proportional to n: radix selection.

The bits of a float, without its sign, order as its magnitude does. So the k-th largest is found 16
bits at a time: count how often each value of the highest 16 occurs, see in which the k-th lies, go
on with those.

Of many values a few tell where to look: a bound that most likely some more than k reach. Only those
that do are gone through, unless they turn out to be fewer than k.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, sqrt
from types import MappingProxyType

import torch
from torch import Tensor

DIGIT = 16  # bits

SAMPLE = 1 << 14
"""Values by which the bound is chosen."""

PIECE = 1 << 18
"""Values that are looked at together: what is worked out about them stays in the caches."""


def largest(values: Tensor, k: int) -> Tensor:
    """The indices of the k values of largest magnitude of `[n]`, ascending, int64.

    Of equal magnitudes the one of lowest index comes first; NaN is larger than infinity.
    """
    if k in (0, len(values)):
        return torch.arange(k, device=values.device)
    places = _candidates(values, k)
    keys = _keys(values if places is None else values[places])
    kth, needed = _kth_largest(keys, k)
    above = (keys > kth).nonzero().flatten()
    equal = (keys == kth).nonzero().flatten()[:needed]
    found = torch.cat([above, equal]).sort().values
    return found if places is None else places[found]


def _candidates(values: Tensor, k: int) -> Tensor | None:
    """Some indices, ascending, those of the k largest among them. None: it may be any."""
    n = len(values)
    stride = n // SAMPLE
    if stride < 2:
        return None
    sample = values[::stride]
    expected = len(sample) * k / n  # of the k largest, in the sample
    some_more = ceil(expected + 4 * sqrt(expected) + 4)
    if some_more > len(sample) // 4:  # to go through so many takes longer than it saves
        return None
    bound, _ = _kth_largest(_keys(sample), some_more)
    if bound == 0:  # which all reach
        return None
    size = PIECE if values.device.type == "cpu" else n
    found = [
        (_keys(piece) >= bound).nonzero().flatten() + number * size
        for number, piece in enumerate(torch.split(values, size))
    ]
    places = torch.cat(found)
    return places if len(places) >= k else None


def _keys(values: Tensor) -> Tensor:
    """Integers in the order of magnitudes."""
    bits = _BITS[values.dtype]
    keys = values.abs().view(bits)
    infinity = torch.tensor(torch.inf, dtype=values.dtype).view(bits)
    keys.clamp_(max=int(infinity) + 1)  # as if there were one NaN
    return keys.int() if bits is torch.int16 else keys  # in which a digit is no negative number


def _kth_largest(keys: Tensor, k: int) -> tuple[int, int]:
    """The k-th largest key, and how many of those that equal it are among the k largest."""
    kth = 0
    for shift in range(keys.dtype.itemsize * 8 - DIGIT, -1, -DIGIT):
        digits = keys >> shift & 0xFFFF
        counts = digits.bincount(minlength=1 << DIGIT)
        at_least = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(at_least, k))
        digit = (1 << DIGIT) - 1 - place
        k -= int(at_least[place]) - int(counts[digit])
        kth |= digit << shift
        keys = keys[digits == digit]
    return kth, k


_BITS: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {
        torch.float16: torch.int16,
        torch.bfloat16: torch.int16,
        torch.float32: torch.int32,
        torch.float64: torch.int64,
    }
)
