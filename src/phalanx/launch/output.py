"""The output of many ranks on one stream: whole lines only, each behind its rank."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from typing import TextIO

__all__ = ["LONGEST_LINE", "RankLines"]

LONGEST_LINE = 1 << 20
"""Bytes of a line that are kept until its end comes; a longer one is shown in pieces."""


class RankLines:
    r"""Joins the pieces of each rank's lines, and passes on whole lines.

        rank 0: "los"   rank 1: "hello\n"   rank 0: "s 3\n"
        -> "[rank 1] hello\n"  "[rank 0] loss 3\n"

    Bytes go through as they are, whatever their encoding. A reader that has gone away is no
    error: the ranks go on. `finish()` passes on what has no end of line.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False
        self._begun: dict[int, bytes] = {}

    def write(self, rank: int, data: bytes) -> None:
        """Take what `rank` has written, any part of it."""
        lines, newline, rest = (self._begun.pop(rank, b"") + data).rpartition(b"\n")
        if len(rest) >= LONGEST_LINE:
            lines, newline, rest = lines + newline + rest, b"\n", b""
        if newline:
            prefix = b"[rank %d] " % rank
            self._pass_on(prefix + lines.replace(b"\n", b"\n" + prefix) + b"\n")
        if rest:
            self._begun[rank] = rest

    def finish(self) -> None:
        """Pass on the lines that have begun, as whole ones."""
        for rank in list(self._begun):
            self.write(rank, b"\n")

    def _pass_on(self, data: bytes) -> None:
        if self._gone:
            return
        try:
            self._stream.flush()  # what others have written to it
            self._write(data)
        except (OSError, ValueError):
            self._gone = True
            self._forget_reader()

    def _write(self, data: bytes) -> None:
        try:
            descriptor = self._stream.fileno()
        except OSError:  # in memory, say
            self._write_above(data)
            return
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:  # somebody at the other end has made it so
                select.select([], [descriptor], [])

    def _write_above(self, data: bytes) -> None:
        binary = getattr(self._stream, "buffer", None)
        if binary is None:
            self._stream.write(data.decode(errors="replace"))
        else:
            binary.write(data)
        self._stream.flush()

    def _forget_reader(self) -> None:
        """Let what the stream still holds go nowhere: at its end Python would try once more."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
