"""A pass that goes wrong: what the others learn, and how training goes on."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from ddp_models import noise, seeded
from ddp_runs import assert_close, outcome_of
from fsdp_runs import (
    COMMON,
    COOPERATIVE,
    FULL_SHARD,
    MESSAGES,
    NO_SHARD,
    SHARD_GRAD_OP,
    alone,
    every_way,
    gradient_pieces,
    joined,
    on_ranks,
)
from torch import Tensor, nn

from phalanx import FSDP, Backend, DesyncError, PeerLostError
from phalanx.fsdp.flat_param import FlatParameter
from phalanx.fsdp.parameter_group import ForwardCall
from phalanx.fsdp.runtime import FsdpRuntime
from phalanx.fsdp.unsharded import UnshardedParameter

RANKS = 3
WAYS = [
    (FULL_SHARD, COMMON),
    (FULL_SHARD, MESSAGES),
    (SHARD_GRAD_OP, MESSAGES),
    (NO_SHARD, COOPERATIVE),
]
way = every_way(WAYS)


class FailsBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("a bad batch")


class Layer(nn.Module):
    """Computes, or fails: in forward before or after it has, or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.how = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "interrupt":
            raise KeyboardInterrupt
        x = torch.tanh(self.one(x))
        if self.how == "forward":
            raise ArithmeticError("a bad batch")
        if self.how == "backward":
            x = FailsBackwards.apply(x)
        return self.two(x)


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def build() -> nn.Module:
    return seeded(Fragile)


def backward(model: nn.Module, seed: int) -> None:
    model(noise(4, 6, seed=seed)).pow(2).sum().backward()


def assert_next_step_works(fsdp: FSDP, backend: Backend) -> Any:
    fsdp.zero_grad()
    backward(fsdp, backend.rank)
    return gradient_pieces(fsdp)


def plain_gradients() -> Any:
    losses = [
        lambda m, r=rank: m(noise(4, 6, seed=r)).pow(2).sum()  # type: ignore[misc]
        for rank in range(RANKS)
    ]
    return alone(build, losses)


@pytest.mark.checkered
@way
@pytest.mark.parametrize(
    ("unit", "place"), [(Layer, 3), ((nn.Sequential, nn.Linear), 0)], ids=["layers", "nested"]
)
@pytest.mark.parametrize("how", ["forward", "backward", "interrupt"])
def test_after_a_pass_that_failed_on_every_rank_the_next_step_works(
    how: str, place: int, unit: Any, strategy: Any, where: Any
):
    def body(model: Any, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy, unit=unit)
        for number in range(2):
            backward(fsdp, number)
            model.layers[place].how = how
            with pytest.raises((ArithmeticError, KeyboardInterrupt)):
                backward(fsdp, 10 + number)
            model.layers[place].how = ""
        return assert_next_step_works(fsdp, backend)

    assert_close(joined(on_ranks(where, RANKS, build, body)), plain_gradients())


@way
def test_a_batch_may_be_tried_again_while_its_error_is_being_handled(strategy: Any, where: Any):
    """An error that was there before a pass is none of the pass."""

    def body(model: Any, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        model.layers[1].how = "forward"
        try:
            backward(fsdp, 99)
        except ArithmeticError:
            model.layers[1].how = ""
            pieces = assert_next_step_works(fsdp, backend)
            with torch.no_grad():
                fsdp(noise(4, 6))
            for group in fsdp._runtime.groups:
                assert group.state.now == "SHARDED"
        return pieces

    assert_close(joined(on_ranks(where, RANKS, build, body)), plain_gradients())


@way
@pytest.mark.parametrize("outermost", [True, False])
def test_hooks_of_others_may_fail_and_may_use_parameters(
    outermost: bool, strategy: Any, where: Any
):
    """Such as `weight_norm`'s, which computes a weight out of two before each forward pass."""

    def body(model: Any, backend: Backend) -> Any:
        fails = [True, True]
        shapes = []

        def before(module: Any, args: Any) -> None:
            shapes.append(model.layers[0].one.weight.shape)
            if fails:
                fails.pop()
                raise ArithmeticError("a hook")

        (model if outermost else model.layers).register_forward_pre_hook(before)
        fsdp = FSDP(model, backend, strategy=strategy)
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                fsdp(noise(4, 6))
        pieces = assert_next_step_works(fsdp, backend)
        assert shapes[-1] == (6, 6)
        return pieces

    assert_close(joined(on_ranks(where, RANKS, build, body)), plain_gradients())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@way
def test_weight_norm_old_and_new(strategy: Any, where: Any):
    def make() -> nn.Module:
        old, new = torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm
        return nn.Sequential(old(nn.Linear(6, 5)), nn.Tanh(), new(nn.Linear(5, 3)))

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        backward(fsdp, backend.rank)
        return gradient_pieces(fsdp)

    losses = [lambda m, r=rank: m(noise(4, 6, seed=r)).pow(2).sum() for rank in range(RANKS)]
    found = joined(on_ranks(where, RANKS, lambda: seeded(make), body))
    assert_close(found, alone(lambda: seeded(make), losses))


@way
@pytest.mark.parametrize("how", ["forward", "backward"])
def test_a_rank_that_fails_alone_ends_the_others_and_its_own_error_is_the_cause(
    how: str, strategy: Any, where: Any
):
    def body(model: Any, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy)
        backward(fsdp, 0)
        if backend.rank == 1:
            model.layers[2].how = how
        backward(fsdp, 1)
        torch.optim.SGD(fsdp.parameters(), lr=0.1).step()
        backward(fsdp, 2)

    with pytest.raises(ArithmeticError, match="a bad batch"):
        on_ranks(where, RANKS, build, body)


def test_the_others_are_told_who_is_gone_and_in_what_they_waited_for_it():
    def body(model: Any, backend: Backend) -> BaseException | None:
        fsdp = FSDP(model, backend)
        backward(fsdp, 0)
        token = torch.zeros(1)
        if backend.rank == 1:
            backend.recv(token, 0)
            backend.recv(token, 2)
            backend.abort()
            return None
        backend.send(token, 1)
        return outcome_of(lambda: [backward(fsdp, number) for number in range(3)])

    for rank, error in enumerate(on_ranks(MESSAGES, RANKS, build, body)):
        if rank != 1:
            assert isinstance(error, PeerLostError)
            assert f"rank {rank}" in str(error)
            assert "rank 1" in str(error)
            assert "FSDP gathers" in str(error)


@pytest.mark.parametrize(("strategy", "where"), WAYS[1:3])
def test_a_rank_that_leaves_a_pass_out_is_told_that_it_is_out_of_step(strategy: Any, where: Any):
    def body(model: Any, backend: Backend) -> BaseException | None:
        fsdp = FSDP(model, backend, strategy=strategy)
        backward(fsdp, 0)
        if backend.rank == 1:
            with torch.no_grad():
                fsdp(noise(4, 6))

        def go_on() -> None:
            for number in range(3):
                backward(fsdp, number)
                torch.optim.SGD(fsdp.parameters(), lr=0.1).step()

        error = outcome_of(go_on)
        return error or outcome_of(backend.barrier)

    errors = on_ranks(where, 2, build, body)
    if strategy is FULL_SHARD:
        for error in errors:
            assert isinstance(error, DesyncError)
            assert "FSDP" in str(error)
    else:  # an evaluation moves nothing where parameters stay
        assert errors == [None, None]


# What it leaves --------------------------------------------------------------------------------


PARTS = (FSDP, FsdpRuntime, FlatParameter, ForwardCall, UnshardedParameter)


def parts_alive() -> set[int]:
    gc.collect()
    return {id(thing) for thing in gc.get_objects() if type(thing) in PARTS}


@pytest.mark.parametrize(
    ("strategy", "where", "unwrapped"),
    [(FULL_SHARD, COMMON, True), (FULL_SHARD, MESSAGES, False), (SHARD_GRAD_OP, MESSAGES, True)],
)
def test_dropping_one_leaves_nothing_behind(unwrapped: bool, strategy: Any, where: Any):
    def body(model: Any, backend: Backend) -> None:
        for _ in range(2 if unwrapped else 1):
            fsdp = FSDP(model, backend, strategy=strategy)
            optimizer = torch.optim.Adam(fsdp.parameters())
            backward(fsdp, 0)
            optimizer.step()
            fsdp(noise(4, 6))
            if unwrapped:
                fsdp.unwrap()
            del fsdp, optimizer

    before = parts_alive()
    on_ranks(where, 2, build, body)
    assert parts_alive() <= before


@way
def test_several_at_a_time_on_one_backend_do_not_disturb_each_other(strategy: Any, where: Any):
    """As a generator and a discriminator are: one pass goes through both."""

    def play(first: nn.Module, second: nn.Module, rank: int) -> None:
        second(first(noise(4, 6, seed=rank))).pow(2).sum().backward()
        first(second(noise(4, 6, seed=rank))).sum().backward()

    def body(model: nn.Module, backend: Backend) -> Any:
        first = FSDP(model.layers[0], backend, strategy=strategy)
        second = FSDP(model.layers[1], backend, strategy=strategy)
        play(first, second, backend.rank)
        return gradient_pieces(first), gradient_pieces(second)

    ranks = on_ranks(where, 2, build, body)
    plain = [build() for _ in range(2)]
    for rank, model in enumerate(plain):
        play(model.layers[0], model.layers[1], rank)
    for number in range(2):
        layers = [dict(model.layers[number].named_parameters()) for model in plain]
        wanted = {name: (p.grad + layers[1][name].grad) / 2 for name, p in layers[0].items()}
        assert_close(joined([found[number] for found in ranks]), wanted)
