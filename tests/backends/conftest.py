"""What several files of this folder share."""

from __future__ import annotations

import pytest
from clusters import PATIENCE

from phalanx.core import checker, matching

LITTLE = 6 << 20  # bytes


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> int:
    """So many bytes are taken of messages that nobody has asked for."""
    monkeypatch.setattr(matching, "UNEXPECTED_LIMIT", LITTLE)
    return LITTLE


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that disagrees waits for the other side's words, however busy the machine is."""
    monkeypatch.setattr(checker, "ANSWER_WITHIN", PATIENCE)
