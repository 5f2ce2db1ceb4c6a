from __future__ import annotations

import sys

import pytest

from phalanx.errors import PeerLostError
from phalanx.launch.report import error_line, format_traceback


def test_an_error_is_one_line_whatever_it_says() -> None:
    assert error_line(ValueError("a bug\nof two lines")) == "ValueError: a bug"
    assert error_line(KeyError()) == "KeyError"
    assert error_line(PeerLostError("rank 2 left")).endswith("PeerLostError: rank 2 left")


def test_a_syntax_error_is_its_last_line() -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("def f(:", "script.py", "exec")
    assert error_line(caught.value) == "SyntaxError: invalid syntax"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before 3.11")
def test_notes_are_in_the_traceback_and_not_in_the_line() -> None:
    error = ValueError("a bug")
    error.add_note("the last operations of rank 0:")
    assert error_line(error) == "ValueError: a bug"
    assert "the last operations" in format_traceback(error, hide=())
