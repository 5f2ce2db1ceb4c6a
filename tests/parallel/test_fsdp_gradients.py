"""After `backward()` each rank has its part of the mean gradient, whatever the model is like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from ddp_models import noise, seeded
from ddp_runs import assert_close
from fsdp_runs import (
    COMMON,
    COOPERATIVE,
    FULL_SHARD,
    MESSAGES,
    NO_SHARD,
    SHARD_GRAD_OP,
    alone,
    gradient_pieces,
    joined,
    on_ranks,
)
from torch import Tensor, nn

from phalanx import FSDP, Backend, ShardingStrategy

RANKS = 3


class MixedDtypes(nn.Module):
    """Layers of two dtypes, a table of whole numbers, and a layer that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 5).double()
        self.narrow = nn.Linear(5, 4)
        self.table = nn.Parameter(torch.tensor([3, 1, 2]), requires_grad=False)
        self.fixed = nn.Linear(4, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.wide(x.double())).float()
        return self.fixed(torch.tanh(self.narrow(x))) * self.table * self.scale


class Shared(nn.Module):
    """One weight in two modules of a group, and another one in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.first[2].weight = self.first[0].weight
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 6, bias=False)
        self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(self.first(x))))


class Repeated(nn.Module):
    """Layers that are used several times, and one after the other in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.two, self.one, self.two, self.two, self.one):
            x = torch.tanh(layer(x))
        return self.last(x)


class Deep(nn.Module):
    """Lists and dictionaries of modules, and parameters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Sequential(nn.Linear(6, 6), nn.Tanh())})
            for _ in range(2)
        )
        self.shifts = nn.ParameterList([torch.zeros(6), torch.ones(6)])

    def forward(self, x: Tensor) -> Tensor:
        for block, shift in zip(self.blocks, self.shifts, strict=True):
            x = block["b"](block["a"](x * self.gain)) + shift
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 4, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(8, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.cells(x.unsqueeze(0))
        return self.head(self.gru(states)[0])


class Structured(nn.Module):
    """Takes keywords, and gives a dictionary of tuples."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Linear(6, 3)
            self.right = nn.Linear(6, 3)

        def forward(self, *, values: dict[str, Tensor], scale: float) -> dict[str, Any]:
            both = self.left(values["x"]) * scale, self.right(values["x"])
            return {"both": both, "number": 3, "none": None}

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()
        self.outer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(values={"x": x}, scale=2.0)
        return self.outer(found["both"][0] * found["both"][1] * found["number"])


class Attention(nn.Module):
    """Modules that read parameters of modules that they never call."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        return self.norm(x + self.attend(x, x, x, need_weights=False)[0])


class OneLayer(nn.Linear):
    """The model itself is the only group."""

    def __init__(self) -> None:
        super().__init__(6, 3)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        self.plain = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain((x.to(torch.complex64) @ self.weight).abs())


MODELS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: (lambda kind=kind: seeded(kind))
    for kind in (
        *(MixedDtypes, Shared, Repeated, Deep, Recurrent),
        *(Structured, Attention, OneLayer, Complex),
    )
}


class Way(NamedTuple):
    """A strategy on a kind of backend."""

    strategy: ShardingStrategy
    cluster: Any

    def __str__(self) -> str:
        return f"{self.strategy}-{self.cluster.name}"


WAYS = [
    Way(FULL_SHARD, COMMON),
    Way(FULL_SHARD, MESSAGES),
    Way(SHARD_GRAD_OP, MESSAGES),
    Way(SHARD_GRAD_OP, COOPERATIVE),
    Way(NO_SHARD, COOPERATIVE),
]


def loss_of(model: nn.Module, rank: int, number: int = 0) -> Tensor:
    return model(noise(4, 6, seed=10 * number + rank)).pow(2).sum()


@pytest.mark.checkered
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_gradients_are_the_mean_of_the_ranks(build: Callable[[], nn.Module], way: Way):
    """Twice, so that the second pass begins as the first has left things."""

    def body(model: nn.Module, backend: Backend) -> list[Any]:
        fsdp = FSDP(model, backend, strategy=way.strategy)
        found = []
        for number in range(2):
            fsdp.zero_grad()
            loss_of(fsdp, backend.rank, number).backward()
            found.append(gradient_pieces(fsdp))
        return found

    ranks = on_ranks(way.cluster, RANKS, build, body)
    for number in range(2):
        losses = [lambda m, r=rank, n=number: loss_of(m, r, n) for rank in range(RANKS)]
        assert_close(joined([found[number] for found in ranks]), alone(build, losses))


NESTED = {
    "a class": nn.Linear,
    "a tuple of classes": (nn.Sequential, nn.Bilinear),
    "a set of classes": {nn.Linear, nn.Sequential},
    "a function": lambda module: type(module) in (nn.Sequential, nn.Linear, Deep),
    "the whole": lambda module: isinstance(module, Deep),
}


@pytest.mark.parametrize("where", [COMMON, MESSAGES], ids=["common", "messages"])
@pytest.mark.parametrize("unit", NESTED.values(), ids=NESTED)
def test_they_are_so_whatever_is_unsharded_together(unit: Any, where: Any):
    build = MODELS["Deep"]

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, unit=unit)
        loss_of(fsdp, backend.rank).backward()
        return gradient_pieces(fsdp)

    losses = [lambda m, r=rank: loss_of(m, r) for rank in range(RANKS)]
    assert_close(joined(on_ranks(where, RANKS, build, body)), alone(build, losses))
