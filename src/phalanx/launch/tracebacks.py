"""Tracebacks as the user's own code would give them: without the frames that started it."""

from __future__ import annotations

import traceback
from collections.abc import Collection

__all__ = ["error_line", "format_traceback"]


def format_traceback(error: BaseException, *, hide: Collection[str]) -> str:
    """Return the traceback of `error` as text, without its first frames that are in files `hide`.

    An error that has no other frame (a script with a syntax error) has no frames then.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in hide:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def error_line(error: BaseException) -> str:
    """Return `error` in one line, `ValueError: a bug`, without the notes that it carries."""
    told = traceback.TracebackException(type(error), error, None)
    notes = "__notes__"
    if hasattr(told, notes):
        setattr(told, notes, None)
    return list(told.format_exception_only())[-1].strip().partition("\n")[0]
