"""Random numbers that are the same again: a generator for a seed and what it is drawn for."""

from __future__ import annotations

import torch
from xxhash import xxh3_64_intdigest


def generator(*what: object, device: torch.device) -> torch.Generator:
    """A generator on that device, seeded with numbers and words; apart from torch's global one."""
    digest = xxh3_64_intdigest(repr(what).encode()) >> 1  # 63 bits: it takes no negative number
    return torch.Generator(device).manual_seed(digest)
