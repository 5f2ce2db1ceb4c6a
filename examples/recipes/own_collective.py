"""Test your own collective in CI: any number of ranks, any order of events, in one process.

python -m pytest examples/recipes/own_collective.py
"""

import pytest
import torch
from torch import Tensor

import phalanx


def ring_sum(mine: Tensor, backend: phalanx.Backend) -> Tensor:
    """Return the sum over all ranks: each rank's tensor goes around the ring once."""
    right, left = ((backend.rank + hop) % backend.world_size for hop in (1, -1))
    total = passing = mine
    for _ in range(backend.world_size - 1):
        arriving = torch.empty_like(mine)
        phalanx.sendrecv(passing, backend, right, arriving, left)
        total, passing = total + arriving, arriving
    return total


def is_right(backend: phalanx.Backend) -> bool:
    mine = torch.full((3,), 2.0**backend.rank)
    return torch.equal(ring_sum(mine, backend), phalanx.all_reduce(mine, backend))


def test_the_ring_gives_the_sum_of_all_ranks() -> None:
    for ranks in range(1, 6):
        for order in range(3):
            assert all(phalanx.simulate(is_right, ranks, seed=order))


def test_ranks_that_all_receive_first_are_an_error_and_no_hang() -> None:
    def receive_first(backend: phalanx.Backend) -> None:
        phalanx.recv(torch.empty(3), backend, (backend.rank + 1) % backend.world_size)

    with pytest.raises(phalanx.DeadlockError, match="rank 0 waits for 1"):
        phalanx.simulate(receive_first, 3)
