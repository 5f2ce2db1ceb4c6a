"""The stage: memory beside a tensor, where contributions wait to be folded in rank order.

Fresh memory costs about as much as what is done with it, since the kernel clears every page at its
first touch. So a backend keeps the stage of one collective for the next. None is larger than a
plan's `STAGE_LIMIT`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.backends.engine import Round

LARGEST_KEPT = 64 << 20  # bytes, of one stage for each backend
_KEY = "the stage that is kept"


def borrow_stage(backend: Backend, size: int) -> Tensor:
    """At least `size` bytes, uninitialized, which no other operation has."""
    kept = backend.plans.pop(_KEY, None)
    if isinstance(kept, Tensor) and kept.nbytes >= size:
        return kept
    return torch.empty(size, dtype=torch.uint8)


def return_stage(backend: Backend, stage: Tensor) -> None:
    """Nobody uses it any more. The next collective finds the last one that is not too large."""
    if stage.nbytes <= LARGEST_KEPT:
        backend.plans[_KEY] = stage


def then_return(steps: Iterable[Round], backend: Backend, stage: Tensor) -> Iterator[Round]:
    """The same steps; after the last, the stage is returned. Of those that fail it is not."""
    yield from steps
    return_stage(backend, stage)
