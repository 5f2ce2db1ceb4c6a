"""`torch.inference_mode()`: tensors that are made in it, and collectives that are called in it.

torch lets such a tensor, and what is made of it, be written in the mode only. A collective writes
it after the mode, too, from other threads, and keeps memory from one call to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from clusters import Cluster
from torch import Tensor

import phalanx
from phalanx import Backend, ReduceOp

SIZE = 3
Call = Callable[[Tensor, Backend], Any]


def room(tensor: Tensor) -> Tensor:
    """A tensor as large as those of all ranks, which is made in the mode if this one was."""
    with torch.inference_mode(tensor.is_inference()):
        return torch.ones(SIZE * len(tensor))


def receive(tensor: Tensor, backend: Backend) -> Tensor:
    if backend.rank == 0:
        backend.send(tensor, 1)
    elif backend.rank == 1:
        backend.recv(tensor, 0)
    return tensor


CALLS: dict[str, Call] = {
    "all_reduce_": phalanx.all_reduce_,
    "mean": lambda tensor, backend: phalanx.all_reduce_(tensor, backend, ReduceOp.MEAN),
    "all_reduce": phalanx.all_reduce,
    "reduce_": phalanx.reduce_,
    "broadcast_": phalanx.broadcast_,
    "coalesced_": lambda tensor, backend: phalanx.all_reduce_coalesced_([tensor], backend)[0],
    "all_gather": lambda tensor, backend: phalanx.all_gather(tensor, backend, into=room(tensor)),
    "reduce_scatter": lambda tensor, backend: phalanx.reduce_scatter(
        room(tensor), backend, into=tensor
    ),
    "receive": receive,
}
LATER: dict[str, Call] = {
    "all_reduce_": phalanx.async_all_reduce_,
    "broadcast_": phalanx.async_broadcast_,
    "all_gather": phalanx.async_all_gather,
}


def values(backend: Backend, count: int, *, spaced: bool) -> Tensor:
    made = torch.arange(2.0 * count) + backend.rank
    return made[::2] if spaced else made[:count]


@pytest.mark.together
@pytest.mark.parametrize("spaced", [False, True], ids=["contiguous", "spaced"])
@pytest.mark.parametrize("count", [6, 60_000])
def test_every_collective_gives_what_it_gives_without_the_mode(
    cluster: Cluster, count: int, spaced: bool
) -> None:
    def act(backend: Backend) -> None:
        for name, call in CALLS.items():
            expected = call(values(backend, count, spaced=spaced), backend)
            with torch.inference_mode():
                made = values(backend, count, spaced=spaced)
                inside = call(values(backend, count, spaced=spaced), backend)
            assert torch.equal(call(made, backend), expected), f"{name}, of what was made in it"
            assert torch.equal(inside, expected), f"{name}, in it"

    cluster.run(act, SIZE)


@pytest.mark.together
@pytest.mark.parametrize("count", [6, 60_000])
def test_a_work_that_is_issued_in_the_mode_goes_on_after_it(cluster: Cluster, count: int) -> None:
    def act(backend: Backend) -> None:
        for name, call in LATER.items():
            expected = call(values(backend, count, spaced=False), backend).wait()
            with torch.inference_mode():
                work = call(values(backend, count, spaced=False), backend)
            assert torch.equal(work.wait(), expected), name

    cluster.run(act, SIZE)


@pytest.mark.together
@pytest.mark.parametrize("count", [6, 60_000, 600_000])
def test_what_is_kept_of_a_call_in_the_mode_serves_one_after_it(
    cluster: Cluster, count: int
) -> None:
    """Views of the memory of tensors, and scratch memory: a validation, and then training."""

    def act(backend: Backend) -> None:
        tensor = torch.ones(count)
        with torch.inference_mode():
            phalanx.async_all_reduce_(tensor, backend).wait()
            phalanx.all_reduce_(tensor, backend)
        phalanx.all_reduce_(tensor, backend)
        assert torch.equal(tensor, torch.full((count,), float(SIZE**3)))
        result = phalanx.all_reduce(tensor, backend)
        assert not result.is_inference()

    cluster.run(act, SIZE)
