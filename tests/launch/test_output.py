from __future__ import annotations

import fcntl
import io
import os
import select
import struct
import tempfile
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.live import Live

from phalanx.launch.output import (
    LONGEST_LINE,
    LiveRankLines,
    RankLines,
    RankPipes,
    Stream,
    shown_as_in_a_terminal,
)


class Shown:
    """A file to write to, and what has been written."""

    def __init__(self) -> None:
        self.descriptor, path = tempfile.mkstemp()
        os.unlink(path)

    def __del__(self) -> None:
        os.close(self.descriptor)

    @property
    def bytes(self) -> bytes:
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)


def test_pieces_of_a_line_are_joined_behind_one_prefix() -> None:
    shown = Shown()
    lines = RankLines(shown.descriptor)
    for rank, piece in ((0, b"los"), (1, b"hello\n"), (0, b"s 3\n"), (1, b"a\nb\nc")):
        lines.write(rank, piece)
    assert shown.bytes == b"[rank 1] hello\n[rank 0] loss 3\n[rank 1] a\n[rank 1] b\n"


def test_the_last_line_needs_no_end() -> None:
    shown = Shown()
    lines = RankLines(shown.descriptor)
    lines.write(3, b"no end")
    assert shown.bytes == b""
    lines.finish()
    lines.finish()
    assert shown.bytes == b"[rank 3] no end\n"


def test_bytes_that_are_no_text_go_through_as_they_are() -> None:
    shown = Shown()
    RankLines(shown.descriptor).write(0, b"\xff\xfe \x00 caf\xe9\n")
    assert shown.bytes == b"[rank 0] \xff\xfe \x00 caf\xe9\n"


def test_a_line_without_end_is_shown_before_it_fills_the_Shown() -> None:
    shown = Shown()
    lines = RankLines(shown.descriptor)
    for _ in range(2):
        lines.write(0, b"x" * (LONGEST_LINE // 2))
    assert shown.bytes == b"[rank 0] " + b"x" * LONGEST_LINE + b"\n"


def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    lines = RankLines(writer)
    os.close(reader)
    for _ in range(2):
        lines.write(0, b"hello\n")
    lines.finish()
    os.close(writer)


def test_a_descriptor_that_does_not_wait_gets_everything() -> None:
    """A terminal or pipe that another program has set to non-blocking."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    received: list[bytes] = []

    def read() -> None:
        while data := os.read(reader, 1 << 16):
            received.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    RankLines(writer).write(0, b"x" * (1 << 20) + b"\n")
    os.close(writer)
    thread.join()
    os.close(reader)
    assert b"".join(received) == b"[rank 0] " + b"x" * (1 << 20) + b"\n"


text = st.binary(min_size=1, max_size=5) | st.sampled_from([b"[rank 7] ", b"\r", b"a\nb"])


@given(st.lists(st.tuples(st.integers(0, 3), text)))
def test_every_rank_keeps_its_bytes_and_lines_stay_whole(pieces: list[tuple[int, bytes]]) -> None:
    shown = Shown()
    lines = RankLines(shown.descriptor)
    for rank, piece in pieces:
        lines.write(rank, piece)
    lines.finish()
    seen = dict.fromkeys(range(4), b"")
    for line in shown.bytes.split(b"\n")[:-1]:
        prefix, rest = line[:9], line[9:]
        seen[int(prefix[6:7])] += rest + b"\n"
    for rank in range(4):
        written = b"".join(piece for r, piece in pieces if r == rank)
        begun = written and not written.endswith(b"\n")
        assert seen[rank] == written + (b"\n" if begun else b"")


def screen(text: str) -> list[str]:
    """What a notebook shows of `text`: "\\r" goes back to the start of the line."""
    lines = []
    for line in text.split("\n"):
        shown = ""
        for piece in line.split("\r"):
            shown = piece + shown[len(piece) :]
        lines.append(shown.rstrip())
    return lines


def test_a_progress_bar_stays_below_the_lines_and_moves() -> None:
    stream = io.StringIO()
    lines = LiveRankLines(Stream(stream))
    seen = []
    for rank, piece in (
        (0, "\r 10%"),
        (1, "a long line, longer than the bar\nb"),
        (0, "\r 20"),
        (0, "%"),
        (1, "\nc\n"),
        (0, "\rdone\n"),
    ):
        lines.write(rank, piece.encode())
        seen.append(screen(stream.getvalue())[-1])
    lines.finish()
    bar = ["[rank 0]  10%", "[rank 0]  10%", "[rank 0]  20", "[rank 0]  20%", "[rank 0]  20%"]
    assert seen == [*bar, ""]
    assert screen(stream.getvalue()) == [
        "[rank 1] a long line, longer than the bar",
        "[rank 1] b",
        "[rank 1] c",
        "[rank 0] done",
        "",
    ]


def test_bars_of_two_ranks_take_turns_and_each_ends_as_a_line() -> None:
    stream = io.StringIO()
    lines = LiveRankLines(Stream(stream))
    lines.write(0, b"\rlong bar 50%")
    lines.write(1, b"\r50%")
    assert screen(stream.getvalue()) == ["[rank 1] 50%"]
    lines.write(0, b"\rlong bar 100%\n")
    assert screen(stream.getvalue()) == ["[rank 0] long bar 100%", "[rank 1] 50%"]
    lines.write(1, b"\r    \r")  # as a bar that does not stay
    assert screen(stream.getvalue()) == ["[rank 0] long bar 100%", ""]
    lines.write(1, "caf\N{LATIN SMALL LETTER E WITH ACUTE}".encode()[:-1])
    lines.write(1, "\N{LATIN SMALL LETTER E WITH ACUTE}".encode()[1:])
    lines.finish()
    assert screen(stream.getvalue())[-2:] == ["[rank 1] caf\N{LATIN SMALL LETTER E WITH ACUTE}", ""]


def test_a_bar_below_another_is_no_line_for_each_of_its_moves() -> None:
    stream = io.StringIO()
    lines = LiveRankLines(Stream(stream))
    lines.write(0, b"\router 0%")
    for percent in range(100):
        lines.write(0, b"\n\rinner %d%%\x1b[A" % percent)  # as tqdm does with position=1
    lines.write(0, b"\router 100%\n")
    lines.finish()
    assert screen(stream.getvalue()) == ["[rank 0] outer 0%", "[rank 0] outer 100%", ""]


class RankFile(io.StringIO):
    """What rank 0 writes to, piece by piece, and the last line of the screen after each."""

    def __init__(self, lines: LiveRankLines, stream: io.StringIO) -> None:
        super().__init__()
        self.lines, self.stream = lines, stream
        self.last: list[str] = []

    def write(self, text: str) -> int:
        self.lines.write(0, text.encode())
        self.last.append(screen(self.stream.getvalue())[-1])
        return len(text)


@contextmanager
def richs_display() -> Iterator[tuple[Live, RankFile, io.StringIO]]:
    """A display of rich that rank 0 writes, and the screen."""
    stream = io.StringIO()
    lines = LiveRankLines(Stream(stream))
    file = RankFile(lines, stream)
    console = Console(file=file, force_terminal=True, width=40, color_system=None, _environ={})
    with Live("bar 0%", console=console, auto_refresh=False) as display:
        yield display, file, stream
    lines.finish()


def test_a_bar_of_rich_moves_below_the_lines_that_it_prints() -> None:
    with richs_display() as (display, file, stream):
        display.update("bar 50%", refresh=True)
        assert file.last[-1].rstrip() == "[rank 0] bar 50%"
        display.console.print("a line")
        assert file.last[-1].rstrip() == "[rank 0] bar 50%"
        display.update("bar 100%", refresh=True)
    shown = [line.rstrip() for line in screen(stream.getvalue())]
    assert shown == ["[rank 0] a line", "[rank 0] bar 100%", ""]


def test_several_bars_of_rich_share_a_line_until_they_end() -> None:
    """Which they are is known as soon as they have moved once."""
    with richs_display() as (display, file, stream):
        display.update("outer 0%\ninner 0%", refresh=True)
        for percent in range(1, 100):
            display.update(f"outer {percent}%\ninner {percent}%", refresh=True)
            assert file.last[-1].split() == f"[rank 0] outer {percent}% inner {percent}%".split()
            if percent == 50:
                display.console.print("a line")
        display.update("outer 100%\ninner 100%", refresh=True)
    shown = [line.rstrip() for line in screen(stream.getvalue())]
    assert shown == [
        "[rank 0] outer 0%",  # written before
        "[rank 0] a line",
        "[rank 0] outer 100%",
        "[rank 0] inner 100%",
        "",
    ]


def test_a_display_whose_rank_dies_is_shown_as_it_was() -> None:
    stream = io.StringIO()
    lines = LiveRankLines(Stream(stream))
    for percent in (1, 2, 3):
        lines.write(0, b"\r\x1b[2K\x1b[1A\x1b[2Kouter %d%%\ninner %d%%" % (percent, percent))
    lines.finish()
    assert screen(stream.getvalue()) == ["[rank 0] outer 3%", "[rank 0] inner 3%", ""]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_pieces_of_a_display_may_end_anywhere(cut: int) -> None:
    written = b"".join(
        b"\r\x1b[2K\x1b[1A\x1b[2Kouter %d%%\ninner %d%%" % (number, number) for number in range(3)
    )
    stream = io.StringIO()
    lines = LiveRankLines(Stream(stream))
    for at in range(0, len(written), cut):
        lines.write(0, written[at : at + cut])
    lines.write(0, b"\n")
    lines.finish()
    shown = [line for line in screen(stream.getvalue()) if line]
    assert shown[-2:] == ["[rank 0] outer 2%", "[rank 0] inner 2%"]


def test_ranks_know_a_terminal_and_its_width_if_it_shows_all_that_they_write() -> None:
    with terminal(columns=70) as shown:
        assert shown_as_in_a_terminal(shown.end, shown.end) == {
            "TTY_COMPATIBLE": "1",
            "COLUMNS": "59",
        }
        assert shown_as_in_a_terminal(shown.end, Shown().descriptor) == {}


def test_a_stream_that_takes_no_more_is_no_error() -> None:
    stream = io.StringIO()
    lines = LiveRankLines(Stream(stream))
    stream.close()
    for _ in range(2):
        lines.write(0, b"hello\n")
    lines.finish()


class FakeTerminal:
    """A terminal, of which `end` is for programs, and what it has got."""

    def __init__(self, columns: int) -> None:
        self.other_end, self.end = os.openpty()
        tty.setraw(self.end)
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.got = b""

    def shows(self, last: str, above: int = 0) -> list[str]:
        """Its lines, as soon as this is the last one, with so many above it."""
        while (lines := screen(self.got.decode("latin-1")))[-1] != last or len(lines) <= above:
            assert select.select([self.other_end], [], [], 20)[0], f"{last!r} is not in {lines}"
            self.got += os.read(self.other_end, 1 << 16)
        return lines


@contextmanager
def terminal(columns: int) -> Iterator[FakeTerminal]:
    made = FakeTerminal(columns)
    try:
        yield made
    finally:
        os.close(made.end)
        os.close(made.other_end)


def test_in_a_terminal_a_bar_stays_below_the_lines_of_output_and_errors() -> None:
    with terminal(columns=30) as shown:
        pipes = RankPipes(shown.end, shown.end)
        out, err = pipes.open(3)
        os.write(err, b"\r 10%")
        shown.shows("[rank 3]  10%")
        os.write(out, b"caf\xe9\n")  # no text; it goes through as it is
        shown.shows("[rank 3]  10%", above=1)  # two pipes have no order between them
        os.write(err, b"\r 20%")
        assert shown.shows("[rank 3]  20%") == ["[rank 3] caf\xe9", "[rank 3]  20%"]
        assert pipes.last[3] == b"caf\xe9"
        os.write(err, b"\r\x1b[32m" + b"#" * 100)
        shown.shows("[rank 3] " + "#" * 20)  # a wider one would be two lines, and stay
        os.write(err, b"\rdone\n")
        os.close(out)
        os.close(err)
        assert pipes.close()
        assert shown.shows("") == ["[rank 3] caf\xe9", "[rank 3] done", ""]


def test_what_is_written_before_the_end_is_shown() -> None:
    out, err = Shown(), Shown()
    pipes = RankPipes(out.descriptor, err.descriptor)
    for rank in range(3):
        for writer, text in zip(pipes.open(rank), (b"one\ntwo", b"a warning\n"), strict=True):
            os.write(writer, text)
            os.close(writer)
    assert pipes.close()
    assert sorted(out.bytes.splitlines()) == sorted(
        f"[rank {rank}] {word}".encode() for rank in range(3) for word in ("one", "two")
    )
    assert sorted(err.bytes.splitlines()) == [b"[rank %d] a warning" % n for n in range(3)]


def test_megabytes_go_through_a_pipe_that_holds_little() -> None:
    out = Shown()
    pipes = RankPipes(out.descriptor, out.descriptor)
    line = b"x" * 999 + b"\n"
    writer, errors = pipes.open(0)
    os.close(errors)
    with open(writer, "wb") as stream:
        for _ in range(5000):
            stream.write(line)
    pipes.close()
    assert out.bytes == (b"[rank 0] " + line) * 5000


def test_a_process_that_was_left_behind_and_writes_on_holds_up_nobody() -> None:
    out = Shown()
    pipes = RankPipes(out.descriptor, out.descriptor)
    writer, errors = pipes.open(0)
    os.write(writer, b"early\n")
    pipes.close()
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"late\n")
    os.close(writer)
    os.close(errors)
    assert out.bytes == b"[rank 0] early\n"


def test_a_reader_that_takes_nothing_is_given_up() -> None:
    reader, full = os.pipe()
    pipes = RankPipes(full, full)
    writer, errors = pipes.open(0)
    for _ in range(2):  # more than the reader's pipe holds
        os.write(writer, b"x" * 65_000 + b"\n")
    assert not pipes.close(give_up=lambda: True)
    os.close(reader)
    assert pipes.close()
    for descriptor in (writer, errors, full):
        os.close(descriptor)
