from __future__ import annotations

import io
import os

import pytest

from phalanx.launch.output import RankPipes


def shown_by(stream: io.TextIOWrapper) -> bytes:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue()


def memory() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8")


def test_what_is_written_before_the_end_is_shown() -> None:
    out, err = memory(), memory()
    pipes = RankPipes(out, err)
    for rank in range(3):
        for writer, text in zip(pipes.open(rank), (b"one\ntwo", b"a warning\n"), strict=True):
            os.write(writer, text)
            os.close(writer)
    assert pipes.close()
    assert sorted(shown_by(out).splitlines()) == sorted(
        f"[rank {rank}] {word}".encode() for rank in range(3) for word in ("one", "two")
    )
    assert sorted(shown_by(err).splitlines()) == [b"[rank %d] a warning" % n for n in range(3)]


def test_megabytes_go_through_a_pipe_that_holds_little() -> None:
    out = memory()
    pipes = RankPipes(out, memory())
    line = b"x" * 999 + b"\n"
    writer, errors = pipes.open(0)
    os.close(errors)
    with open(writer, "wb") as stream:
        for _ in range(5000):
            stream.write(line)
    pipes.close()
    assert shown_by(out) == (b"[rank 0] " + line) * 5000


def test_a_process_that_was_left_behind_and_writes_on_holds_up_nobody() -> None:
    out = memory()
    pipes = RankPipes(out, memory())
    writer, errors = pipes.open(0)
    os.write(writer, b"early\n")
    pipes.close()
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"late\n")
    os.close(writer)
    os.close(errors)
    assert shown_by(out) == b"[rank 0] early\n"


def test_a_reader_that_takes_nothing_is_given_up() -> None:
    reader, full = os.pipe()
    with open(full, "w") as stream:
        pipes = RankPipes(stream, memory())
        writer, errors = pipes.open(0)
        for _ in range(2):  # more than the reader's pipe holds
            os.write(writer, b"x" * 65_000 + b"\n")
        assert not pipes.close(give_up=lambda: True)
        os.close(reader)
        assert pipes.close()
    os.close(writer)
    os.close(errors)
