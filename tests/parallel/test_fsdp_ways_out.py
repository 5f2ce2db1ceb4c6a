"""Where what a group computes goes: not only into its outputs, and not only once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import mlp, noise, seeded
from ddp_runs import assert_close, gradients, mean_of
from fsdp_runs import (
    COMMON,
    FULL_SHARD,
    MESSAGES,
    SHARD_GRAD_OP,
    every_way,
    gradient_pieces,
    joined,
    on_ranks,
)
from torch import Tensor, nn

from phalanx import FSDP, Backend, MisuseError

RANKS = 2
WAYS = [(FULL_SHARD, COMMON), (FULL_SHARD, MESSAGES), (SHARD_GRAD_OP, MESSAGES)]
way = every_way(WAYS)


class Inner(nn.Module):
    """Computes a loss of its own, from parameters that only that needs; keeps it, and more."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))
        self.norm = nn.LayerNorm(6)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append((self.norm(x) * self.gain).tanh().pow(2).sum())
        return x


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.outer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(self.outer(x)))


def auxiliary(model: nn.Module, x: Tensor) -> None:
    inner = next(module for module in model.modules() if isinstance(module, Inner))
    output = model(x).sum()
    (output + inner.kept.pop()).backward()


def auxiliary_alone(model: nn.Module, x: Tensor) -> None:
    inner = next(module for module in model.modules() if isinstance(module, Inner))
    model(x)
    inner.kept.pop().backward()


@dataclasses.dataclass
class Output:
    """Nothing that torch knows to look into."""

    hidden: Tensor


class Wrapped(nn.Module):
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, given: Output) -> Output:
            return Output(torch.tanh(self.layer(given.hidden)))

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(self.Part(), self.Part(), self.Part())

    def forward(self, x: Tensor) -> Output:
        return self.parts(Output(x))


def wrapped(model: nn.Module, x: Tensor) -> None:
    model(x).hidden.pow(2).sum().backward()


def features(model: nn.Module, x: Tensor) -> None:
    """Of layers inside, taken by hooks."""
    found: list[Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    handles = [layer.register_forward_hook(lambda *a: found.append(a[2])) for layer in layers]
    model(x)
    for handle in handles:
        handle.remove()
    torch.stack([value.pow(2).sum() for value in found]).sum().backward()


def penalty(model: nn.Module, x: Tensor) -> None:
    """On gradients, which are differentiated again."""
    x.requires_grad_()
    output = model(x).pow(2).sum()
    (slope,) = torch.autograd.grad(output, x, create_graph=True)
    (output + slope.pow(2).sum()).backward()


class InPlace(nn.Module):
    """Outputs of groups are changed, and cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 12)
        self.c = nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x += 1
        left, right = self.b(x).chunk(2, -1)
        x = self.c(x + left.tanh() * right)
        x[0].mul_(2)
        return x.sigmoid_()


def plain_loss(model: nn.Module, x: Tensor) -> None:
    model(x).pow(2).sum().backward()


class Pair(nn.Module):
    """Two outputs that have nothing in common."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(6, 4), nn.Tanh())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def one_by_one(model: nn.Module, x: Tensor) -> None:
    left, right = model(x)
    left.pow(2).sum().backward()
    right.pow(2).sum().backward()


PLAYS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], None]]] = {
    "a loss that is kept": (Auxiliary, auxiliary),
    "nothing but a loss that is kept": (Auxiliary, auxiliary_alone),
    "objects of one's own": (Wrapped, wrapped),
    "features, by hooks": (mlp, features),
    "a penalty on gradients": (mlp, penalty),
    "outputs that are changed in place": (InPlace, plain_loss),
    "outputs that are gone back through one by one": (Pair, one_by_one),
}


@pytest.mark.checkered
@pytest.mark.parametrize(
    ("strategy", "where", "prefetch"),
    [
        (FULL_SHARD, COMMON, 1),
        (FULL_SHARD, MESSAGES, 0),
        (FULL_SHARD, MESSAGES, 2),
        (SHARD_GRAD_OP, MESSAGES, 1),
    ],
    ids=["common", "messages", "messages, prefetch", "grad_op"],
)
@pytest.mark.parametrize("play", PLAYS.values(), ids=PLAYS)
def test_gradients_are_those_of_the_plain_model(
    play: Any, prefetch: int, strategy: Any, where: Any
):
    kind, perform = play
    build = lambda: seeded(kind)  # noqa: E731

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy, prefetch=prefetch)
        for _ in range(2):
            fsdp.zero_grad()
            perform(fsdp, noise(4, 6, seed=backend.rank))
        return gradient_pieces(fsdp)

    plain = [build() for _ in range(RANKS)]
    for rank, model in enumerate(plain):
        perform(model, noise(4, 6, seed=rank))
    found = joined(on_ranks(where, RANKS, build, body))
    assert_close(found, mean_of([gradients(model) for model in plain]), rtol=1e-4, atol=1e-5)


@way
def test_a_penalty_on_the_shards_themselves_is_one_on_the_parameters(strategy: Any, where: Any):
    """Each rank has its part of it, which is not averaged with the others'."""

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        loss = fsdp(noise(4, 6, seed=backend.rank)).pow(2).sum()
        (loss + sum(p.pow(2).sum() for p in fsdp.parameters())).backward()
        return gradient_pieces(fsdp)

    plain = [mlp() for _ in range(RANKS)]
    for rank, model in enumerate(plain):
        loss = model(noise(4, 6, seed=rank)).pow(2).sum()
        (loss + sum(p.pow(2).sum() for p in model.parameters())).backward()
    wanted = mean_of([gradients(model) for model in plain])
    assert_close(joined(on_ranks(where, RANKS, mlp, body)), wanted)


class Leaks(nn.Module):
    """Gives away a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer.weight


@way
def test_a_full_parameter_that_was_kept_cannot_be_used_when_its_group_is_sharded(
    strategy: Any, where: Any
):
    """The memory may be gone, or it may be there, and written by others."""

    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy, unit=nn.Linear)
        output, weight = fsdp(noise(4, 6))
        for use in (
            lambda: weight * 2,
            lambda: torch.stack([weight]),
            lambda: weight.sum() + 1,
            lambda: weight.detach() + 1,
            lambda: weight.data + 1,
            lambda: weight.tolist()[0],
            lambda: weight[0],
            lambda: torch.nn.functional.linear(input=noise(4, 6), weight=weight),
        ):
            with pytest.raises(
                MisuseError, match=r"layer.weight was used while its parameter group \(layer\)"
            ):
                use()
        assert weight.shape == (6, 6)
        assert "layer.weight: [6, 6], sharded" in repr(weight)
        output.sum().backward()

    on_ranks(where, RANKS, lambda: seeded(Leaks), body)


class Reads(nn.Module):
    """Computes with a parameter of a group that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.nn.functional.linear(x, self.one.weight))


@way
def test_a_module_that_reads_another_group_s_parameter_is_told_what_to_do(
    strategy: Any, where: Any
):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy)
        with pytest.raises(
            MisuseError, match=r"one.weight .* pass a unit= that holds the parameter"
        ):
            fsdp(noise(4, 6))
        fsdp.unwrap()
        together = FSDP(model, backend, strategy=strategy, unit=Reads)
        together(noise(4, 6, seed=backend.rank)).sum().backward()

    on_ranks(where, RANKS, lambda: seeded(Reads), body)


class Fails(nn.Module):
    """Raises once, with what it was given in the error, which keeps the graph behind that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.fails = True

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            self.fails = False
            raise ValueError(x)
        return self.layer(x)


class PartlyUsed(nn.Module):
    def __init__(self, *, used: bool) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 6)
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.always(x))
        return self.sometimes(x) if self.used else x


def test_a_forward_pass_that_failed_is_not_waited_for_whoever_keeps_its_error():
    """On rank 0 a group lacks a gradient: it is reduced when the pass has left it, as on rank 1."""

    def build(rank: int) -> nn.Module:
        layers = lambda: (PartlyUsed(used=True), PartlyUsed(used=rank > 0), Fails())  # noqa: E731
        return seeded(lambda: nn.Sequential(*layers()))

    def body(_: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(build(backend.rank), backend, unit=(PartlyUsed, Fails))
        with pytest.raises(ValueError, match="tensor") as kept:
            fsdp(noise(3, 6))
        fsdp(noise(3, 6)).pow(2).sum().backward()
        assert kept.value.args
        return gradient_pieces(fsdp)

    plain = [build(rank) for rank in range(RANKS)]
    for model in plain:
        model[2].fails = False
        model(noise(3, 6)).pow(2).sum().backward()
    expected = mean_of([gradients(model) for model in plain])
    assert_close(joined(on_ranks(MESSAGES, RANKS, nn.Module, body)), expected)
