"""Parameters that a backward pass does not reach: on every rank, or on some."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ddp_models import Branches, noise, seeded
from ddp_runs import assert_same_bits, gradients, outcome_of
from torch import Tensor, nn
from wrappings import (
    FSDPS,
    FULL_SHARD_BY_MESSAGES,
    UNUSED,
    Wrapping,
    assert_gradients,
    every_ddp,
    every_fsdp,
    every_wrapping,
)

from phalanx import Backend, DesyncError, MisuseError

Plan = list[list[list[str]]]  # for each step, for each rank, the branches that it uses

PLANS: dict[str, Plan] = {
    "all used": [[["left", "right"]] * 3] * 3,
    "one on no rank": [[["left"]] * 3] * 3,
    "one on rank 0 only": [[["left", "right"], ["left"], ["left"]]] * 3,
    "one on rank 2 only": [[["left"], ["left"], ["left", "right"]]] * 3,
    "another on each rank": [[["left"], ["right"], []]] * 3,
    "none on any rank": [[[], [], []]] * 3,
    "another in each step": [[["left"]] * 3, [["right"]] * 3, [["left", "right"]] * 3],
    "first everywhere, then here and there": [
        [["left", "right"]] * 3,
        [["left"], ["right"], ["left", "right"]],
        [["right"], [], ["right"]],
    ],
}
ONE_GROUP = {"unit": lambda module: isinstance(module, Branches)}  # an option of FSDP's


def branches() -> nn.Module:
    return seeded(Branches)


def step(model: nn.Module, rank: int, number: int, names: list[str]) -> None:
    model(noise(4, 6, seed=10 * number + rank), *names).pow(2).sum().backward()


def steps_of(plan: Plan) -> list[Callable[[Any, int], None]]:
    def one(model: nn.Module, rank: int, number: int) -> None:
        step(model, rank, number, plan[number][rank])

    return [partial(one, number=number) for number in range(len(plan))]


@pytest.mark.checkered
@every_wrapping
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_they_count_as_zeros_and_stay_none_where_no_rank_used_them(plan: Plan, wrap: Wrapping):
    steps = steps_of(plan)
    found = wrap.gradients(3, branches, *steps, ddp=UNUSED, fsdp=ONE_GROUP)
    for each, one in zip(found, steps, strict=True):
        assert_gradients(each, 3, branches, one)


@every_wrapping
def test_one_that_no_rank_uses_is_not_moved_by_the_optimizer(wrap: Wrapping):
    def body(model: nn.Module, backend: Backend) -> bool:
        wrapped = wrap(model, backend, ddp=UNUSED)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1, weight_decay=0.5)
        before = wrap.state(wrapped)
        for number in range(3):
            optimizer.zero_grad()
            step(wrapped, backend.rank, number, ["left"])
            optimizer.step()
        after = wrap.state(wrapped)
        assert not torch.equal(before["left.weight"], after["left.weight"])
        return torch.equal(before["right.weight"], after["right.weight"])

    assert wrap.on_ranks(2, branches, body) == [True, True]


@every_ddp
def test_gradients_of_earlier_passes_are_kept_where_a_later_one_does_not_reach(wrap: Wrapping):
    plan = [[["left", "right"], ["left"]], [["left"], ["left"]], [["right"], ["left"]]]

    def all_passes(model: nn.Module, rank: int) -> None:
        for one in steps_of(plan):
            one(model, rank)

    (found,) = wrap.gradients(2, branches, all_passes, ddp=UNUSED)
    assert_gradients(found, 2, branches, all_passes)


@every_ddp
def test_a_loss_that_depends_on_no_parameter_on_one_rank_counts_as_zeros(wrap: Wrapping):
    def one(model: nn.Module, rank: int) -> None:
        x = noise(4, 6, seed=rank).requires_grad_()
        (model(x, "left").pow(2).sum() * (0.0 if rank == 1 else 1.0)).backward()

    (found,) = wrap.gradients(2, branches, one, ddp=UNUSED)
    assert_gradients(found, 2, branches, one)


# Errors ----------------------------------------------------------------------------------------


@pytest.mark.checkered
@every_ddp
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("culprits", ["one rank", "every rank"])
def test_without_find_unused_parameters_the_error_names_them_on_every_rank_at_once(
    culprits: str, ranks: int, wrap: Wrapping
):
    def body(model: nn.Module, backend: Backend) -> BaseException | None:
        ddp = wrap(model, backend, ddp={"broadcast_buffers": False})
        step(ddp, backend.rank, 0, ["left", "right"])
        ddp.zero_grad()
        odd = culprits == "every rank" or backend.rank == ranks - 1
        names = ["left"] if odd else ["left", "right"]

        def fail() -> None:
            backend.barrier()  # all ranks are past what came before
            step(ddp, backend.rank, 1, names)

        return outcome_of(fail)

    for error in wrap.on_ranks(ranks, branches, body):
        assert isinstance(error, MisuseError)
        assert "right.weight" in str(error)
        assert "right.bias" in str(error)
        assert "left" not in str(error)
        assert "find_unused_parameters" in str(error)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 2)
        self.unused = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(40))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@every_ddp
@pytest.mark.parametrize(
    ("build", "width", "named"),
    [(Wide, 6, r"unused\.\d+\.weight.* and 30 more"), (Passes, 2, "scale")],
    ids=["many are counted, not listed", "all, if the loss depends on none"],
)
def test_unused_parameters_are_named(
    build: Callable[[], nn.Module], width: int, named: str, wrap: Wrapping
):
    def body(model: nn.Module, backend: Backend) -> None:
        wrap(model, backend)(torch.ones(2, width, requires_grad=True)).sum().backward()

    with pytest.raises(MisuseError, match=named):
        wrap.on_ranks(2, build, body)


@every_ddp
def test_a_loss_without_a_graph_is_torch_s_own_error_and_training_goes_on(wrap: Wrapping):
    def body(model: nn.Module, backend: Backend) -> Any:
        ddp = wrap(model, backend)
        with pytest.raises(RuntimeError, match="does not require grad"):
            ddp(torch.ones(2, 6), "left", "right").detach().sum().backward()
        step(ddp, backend.rank, 0, ["left", "right"])
        return gradients(ddp)

    assert_same_bits(wrap.on_ranks(2, branches, body))


@every_wrapping(among=[wrap for wrap in FSDPS if wrap.cluster is FULL_SHARD_BY_MESSAGES.cluster])
def test_ranks_that_use_other_groups_are_told_which(wrap: Wrapping):
    def body(model: nn.Module, backend: Backend) -> BaseException | None:
        fsdp = wrap(model, backend)
        names = ["left"] if backend.rank else ["left", "right"]
        error = outcome_of(lambda: step(fsdp, backend.rank, 0, names))
        return error or outcome_of(backend.barrier)

    for error in wrap.on_ranks(2, branches, body):
        assert isinstance(error, DesyncError)
        assert "FSDP" in str(error)
        assert "right" in str(error)
        assert "left" in str(error)


# The order in which FSDP reduces its groups ----------------------------------------------------


class Two(nn.Module):
    """Two layers, of which the second is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return torch.tanh(self.a(x) + (self.b(x) if both else 0))


class Chain(nn.Module):
    """A group's output is the next one's input, the very same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Two() for _ in range(4))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        for layer in self.layers:
            x = layer(x, both)
        return x


class Reads(Two):
    """Takes what every layer takes, too; one of these is a parameter of the model."""

    def forward(self, x: Tensor, memory: Tensor, shift: Tensor, both: bool) -> Tensor:
        return torch.tanh(self.a(x) + memory + shift + (self.b(memory) if both else 0))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Reads() for _ in range(4))
        self.shift = nn.Parameter(torch.randn(6))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        memory = self.encode(x)
        for layer in self.layers:
            x = layer(x, memory, self.shift, both)
        return x * self.scale if both else x


class Towers(nn.Module):
    """Groups whose inputs need no gradients, so that no gradient tells where they end."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Two() for _ in range(3))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return torch.stack([tower(x, both) for tower in self.towers]).sum(0)


class Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = Two()
        self.two = Two()

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.one(self.two(self.one(self.one(x, both), both), both), both)


@pytest.mark.checkered
@every_fsdp
@pytest.mark.parametrize("kind", [Chain, Decoder, Towers, Repeats])
def test_groups_are_reduced_in_one_order_though_not_all_ranks_have_all_gradients(
    kind: Callable[[], nn.Module], wrap: Wrapping
):
    """A rank that lacks one could only tell at the end; the others do not wait until then."""

    def one(model: nn.Module, rank: int) -> None:
        model(noise(4, 6, seed=rank), rank == 0).pow(2).sum().backward()

    def build() -> nn.Module:
        return seeded(kind)

    _, found = wrap.gradients(3, build, one, one)
    assert_gradients(found, 3, build, one)
