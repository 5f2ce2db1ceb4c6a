"""What several files of this folder share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from phalanx.collectives.shm import plan


@pytest.fixture
def thresholds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets from which sizes on collectives in shared memory go which way, during a test."""
    return lambda **sizes: monkeypatch.setattr(plan, "THRESHOLDS", plan.Thresholds(**sizes))


@pytest.fixture
def short_pieces(thresholds: Callable[..., None]) -> None:
    """They take each of their ways already with small tensors."""
    thresholds(small=256, piece=1 << 10)
