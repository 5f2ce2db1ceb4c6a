"""How many threads a rank may use, when ranks share a host."""

from __future__ import annotations

import os

__all__ = ["threads_per_rank"]


def threads_per_rank(ranks: int) -> int:
    """Return the fair share of this process's cores for each of `ranks`, at least one."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // ranks)
