"""Tracebacks as the user's own code would give them: without the frames that started it."""

from __future__ import annotations

import traceback
from collections.abc import Collection

__all__ = ["format_traceback"]


def format_traceback(error: BaseException, *, hide: Collection[str]) -> str:
    """Return the traceback of `error` as text, without its first frames that are in files `hide`.

    An error that has no other frame (a script with a syntax error) has no frames then.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in hide:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))
