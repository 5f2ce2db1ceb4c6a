"""Modes: when a worker may begin its next step, and what is applied together. Rows of one table.

                    ahead of the slowest   the server applies              as in
    SYNCHRONOUS     0 steps                the mean of a step of all       one process
    staleness(s)    s steps                each push when it comes         Ho et al. 2013, "SSP"
    ASYNCHRONOUS    any number             each push when it comes         Recht et al. 2011; Dean
                                                                           et al. 2012

A worker that has done c steps may begin step c+1 while c - min <= s, min being how many the slowest
has done that has joined. So with staleness(0) they go in lock-step, but each push is a step of the
optimizer by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class ServerMode:
    """A row: `SYNCHRONOUS`, `ASYNCHRONOUS`, or `staleness(s)`.

    name       as it is written in messages
    bound      how many steps a worker may be ahead of the slowest that has joined
    together   whether the gradients of a step are averaged, and are one step of the optimizer; then
               nobody may be missing: a worker that is lost is everyone's error, not its own
    """

    name: str
    bound: float
    together: bool

    SYNCHRONOUS: ClassVar[ServerMode]
    ASYNCHRONOUS: ClassVar[ServerMode]

    @staticmethod
    def staleness(bound: int) -> ServerMode:
        """Each at most `bound` steps ahead of the slowest. ValueError for a negative number."""
        if bound < 0:
            raise ValueError(f"staleness({bound}): nobody is ahead by fewer steps than 0")
        return ServerMode("staleness", bound, together=False)

    def __str__(self) -> str:
        if self.name == "staleness":
            return f"staleness({self.bound})"
        return self.name.upper()

    __repr__ = __str__


ServerMode.SYNCHRONOUS = ServerMode("synchronous", 0, together=True)
ServerMode.ASYNCHRONOUS = ServerMode("asynchronous", math.inf, together=False)
