"""The output of many ranks on one stream: whole lines only, each behind its rank."""

from __future__ import annotations

import io
import re
import threading
from typing import TextIO

__all__ = ["PREFIX_TEMPLATE", "RankLines"]

PREFIX_TEMPLATE = "[rank ${rank}] "
"""What torch's agent puts before each piece of output."""

_PREFIX = re.compile(r"\[rank \d+\] ")


class RankLines(io.TextIOBase):
    r"""A stream that joins the pieces of each rank's lines, and passes on whole lines.

        "[rank 0] los"  "[rank 1] hello\n"  "[rank 0] s 3\n"
        -> "[rank 1] hello\n"  "[rank 0] loss 3\n"

    Torch's agent writes whatever of a line it finds, behind the prefix each time, from one thread
    a rank. A reader that has gone away is no error: the ranks go on. `finish()` passes on what
    has no end of line.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lock = threading.Lock()
        self._begun: dict[str, str] = {}

    def write(self, text: str) -> int:
        """Take one piece, which ends at most one line."""
        match = _PREFIX.match(text)
        with self._lock:
            if match is None:
                self._pass_on(text)
                return len(text)
            prefix = match[0]
            line = self._begun.pop(prefix, "") + text[len(prefix) :]
            if line.endswith("\n"):
                self._pass_on(prefix + line)
            else:
                self._begun[prefix] = line
        return len(text)

    def flush(self) -> None:
        """Do nothing: every whole line has been passed on and flushed."""

    def writable(self) -> bool:
        """Return True."""
        return True

    def finish(self) -> None:
        """Pass on the lines that have begun, as whole ones."""
        with self._lock:
            for prefix, line in self._begun.items():
                self._pass_on(f"{prefix}{line}\n")
            self._begun.clear()

    def _pass_on(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (BrokenPipeError, ValueError):
            pass
