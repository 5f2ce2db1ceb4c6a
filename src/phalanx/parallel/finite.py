"""Steps that are skipped on every rank, because gradients of one are infinite or not a number."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phalanx.backends.base import Backend
from phalanx.collectives import all_gather
from phalanx.parallel.buckets import Bucket

log = logging.getLogger("phalanx")


class Skip(NamedTuple):
    """A step that was skipped.

    number      of the averaging backward pass, counted from 0
    parameters  for each rank with such gradients, the first parameter of the model that has one;
                of rank -1 where all ranks' gradients were finite and their average is not
    """

    number: int
    parameters: dict[int, str]


class FiniteCheck:
    """Looks for gradients that are not finite, and agrees with the other ranks on what it found.

    skipped   how many steps were
    last      the last of them
    """

    def __init__(self, names: dict[nn.Parameter, str], backend: Backend) -> None:
        self.skipped = 0
        self.last: Skip | None = None
        self._names = list(names.values())
        self._place = {parameter: place for place, parameter in enumerate(names)}
        self._backend = backend
        self._passes = 0
        self._first = len(self._names)  # none

    def look(self, bucket: Bucket) -> None:
        """See what is in a bucket: one pass over its memory, and one result to wait for."""
        self._first = min(self._first, self._first_in(bucket))

    def forget(self) -> None:
        """A pass did not come to its end."""
        self._first = len(self._names)

    def agree(self, averaged: list[Bucket]) -> bool:
        """Whether this step is to be skipped, the same on every rank. One message of 8 bytes."""
        none = len(self._names)
        mine, self._first = self._first, none
        found = all_gather(torch.tensor([mine], dtype=torch.int64), self._backend).tolist()
        bad = {rank: self._names[first] for rank, first in enumerate(found) if first < none}
        if not bad:  # and then the average may still be too large for its dtype, on all ranks alike
            first = min(map(self._first_in, averaged), default=none)
            bad = {-1: self._names[first]} if first < none else {}
        number, self._passes = self._passes, self._passes + 1
        if not bad:
            return False
        self.skipped += 1
        self.last = Skip(number, bad)
        log.warning(
            "rank %d: DDP: step %d is skipped on every rank: gradients are not finite: %s",
            self._backend.rank,
            number,
            "; ".join(
                f"{name} on rank {rank}" if rank >= 0 else f"the average of {name}"
                for rank, name in bad.items()
            ),
        )
        return True

    def _first_in(self, bucket: Bucket) -> int:
        none = len(self._names)
        if _is_finite(bucket.flat):
            return none
        return min(
            (self._place[p] for p, view in bucket.views.items() if not _is_finite(view)),
            default=none,
        )


def _is_finite(values: Tensor) -> bool:
    """Whether all are. Their sum tells, at the speed of memory, unless it is too large itself."""
    wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    if values.numel() == 0 or values.sum(dtype=wide).isfinite():
        return True
    return bool(values.isfinite().all())
