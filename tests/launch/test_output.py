from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.output import RankLines


def test_pieces_of_a_line_are_joined_behind_one_prefix() -> None:
    shown = io.StringIO()
    lines = RankLines(shown)
    for piece in ("[rank 0] los", "[rank 1] hello\n", "[rank 0] s 3\n", "not of a rank\n"):
        lines.write(piece)
    assert shown.getvalue() == "[rank 1] hello\n[rank 0] loss 3\nnot of a rank\n"


def test_the_last_line_needs_no_end() -> None:
    shown = io.StringIO()
    lines = RankLines(shown)
    lines.write("[rank 3] no end")
    assert shown.getvalue() == ""
    lines.finish()
    assert shown.getvalue() == "[rank 3] no end\n"


def test_a_reader_that_has_gone_is_no_error() -> None:
    shown = io.StringIO()
    lines = RankLines(shown)
    shown.close()
    lines.write("[rank 0] hello\n")
    lines.finish()


text = st.text(alphabet="ab [rank 7]", min_size=1, max_size=5)


@given(st.lists(st.tuples(st.integers(0, 3), text, st.sampled_from(["", "\n"]))))
def test_every_rank_keeps_its_text_and_lines_stay_whole(pieces: list[tuple[int, str, str]]) -> None:
    shown = io.StringIO()
    lines = RankLines(shown)
    for rank, piece, end in pieces:
        lines.write(f"[rank {rank}] {piece}{end}")
    lines.finish()
    seen = dict.fromkeys(range(4), "")
    for line in shown.getvalue().split("\n")[:-1]:
        prefix, rest = line[:9], line[9:]
        seen[int(prefix[6])] += rest + "\n"
    for rank in range(4):
        written = "".join(p + e for r, p, e in pieces if r == rank)
        begun = any(r == rank for r, _, _ in pieces) and not written.endswith("\n")
        assert seen[rank] == written + ("\n" if begun else "")
