"""After `backward()`, every gradient is the mean over the ranks: that of the joined batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ddp_models import DefinedBackwards, loss_of, mlp, noise, seeded, vectors
from ddp_runs import assert_close, gradients, mean_of
from fsdp_runs import FULL_SHARD, gradient_pieces, joined
from torch import Tensor, nn
from wrappings import (
    FSDPS,
    UNUSED,
    Wrapping,
    assert_gradients,
    every_ddp,
    every_wrapping,
)

from phalanx import Backend


def rows(seed: int) -> Tensor:
    return noise(4, 6, seed=seed)


def backward(model: Any, rank: int, number: int = 0) -> None:
    model(rows(rank + 10 * number)).pow(2).sum().backward()


# Whatever the model is like --------------------------------------------------------------------


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


@pytest.mark.checkered
@every_wrapping
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_gradients_are_the_mean_of_the_ranks(build: Callable[[], nn.Module], wrap: Wrapping):
    """Twice, so that the second pass begins as the first has left things."""
    passes = [partial(backward, number=number) for number in range(2)]
    for found, one in zip(wrap.gradients(3, build, *passes, ddp=UNUSED), passes, strict=True):
        assert_gradients(found, 3, build, one)


NESTED = {
    "a class": nn.Linear,
    "a tuple of classes": (nn.Sequential, nn.Bilinear),
    "a set of classes": {nn.Linear, nn.Sequential},
    "a function": lambda module: type(module) in (nn.Sequential, nn.Linear, Deep),
    "the whole": lambda module: isinstance(module, Deep),
}


@pytest.mark.checkered
@every_wrapping(among=[wrap for wrap in FSDPS if wrap.options["strategy"] is FULL_SHARD])
@pytest.mark.parametrize("unit", NESTED.values(), ids=NESTED)
def test_they_are_so_whatever_is_unsharded_together(unit: Any, wrap: Wrapping):
    (found,) = wrap.gradients(3, MODELS["Deep"], backward, fsdp={"unit": unit})
    assert_gradients(found, 3, MODELS["Deep"], backward)


# Passes of every kind --------------------------------------------------------------------------


@pytest.mark.checkered
@every_wrapping
@pytest.mark.parametrize("build", [mlp, lambda: seeded(DefinedBackwards)])
def test_gradients_may_be_zeroed_or_dropped(build: Callable[[], nn.Module], wrap: Wrapping):
    passes = [partial(backward, number=number) for number in range(3)]
    for found, one in zip(wrap.gradients(3, build, *passes, alternate=True), passes, strict=True):
        assert_gradients(found, 3, build, one)


def three_times(model: Any, rank: int) -> None:
    for number in range(3):
        backward(model, rank, number)


def twice_through_one_graph(model: Any, rank: int) -> None:
    loss = model(rows(rank)).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_forward_passes_in_one_backward_pass(model: Any, rank: int) -> None:
    first, second = (model(rows(rank + seed)).pow(2).sum() for seed in (0, 10))
    (first + second).backward()


@pytest.mark.checkered
@every_wrapping
@pytest.mark.parametrize(
    "one", [three_times, twice_through_one_graph, two_forward_passes_in_one_backward_pass]
)
def test_several_passes_add_up(one: Callable[..., None], wrap: Wrapping):
    *_, found = wrap.gradients(3, mlp, one, one)
    assert_gradients(found, 3, mlp, one, rtol=1e-5, atol=1e-5)


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return {"loss": y.pow(2).sum(), "more": (y, [x, None, "text"])}


@every_wrapping
def test_a_loss_may_be_computed_in_a_module_that_returns_tuples_and_dictionaries(wrap: Wrapping):
    def one(model: Any, rank: int) -> None:
        answers = model(rows(rank))
        assert answers["more"][1][1:] == [None, "text"]
        answers["loss"].backward()

    (found,) = wrap.gradients(3, lambda: seeded(Answers), one)
    assert_gradients(found, 3, lambda: seeded(Answers), one)


@every_ddp
def test_gradients_of_gradients_can_be_taken(wrap: Wrapping):
    """A penalty on the gradient with respect to the inputs, which is differentiated again."""

    def penalty(model: nn.Module, rank: int) -> None:
        x = rows(rank).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()

    (found,) = wrap.gradients(2, mlp, penalty, ddp=UNUSED)
    assert_gradients(found, 2, mlp, penalty)


@every_wrapping
def test_gradients_with_respect_to_inputs_only_touch_no_parameter(wrap: Wrapping):
    def inputs_only(model: nn.Module, rank: int) -> None:
        x = rows(rank).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        assert all(p.grad is None for p in model.parameters())
        backward(model, rank)

    (found,) = wrap.gradients(3, mlp, inputs_only, ddp=UNUSED)
    assert_gradients(found, 3, mlp, backward)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@every_ddp
def test_backward_may_create_a_graph(wrap: Wrapping):
    def body(model: nn.Module, backend: Backend) -> Any:
        ddp = wrap(model, backend)
        for number in range(3):
            ddp.zero_grad()
            ddp(rows(backend.rank + 10 * number)).pow(2).sum().backward(create_graph=True)
        found = gradients(ddp)
        ddp.zero_grad()  # breaks the cycle between a parameter and its gradient's graph
        return found

    for found in wrap.on_ranks(3, mlp, body):
        assert_gradients(found, 3, mlp, partial(backward, number=2))


@every_wrapping
def test_two_models_on_one_backend_train_against_each_other(wrap: Wrapping):
    def losses(make: Any, critic: Any, rank: int) -> tuple[Tensor, Tensor]:
        return critic(make(rows(rank))).pow(2).sum(), critic(rows(rank + 10)).sum()

    def build() -> nn.ModuleList:
        return nn.ModuleList([seeded(lambda: nn.Linear(6, 6)), seeded(lambda: nn.Linear(6, 2), 1)])

    def step(make: nn.Module, critic: nn.Module, rank: int, read: Any) -> list[Any]:
        losses(make, critic, rank)[0].backward()
        found = [read(make)]
        critic.zero_grad()
        losses(make, critic, rank)[1].backward()
        return [*found, read(critic)]

    def body(model: Any, backend: Backend) -> list[Any]:
        make, critic = (wrap(part, backend) for part in model)
        return step(make, critic, backend.rank, gradient_pieces)

    alone = [step(*build(), rank, gradients) for rank in range(3)]
    ranks = wrap.on_ranks(3, build, body)
    for place in range(2):
        found = joined([each[place] for each in ranks])
        assert_close(found, mean_of([each[place] for each in alone]))


@every_ddp
def test_gradients_may_be_read_on_one_rank_and_not_on_another_before_the_next_step(
    wrap: Wrapping,
):
    def body(model: nn.Module, backend: Backend) -> Any:
        ddp = wrap(model, backend)
        for seed in (5, 6, 7):
            ddp.zero_grad()
            x, y = vectors(3, seed + backend.rank)
            loss_of(ddp(x), y).backward()
            if backend.rank == 1:
                nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
        return gradients(ddp)

    plain = [mlp() for _ in range(2)]
    for rank, each in enumerate(plain):
        x, y = vectors(3, 7 + rank)
        loss_of(each(x), y).backward()
    assert_close(wrap.on_ranks(2, mlp, body)[0], mean_of([gradients(each) for each in plain]))
