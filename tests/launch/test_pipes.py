from __future__ import annotations

import io
from pathlib import Path

import pytest

from phalanx.launch.output import RankLines, RankPipes


def shown_by(stream: io.TextIOWrapper) -> bytes:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue()


def memory() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8")


def test_what_is_written_before_the_end_is_shown(tmp_path: Path) -> None:
    pipes, out = RankPipes(), memory()
    lines = RankLines(out)
    for rank in range(3):
        pipes.add(str(tmp_path / str(rank)), rank, lines)
        (tmp_path / str(rank)).write_text("one\ntwo")
    pipes.close()
    assert sorted(shown_by(out).splitlines()) == sorted(
        f"[rank {rank}] {word}".encode() for rank in range(3) for word in ("one", "two")
    )


def test_megabytes_go_through_a_pipe_that_holds_little(tmp_path: Path) -> None:
    pipes, out = RankPipes(), memory()
    pipes.add(str(tmp_path / "pipe"), 0, RankLines(out))
    line = b"x" * 999 + b"\n"
    with (tmp_path / "pipe").open("wb") as writer:
        for _ in range(5000):
            writer.write(line)
    pipes.close()
    assert shown_by(out) == (b"[rank 0] " + line) * 5000


def test_the_next_attempt_has_pipes_of_its_own(tmp_path: Path) -> None:
    pipes, out = RankPipes(), memory()
    lines = RankLines(out)
    for attempt in ("first", "second"):
        pipes.add(str(tmp_path / attempt), 0, lines)
        (tmp_path / attempt).write_text(attempt)
        pipes.drain()
    pipes.close()
    assert shown_by(out) == b"[rank 0] first\n[rank 0] second\n"


def test_a_process_that_was_left_behind_and_writes_on_holds_up_nobody(tmp_path: Path) -> None:
    pipes, out = RankPipes(), memory()
    pipes.add(str(tmp_path / "pipe"), 0, RankLines(out))
    with (tmp_path / "pipe").open("wb", buffering=0) as writer:
        writer.write(b"early\n")
        pipes.close()
        with pytest.raises(BrokenPipeError):
            writer.write(b"late\n")
    assert shown_by(out) == b"[rank 0] early\n"
