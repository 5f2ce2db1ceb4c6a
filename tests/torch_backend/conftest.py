"""Warnings that torch raises of its own names, and when nobody else is to blame: by their text."""

from __future__ import annotations

import pytest

OF_TORCH_ITSELF = (r"`torch\.\S+` (is|will be) deprecated",)


def pytest_configure(config: pytest.Config) -> None:
    for text in OF_TORCH_ITSELF:
        config.addinivalue_line("filterwarnings", f"ignore:{text}")
