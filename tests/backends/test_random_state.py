"""Fresh random states for a rank."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core import random_state

DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1).item(),
    "python": random.random,
    "python, normal": lambda: random.gauss(0.0, 1.0),
    "numpy": np.random.rand,
    "numpy, normal": np.random.randn,  # two at a time, of which one is kept
    "numpy, all words": lambda: np.random.bytes(4 * 624),  # its place is then as before
    "numpy, another seed": lambda: np.random.seed(5),
    "numpy, another kind": lambda: np.random.set_bit_generator(np.random.PCG64(5)),
    "nothing": lambda: None,
}


def test_all_generators_begin_anew_for_a_rank_and_those_of_other_devices_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_devices: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
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


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(sorted(DRAWS)))))
@settings(max_examples=examples(200))
def test_each_rank_draws_what_it_would_draw_alone(turns: list[tuple[int, str]]) -> None:
    def drawn(ranks: set[int]) -> list[tuple[int, object]]:
        states = random_state.RandomStates(3, seed=7)
        found = []
        for rank, what in turns:
            if rank in ranks:
                states.give_to(rank)
                found.append((rank, DRAWS[what]()))
        states.close()
        return found

    np.random.randn()  # the number that is kept outside comes back, too
    outside = random_state.current()
    together = drawn({0, 1, 2})
    for rank in range(3):
        assert [each for each in together if each[0] == rank] == drawn({rank})
    after = random_state.current()
    assert torch.equal(after.torch, outside.torch)
    assert after.python == outside.python
    assert repr(after.numpy) == repr(outside.numpy)
