"""The caller's line: where in the user's program an operation was asked for."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import NamedTuple

_INSIDE = ("phalanx.", "torch.")  # packages between the user's line and here


class Site(NamedTuple):
    """A line of a program."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}" if self.line else "an unknown line"


NOWHERE = Site("", 0)


def caller() -> Site:
    """The innermost line on the stack that is neither of Phalanx nor of torch.

    For a gradient that a hook sends during `loss.backward()`, that is the line of the `backward()`.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not (frame.f_globals.get("__name__") or "").startswith(_INSIDE):
            return Site(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return NOWHERE
