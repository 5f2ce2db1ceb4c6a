"""What several files of this folder share."""

from __future__ import annotations

import pytest

from phalanx.core import matching

LITTLE = 6 << 20  # bytes


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> int:
    """So many bytes are taken of messages that nobody has asked for."""
    monkeypatch.setattr(matching, "UNEXPECTED_LIMIT", LITTLE)
    return LITTLE
