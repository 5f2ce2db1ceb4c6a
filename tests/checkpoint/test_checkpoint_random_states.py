"""Random states: each rank goes on with its own, and another number of ranks with fresh ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoint_runs import small
from flat_shards import FlatShards

import phalanx
from phalanx import Backend, load_checkpoint, save_checkpoint


def drawn() -> tuple[Any, ...]:
    """Numbers from every generator, also those that keep one for the next time."""
    torch_ones = [*torch.rand(3).tolist(), torch.randn(3).tolist()[0], torch.randperm(9).tolist()]
    numpy_ones = [np.random.rand(), np.random.randn(), np.random.randn()]
    return torch_ones, [random.random(), random.gauss(0, 1)], numpy_ones


def save(folder: Path) -> Any:
    def run(backend: Backend) -> Any:
        drawn()
        save_checkpoint(folder, model=FlatShards(small(), backend), step=1)
        return drawn()

    return run


def load(folder: Path, **options: Any) -> Any:
    def run(backend: Backend) -> Any:
        load_checkpoint(folder, model=FlatShards(small(), backend), **options)
        return drawn()

    return run


def test_every_rank_goes_on_with_its_own_random_states(folder: Path) -> None:
    went_on = phalanx.simulate(save(folder), 3, seed=1)
    assert phalanx.simulate(load(folder), 3, seed=2) == went_on
    assert len({str(numbers) for numbers in went_on}) == 3


def test_with_another_number_of_ranks_they_are_seeded_by_what_was_saved(folder: Path) -> None:
    phalanx.simulate(save(folder), 3, seed=1)
    four = phalanx.simulate(load(folder), 4, seed=2)
    assert len({str(numbers) for numbers in four}) == 4
    assert phalanx.simulate(load(folder), 4, seed=5) == four
    assert phalanx.simulate(load(folder), 2, seed=5)[0] != four[0]


def test_they_may_be_left_alone(folder: Path) -> None:
    phalanx.simulate(save(folder), 2, seed=1)

    def nothing(backend: Backend) -> Any:
        FlatShards(small(), backend)
        return drawn()

    alone = phalanx.simulate(nothing, 2, seed=3)
    assert phalanx.simulate(load(folder, random_state=False), 2, seed=3) == alone


def test_who_wants_only_the_step_keeps_its_random_states(folder: Path) -> None:
    save_checkpoint(folder, model=small(), step=4)
    before = torch.get_rng_state()
    assert load_checkpoint(folder).step == 4
    assert torch.equal(torch.get_rng_state(), before)
