"""Fresh random states for a rank."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from phalanx.core import random_state


def test_all_generators_begin_anew_for_a_rank_and_those_of_other_devices_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", on_devices.append)
    before = random_state.current()

    def draws(rank: int) -> tuple[float, float, float]:
        random_state.seed_all(7, rank)
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    first, other, again = draws(0), draws(1), draws(0)
    random_state.restore(before)
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))
    assert on_devices[0] == on_devices[2] != on_devices[1]
