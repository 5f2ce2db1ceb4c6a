"""The output of many ranks on one stream: whole lines only, each behind its rank.

    rank 3 --- pipe for stdout ---.
    rank 4 --- pipe for stdout ---+--- one thread ---> "[rank 4] loss 3.1"

The thread is not the supervisor's: when the reader of the launcher's own output pauses, the thread
waits, and with it the ranks that print, while the supervisor goes on watching them.

The stream is a descriptor, of a terminal or a file, or an object, as `sys.stdout` is in a notebook.
In a terminal and in a notebook progress bars are shown while they move.
"""

from __future__ import annotations

import codecs
import os
import re
import select
import selectors
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import ClassVar, TextIO

from typing_extensions import override

LONGEST_LINE = 1 << 20  # bytes kept until a line's end comes; a longer one is shown in pieces
_PIECE, _MOST = 1 << 16, 1 << 20  # bytes read at once, and of the rest of a pipe at the end
_LOOK = 0.05
_KEPT = 2000  # bytes of a rank's last output, for watchers of the job


class RankLines:
    r"""Joins the pieces of each rank's lines, and writes whole lines to a descriptor.

        rank 0: "los"   rank 1: "hello\n"   rank 0: "s 3\n"
        -> "[rank 1] hello\n"  "[rank 0] loss 3\n"

    Bytes of any encoding go through unchanged. A reader that has gone away is no error: the ranks
    go on. `finish()` passes on lines without an end. `last` gets the end of each rank's latest
    output.
    """

    def __init__(self, descriptor: int, last: dict[int, bytes] | None = None) -> None:
        self._descriptor = descriptor
        self._last = {} if last is None else last
        self._begun: dict[int, bytes] = {}

    def write(self, rank: int, data: bytes) -> None:
        """Take a piece of the output of `rank`."""
        lines, newline, rest = (self._begun.pop(rank, b"") + data).rpartition(b"\n")
        if len(rest) >= LONGEST_LINE:
            lines, newline, rest = lines + newline + rest, b"\n", b""
        if rest:
            self._begun[rank] = rest
        if newline:
            self._last[rank] = lines[-_KEPT:] or self._last.get(rank, b"")
            prefix = b"[rank %d] " % rank
            _write_all(self._descriptor, prefix + lines.replace(b"\n", b"\n" + prefix) + b"\n")

    def finish(self, rank: int | None = None) -> None:
        """Pass on the unfinished line of a rank, or those of all, as whole ones."""
        for begun in [each for each in self._begun if rank in (None, each)]:
            self.write(begun, b"\n")


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:  # another program has made it non-blocking
            select.select([], [descriptor], [])
        except OSError:  # nobody reads it: later output, this program's own too, is dropped
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


class Screen(ABC):
    r"""A notebook's stream or a terminal, whose last line may change.

    live     that line; empty if the last one is complete
    owner    whose it is
    errors   how bytes are decoded that are no text, as in `bytes.decode`
    """

    errors: ClassVar[str]

    def __init__(self) -> None:
        self.live = ""
        self.owner: tuple[object, int] | None = None

    def show(self, text: str, live: str) -> None:
        """Write lines before the one that changes, and what is to be seen of that now."""
        live = self.fitting(live)
        if not text and live == self.live:
            return
        text += live
        if self.live:  # spaces: not everything that shows "\r" knows how to erase a line
            line, newline, rest = text.partition("\n")
            text = f"\r{line.ljust(len(self.live))}{newline}{rest}"
            if not (newline or live):
                text += "\r"
        self.live = live
        self.write(text)

    @abstractmethod
    def fitting(self, line: str) -> str:
        """Return as much of a line as can be written over again."""

    @abstractmethod
    def write(self, text: str) -> None:
        """Write, or drop what nobody reads."""


class Stream(Screen):
    """An object, as `sys.stdout` is in a notebook."""

    errors = "replace"

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream: TextIO | None = stream

    @override
    def fitting(self, line: str) -> str:
        return line

    @override
    def write(self, text: str) -> None:
        try:
            if self._stream is not None:
                self._stream.write(text)
                self._stream.flush()
        except Exception:  # in any case: the ranks go on, and their output is dropped
            self._stream = None


class Terminal(Screen):
    """A descriptor. Bytes go through unchanged, and a line that changes is no wider than it."""

    errors = "surrogateescape"

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    @override
    def fitting(self, line: str) -> str:
        columns = _columns_of(self._descriptor)
        return line if len(line) < columns else _COLOURS.sub("", line)[: columns - 1]

    @override
    def write(self, text: str) -> None:
        _write_all(self._descriptor, text.encode(errors=self.errors))


class LiveRankLines:
    r"""`RankLines` for a screen, with lines that are rewritten after "\r".

        rank 0: "\r 10%"      rank 1: "hello\n"                       rank 0: "\r 20%\n"
        -> "[rank 0]  10%"    "\r[rank 1] hello\n" "[rank 0]  10%"    "\r[rank 0]  20%\n"

    It is the last line of the screen while it changes; of several ranks' the last that changed.
    Bars below another (tqdm's `position=1`, which goes down and up again) take turns there. The
    lines of a display that is erased and written again (rich's) stand there side by side; its
    first state was written as lines before that was known.
    """

    def __init__(self, screen: Screen, last: dict[int, bytes] | None = None) -> None:
        self._screen = screen
        self._last = {} if last is None else last
        self._decoders: dict[int, codecs.IncrementalDecoder] = defaultdict(
            lambda: codecs.getincrementaldecoder("utf-8")(screen.errors)
        )
        self._begun: dict[int, str] = {}
        self._heights: dict[int, int] = {}  # of displays of several lines

    def write(self, rank: int, data: bytes) -> None:
        """Take a piece of the output of `rank`."""
        screen, me = self._screen, (self, rank)
        text = self._begun.pop(rank, "") + self._decoders[rank].decode(data)
        text, height = _without_erased(_MOVES.sub("", text), self._heights.pop(rank, 1))
        display = ""
        if height > 1 and not text.endswith("\n"):  # its end is not known before it is erased
            self._heights[rank] = height
            at = text.rindex("\r")
            text, display = text[:at], text[at:]
        *lines, rest = text.split("\n")
        if len(rest) + len(display) >= LONGEST_LINE:
            lines, rest, display = [*lines, *(rest + display).split("\n")], "", ""
        lines = [_seen(line) for line in lines]
        prefix, live = f"[rank {rank}] ", "" if screen.owner == me else screen.live
        if display:
            rest = rest + display
            parts = [_seen(line).strip() for line in display.split("\n")[-height:]]
            live, screen.owner = prefix + "  ".join(parts), me
        elif "\r" in rest:
            seen = _seen(rest)
            rest = f"\r{seen}\r" if rest.endswith("\r") else f"\r{seen}"
            if seen.strip():
                live, screen.owner = prefix + seen.replace(_UP, ""), me
        if rest:
            self._begun[rank] = rest
        if lines:
            shown = "\n".join(lines).encode(errors=screen.errors)
            self._last[rank] = shown[-_KEPT:] or self._last.get(rank, b"")
        screen.show("".join(f"{prefix}{line}\n" for line in lines), live)

    def finish(self, rank: int | None = None) -> None:
        """Pass on the unfinished line of a rank, or those of all, as whole ones."""
        for begun in [each for each in self._begun if rank in (None, each)]:
            self.write(begun, b"\n")


_UP = "\x1b[A"  # moves a terminal's cursor one line up
_MOVES = re.compile(r"\x1b\[A\n|\x1b\[\?25[hl]")  # up and down again; and hide or show the cursor
_ERASED = re.compile(r"\r?\x1b\[2K((?:\x1b\[1A\x1b\[2K)*)")  # this line, and so many above it
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_COLUMNS = 80  # of a terminal that does not say


def _columns_of(terminal: int) -> int:
    try:
        return os.get_terminal_size(terminal).columns or _COLUMNS
    except OSError:  # it has gone away
        return _COLUMNS


def _seen(line: str) -> str:
    """Return the text that a terminal shows after all of `line` is written."""
    return line.rstrip("\r").rpartition("\r")[2]


def _without_erased(text: str, height: int) -> tuple[str, int]:
    """Return text without the lines that it erases, and how many it has erased last.

    height   how many that were before it
    """
    text, *more = _ERASED.split(text)
    for above, after in zip(more[::2], more[1::2], strict=True):
        height = 1 + above.count("\x1b[1A")
        lines, newline, last = after.rpartition("\n") if height == 1 else ("", "", after)
        changes = "" if newline and not last else "\r"  # whether it is a line that does
        text = "\n".join([*text.split("\n")[:-height], f"{lines}{newline}{changes}{last}"])
    return text, height


def shown_as_in_a_terminal(out: int, err: int) -> dict[str, str]:
    """Return the variables by which ranks know that a terminal shows their output, and its width.

    Rich reads them ("Environment variables" in its documents): then its bars move.
    """
    if not (os.isatty(out) and os.isatty(err)):
        return {}
    return {"TTY_COMPATIBLE": "1", "COLUMNS": str(max(20, _columns_of(out) - len("[rank 000] ")))}


class RankPipes:
    """A thread that shows the ranks' standard output and errors, until `close()`.

    `out` and `err` are those of this process: descriptors, or streams. `last` holds the end of each
    rank's latest output; not of a rank that writes to streams.
    """

    def __init__(self, out: int | TextIO, err: int | TextIO) -> None:
        self.last: dict[int, bytes] = {}
        screens: dict[object, Screen] = {}  # of both, if they are one
        self._lines = [self._lines_of(to, screens) for to in (out, err)]
        self._selector = selectors.DefaultSelector()
        reader, self._writer = os.pipe()
        self._selector.register(reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._read, name="rank output", daemon=True)
        self._thread.start()

    def _lines_of(
        self, to: int | TextIO, screens: dict[object, Screen]
    ) -> RankLines | LiveRankLines:
        if not isinstance(to, int):
            return LiveRankLines(screens.setdefault(to, Stream(to)))
        if not os.isatty(to):
            return RankLines(to, self.last)
        screen = screens.setdefault(os.fstat(to).st_rdev, Terminal(to))
        return LiveRankLines(screen, self.last)

    def open(self, rank: int) -> tuple[int, int]:
        """Return the ends of two new pipes for `rank` to write to: its output, and its errors.

        The caller closes them once the rank has them. `OSError` if there are no more descriptors.
        """
        writers: list[int] = []
        try:
            for lines in self._lines:
                reader, writer = os.pipe()
                writers.append(writer)
                os.set_blocking(reader, False)
                self._selector.register(reader, selectors.EVENT_READ, (rank, lines))
        except OSError:
            for writer in writers:
                os.close(writer)
            raise
        return writers[0], writers[1]

    def close(self, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Pass on all output, and close the pipes; return whether that is done.

        It is not if `give_up()` is true before, while the reader of the output takes nothing.
        """
        if self._writer >= 0:
            os.close(self._writer)  # which wakes the thread
            self._writer = -1
        while self._thread.is_alive() and not give_up():
            self._thread.join(_LOOK)
        return not self._thread.is_alive()

    def _read(self) -> None:
        closing = False
        while not closing:
            for key, _ in self._selector.select():
                if key.data is None:
                    closing = True
                else:
                    self._take(key)
        for key in list(self._selector.get_map().values()):
            # No more than a pipe holds: something that a rank has left behind may write on.
            for _ in range(_MOST // _PIECE):
                if key.data is None or not self._take(key):
                    break
        for lines in self._lines:
            lines.finish()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def _take(self, key: selectors.SelectorKey) -> bool:
        """Pass on one piece from a pipe; return whether there was one."""
        try:
            data = os.read(key.fd, _PIECE)
        except BlockingIOError:
            return False
        rank, lines = key.data
        if data:
            lines.write(rank, data)
        else:
            self._selector.unregister(key.fd)
            os.close(key.fd)
            lines.finish(rank)  # a replacement's output begins with a line of its own
        return bool(data)
