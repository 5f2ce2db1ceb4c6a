"""What several files of this folder share."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def short_pieces(thresholds: Callable[..., None]) -> None:
    """They take each of their ways already with small tensors."""
    thresholds(small=256, piece=1 << 10)
