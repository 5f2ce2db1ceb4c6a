"""Freed memory is given back to the system at once, in a process that has begun already."""

from __future__ import annotations

import ctypes

from phalanx.ops.bench.peaks import GIVES_BACK

M_MMAP_THRESHOLD = -3  # of mallopt(3): what the variable of `GIVES_BACK` sets at the start


def give_back() -> None:
    """Do as in the environment `GIVES_BACK`, if the C library is glibc."""
    (threshold,) = GIVES_BACK.values()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    assert mallopt is None or mallopt(M_MMAP_THRESHOLD, int(threshold)) == 1
