"""The functions between ranks: forward as in their table, and backward the transpose of it.

Forward is linear in the inputs of all ranks. That backward is its transpose is checked for random x
and v: <f(x), v> summed over the ranks is <x, f'(v)> summed over the ranks, where a tensor that is
the same on every rank counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from clusters import Cluster
from ddp_models import noise
from ddp_runs import Watched, assert_close, outcome_of
from torch import Tensor

import phalanx
from phalanx import Backend, DesyncError, SizeMismatchError, simulate
from phalanx.tensor import (
    copy_to_ranks,
    gather_from_ranks,
    gather_sequence,
    reduce_from_ranks,
    scatter_sum,
    scatter_to_ranks,
)
from phalanx.tensor.shards import ShardSpec

SHAPE = (6, 5, 4)  # of the whole

# name: the function; whether its input and its output are the same on every rank, or each rank's
# own, or a shard
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "copy_to_ranks": (copy_to_ranks, "same", "own"),
    "reduce_from_ranks": (reduce_from_ranks, "own", "same"),
    "scatter_to_ranks": (scatter_to_ranks, "same", "shard"),
    "gather_from_ranks": (gather_from_ranks, "shard", "same"),
    "gather_sequence": (gather_sequence, "shard", "own"),
    "scatter_sum": (scatter_sum, "own", "shard"),
}
MEANING: dict[str, Callable[[list[Tensor], int, int], Tensor]] = {
    "copy_to_ranks": lambda xs, rank, dim: xs[rank],
    "reduce_from_ranks": lambda xs, rank, dim: torch.stack(xs).sum(0),
    "scatter_to_ranks": lambda xs, rank, dim: cut(dim, len(xs)).shard(xs[0], dim, rank),
    "gather_from_ranks": lambda xs, rank, dim: torch.cat(xs, dim),
    "gather_sequence": lambda xs, rank, dim: torch.cat(xs, dim),
    "scatter_sum": lambda xs, rank, dim: cut(dim, len(xs)).shard(sum(xs), dim, rank),  # type: ignore[arg-type]
}


def cut(dim: int, ranks: int) -> ShardSpec:
    return ShardSpec.of(SHAPE[dim], ranks)


def value(kind: str, rank: int, size: int, seed: int, dim: int = 1) -> Tensor:
    if kind == "shard":
        return cut(dim, size).shard(noise(*SHAPE, seed=seed), dim, rank).double()
    return noise(*SHAPE, seed=seed + (rank + 1 if kind == "own" else 0)).double()


def call(name: str, x: Tensor, backend: Backend, dim: int = 1) -> Tensor:
    function, given, gives = FUNCTIONS[name]
    return function(x, backend, *([dim] if "shard" in (given, gives) else []))


def once(kind: str, products: list[Tensor]) -> Tensor:
    return products[0] if kind == "same" else torch.stack(products).sum()


@pytest.mark.checkered
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_is_what_the_table_says_and_backward_its_transpose(name: str, size: int, dim: int):
    _, given, gives = FUNCTIONS[name]

    def run(backend: Backend) -> tuple[Tensor, ...]:
        x = value(given, backend.rank, size, 0, dim).requires_grad_()
        y = call(name, x, backend, dim)
        v = value(gives, backend.rank, size, 100, dim)
        y.backward(v)
        assert x.grad is not None
        return x.detach(), y.detach(), v, x.grad

    results = simulate(run, size)
    for rank, (_, y, _, _) in enumerate(results):
        torch.testing.assert_close(y, MEANING[name]([r[0] for r in results], rank, dim))
    forward = once(gives, [(y * v).sum() for _, y, v, _ in results])
    if name == "copy_to_ranks":  # each rank uses it in its own way
        forward = torch.stack([(y * v).sum() for _, y, v, _ in results]).sum()
    backward = once(given, [(x * dx).sum() for x, _, _, dx in results])
    torch.testing.assert_close(forward, backward)


def test_they_do_the_same_on_every_backend(cluster: Cluster):
    def run(backend: Backend) -> dict[str, Tensor]:
        found = {}
        for name, (_, given, gives) in FUNCTIONS.items():
            x = value(given, backend.rank, 2, 0).requires_grad_()
            y = call(name, x, backend)
            y.backward(value(gives, backend.rank, 2, 100))
            assert x.grad is not None
            found |= {name: y.detach(), f"{name} backward": x.grad}
        return found

    for found, expected in zip(cluster.run(run, 2), simulate(run, 2), strict=True):
        assert_close(found, expected)


# What is sent forward and backward, in bytes of all ranks together, for n bytes of the whole.
TRAFFIC: dict[str, tuple[list[str], list[str]]] = {
    "copy_to_ranks": ([], ["all_reduce"]),
    "reduce_from_ranks": (["all_reduce"], []),
    "scatter_to_ranks": ([], ["all_gather"]),
    "gather_from_ranks": (["all_gather"], []),
    "gather_sequence": (["all_gather"], ["reduce_scatter"]),
    "scatter_sum": (["reduce_scatter"], ["all_gather"]),
}
FACTOR = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_sends_what_the_table_says(name: str, p: int):
    """p-1 times the bytes of the whole for all ranks together, twice that for an all_reduce."""
    _, given, gives = FUNCTIONS[name]
    function, whole = FUNCTIONS[name][0], ShardSpec.of(8, p)

    def tensor(kind: str, rank: int) -> Tensor:
        x = noise(8, 6)
        return whole.shard(x, 0, rank).clone() if kind == "shard" else x

    def run(backend: Backend) -> list[tuple[list[str], int]]:
        x = tensor(given, backend.rank).requires_grad_()
        watched = Watched(backend)
        options: dict[str, Any] = {"dim": 0, "cut": whole} if "shard" in (given, gives) else {}
        y = function(x, backend, **options)
        forward = [event.split()[0] for event in watched.events], watched.bytes_sent
        watched.clear()
        y.backward(tensor(gives, backend.rank))
        return [forward, ([event.split()[0] for event in watched.events], watched.bytes_sent)]

    results = simulate(run, p)
    for way, expected in enumerate(TRAFFIC[name]):
        assert all(result[way][0] == expected for result in results)
        n = 8 * 6 * 4
        sent = sum(result[way][1] for result in results)
        assert sent == sum(FACTOR[kind] * (p - 1) * n for kind in expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tensor_that_needs_no_gradient_sends_nothing_back(name: str):
    def run(backend: Backend) -> bool:
        return call(name, value(FUNCTIONS[name][1], backend.rank, 2, 0), backend).requires_grad

    assert simulate(run, 2) == [False, False]


def test_gradients_of_gradients_are_those_of_the_plain_computation():
    """The norm of a gradient of a two-layer network, cut as in the paper, differentiated again."""
    a, b, x0 = noise(6, 4, seed=1).double(), noise(4, 6, seed=2).double(), noise(3, 4).double()

    def penalty(y: Tensor, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        return slope.pow(2).sum()

    x, weight = x0.clone().requires_grad_(), a.clone().requires_grad_()
    penalty(torch.tanh(x @ weight.t()) @ b.t(), x).backward()
    expected, expected_weight = x.grad, weight.grad
    assert expected is not None
    assert expected_weight is not None

    def run(backend: Backend) -> tuple[Tensor, Tensor]:
        ours = ShardSpec.of(6, backend.world_size)
        weight = ours.shard(a, 0, backend.rank).clone().requires_grad_()
        x = x0.clone().requires_grad_()
        hidden = torch.tanh(copy_to_ranks(x, backend) @ weight.t())
        y = reduce_from_ranks(hidden @ ours.shard(b, 1, backend.rank).t(), backend)
        penalty(y, x).backward()
        assert x.grad is not None
        assert weight.grad is not None
        return x.grad, weight.grad

    results = simulate(run, 3)
    for dx, _ in results:
        torch.testing.assert_close(dx, expected)
    torch.testing.assert_close(torch.cat([dw for _, dw in results]), expected_weight)


# What goes wrong ----------------------------------------------------------------------------


def test_shards_that_are_no_even_cut_are_refused_on_every_rank():
    def run(backend: Backend) -> BaseException | None:
        x = torch.ones(2, 1 + backend.rank)  # the longer one has to come first
        return outcome_of(lambda: gather_sequence(x, backend, 1, label="up"))

    for rank, error in enumerate(simulate(run, 2)):
        assert isinstance(error, SizeMismatchError)
        assert f"rank {rank}: up: the ranks' parts of a sequence of 3" in str(error)
        assert "[1, 2] long, and should be [2, 1]" in str(error)


@pytest.mark.requires("agreement")
def test_ranks_in_different_layers_are_told_so(cluster: Cluster):
    def run(backend: Backend) -> BaseException | None:
        label = "blocks.0.down" if backend.rank == 0 else "blocks.1.down"
        return outcome_of(lambda: reduce_from_ranks(torch.ones(3), backend, label=label))

    for error in cluster.run(run, 2):
        assert isinstance(error, DesyncError)
        assert "blocks.0.down" in str(error)
        assert "blocks.1.down" in str(error)


@pytest.mark.parametrize("function", [scatter_to_ranks, gather_from_ranks, scatter_sum])
def test_a_dimension_that_is_not_there_is_refused_before_anything_is_sent(function: Any):
    (backend, _) = phalanx.SimulatedBackend.create_group(2)
    with pytest.raises(IndexError, match="has no dim 2"):
        function(torch.ones(3, 4), backend, 2)


@pytest.mark.parametrize("function", [scatter_to_ranks, gather_from_ranks, scatter_sum])
def test_a_cut_of_another_size_is_refused_before_anything_is_sent(function: Any):
    (backend, _) = phalanx.SimulatedBackend.create_group(2)
    with pytest.raises(SizeMismatchError, match="along dim 1, as it was cut"):
        function(torch.ones(3, 4), backend, -1, cut=ShardSpec.of(5, 2))


def test_a_shard_may_be_changed_in_place():
    def run(backend: Backend) -> Tensor:
        x = torch.ones(5, 3, requires_grad=True)
        shard = scatter_to_ranks(x, backend, 0)
        shard += torch.arange(3)
        shard.pow(2).sum().backward()
        assert x.grad is not None
        return x.grad

    for gradient in simulate(run, 2):
        assert torch.equal(gradient, torch.tensor([[2.0, 4.0, 6.0]]).expand(5, 3))
