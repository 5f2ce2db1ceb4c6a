"""Collectives that a backend has of its own: another library's, which know its wires better.

`collectives/` asks the backend first (`Backend.native`). What the library has, it carries out
whole: the `Call` is then the one step of the operation. What it has not is done with rounds of
messages, as on any backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor


class Call(NamedTuple):
    """One collective, ready to begin: what it is, and this rank's memory.

    collective   `all_reduce`, `reduce`, `broadcast`, `all_gather`, `gather`, `scatter`,
                 `reduce_scatter`, `all_to_all` or `barrier`
    source       what this rank gives, contiguous, never written; None where it gives nothing
    out          where its result goes, contiguous; None where it gets none
    op           how contributions are reduced, as `ReduceOp`'s value: `sum`, `mean`, ...
    root         rank of the group, where the collective has one

        collective       source                   out
        all_reduce       [n]                      [n], perhaps the same memory
        reduce           [n]                      [n], perhaps the same memory; on the root only
        broadcast        [n], on the root only    [n], on the root perhaps the same memory
        all_gather       [n]                      [p, n], which `source` may be a part of
        gather           [n]                      [p, n], on the root only
        scatter          [p, n], on the root      [n]
        reduce_scatter   [p, n]                   [n]
        all_to_all       [p, n]                   [p, n], other memory
    """

    collective: str
    source: Tensor | None = None
    out: Tensor | None = None
    op: str | None = None
    root: int = 0


class Native(ABC):
    """What a backend's own library can do."""

    @abstractmethod
    def has(self, call: Call) -> bool:
        """Whether the library carries out such a call: the same answer on every rank."""
