"""The k largest magnitudes, exactly, ties and all, in time proportional to n: radix selection.

The bits of a float, without its sign, order as its magnitude does. So the k-th largest is found 16
bits at a time: count how often each value of the highest 16 occurs, see in which the k-th lies, go
on with those.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

DIGIT = 16  # bits


def largest(values: Tensor, k: int) -> Tensor:
    """The indices of the k values of largest magnitude of `[n]`, ascending, int64.

    Of equal magnitudes the one of lowest index comes first; NaN is larger than infinity.
    """
    keys = _keys(values)
    if k in (0, len(keys)):
        return torch.arange(k, device=values.device)
    kth, needed = _kth_largest(keys, k)
    above = (keys > kth).nonzero().flatten()
    equal = (keys == kth).nonzero().flatten()[:needed]
    return torch.cat([above, equal]).sort().values


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
