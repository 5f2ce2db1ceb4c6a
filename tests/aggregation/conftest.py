"""torch's compiler is imported before the tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _torchs_compiler_is_imported() -> None:
    """The first optimizer does that, for seconds, in which its server answers nobody."""
    torch.optim.SGD([torch.zeros(1)], lr=1)
