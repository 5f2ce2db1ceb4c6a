"""The phases of a parameter group in a backward pass: the table, and the ways through it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import noise, seeded
from ddp_runs import outcome_of
from fsdp_runs import WITH_HYBRID, every_way, on_ranks
from torch import Tensor, nn

from phalanx import FSDP, Backend
from phalanx.errors import DistributedError
from phalanx.fsdp import parameter_group
from phalanx.fsdp.parameter_group import TRANSITIONS, ParameterGroup, Phase

RANKS = 2
EVENTS = ("enter", "reduce", "leave", "end")
way = every_way(WITH_HYBRID)


def test_the_table_is_what_the_transitions_say():
    rows = [("phase", *EVENTS)]
    for phase in Phase:
        none = "-" if phase is Phase.IDLE else "."
        found = [TRANSITIONS.get((phase, event)) for event in EVENTS]
        rows.append((phase.name, *(after.name if after else none for after in found)))
    widths = [max(map(len, column)) + 3 for column in zip(*rows, strict=True)]
    drawn = [
        "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    assert "\n".join(f"    {line}" for line in drawn) in parameter_group.__doc__


def test_the_picture_has_an_arrow_for_each_transition():
    picture = parameter_group.__doc__.split("\n\n")[2]
    words = Counter(picture.split())
    for event, arrows in Counter(event for _, event in TRANSITIONS).items():
        assert words[event] == arrows
    assert {phase for phase in Phase if words[phase.name]} == set(Phase)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(6, 6), nn.Linear(6, 6)
        self.uses_all, self.fails = True, False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        if self.fails:
            x.register_hook(lambda grad: 1 / 0)
        return x + self.spare(x) if self.uses_all else x


class Chain(nn.Module):
    """Two layers, and a computation before each: a pass leaves `b` before it comes to `a`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(), Layer()
        self.scale = nn.Parameter(torch.ones(6))
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x * self.scale)
        for _ in range(self.times):
            x = self.b(x * 2)
        return x * self.scale


def build() -> nn.Module:
    return seeded(Chain)


class Noting(ParameterGroup):
    """It writes down its way through the phases."""

    def after(self, event: str) -> None:
        before = self.phase
        super().after(event)
        if self.phase is not before:
            self.way += f" {event} {self.phase.name}"


Program = Callable[[FSDP], Any]


def loss_of(fsdp: FSDP) -> Tensor:
    return fsdp(noise(4, 6, seed=fsdp.backend.rank)).sum()


def step(fsdp: FSDP) -> None:
    loss_of(fsdp).backward()


def accumulate(fsdp: FSDP) -> None:
    with fsdp.no_sync():
        step(fsdp)


def leave_parameters_out(fsdp: FSDP) -> None:
    fsdp.module.a.uses_all = fsdp.module.b.uses_all = False
    step(fsdp)


def call_a_layer_twice(fsdp: FSDP) -> None:
    fsdp.module.times = 2
    step(fsdp)


def ask_for_the_gradient_of_the_input(fsdp: FSDP) -> None:
    x = noise(4, 6).requires_grad_()
    torch.autograd.grad(fsdp(x).sum(), x)


def train_what_is_before(fsdp: FSDP) -> None:
    trunk = nn.Linear(6, 6)
    fsdp(trunk(noise(4, 6))).sum().backward()


def fail_in_the_first_layer(fsdp: FSDP) -> None:
    fsdp.module.a.fails = True
    assert isinstance(outcome_of(lambda: step(fsdp)), ZeroDivisionError)
    fsdp.module.a.fails = False
    loss_of(fsdp)  # the next forward pass ends what was cut short


LEFT = "IDLE enter BACKWARD leave LEFT end IDLE"
LEFT_AND_REDUCED = "IDLE enter BACKWARD leave LEFT reduce DONE end IDLE"
REDUCED = "IDLE enter BACKWARD reduce REDUCED end IDLE"
REDUCED_AND_LEFT = "IDLE enter BACKWARD reduce REDUCED leave DONE end IDLE"
ENDED = "IDLE enter BACKWARD end IDLE"

WAYS: dict[Program, tuple[str, str, str]] = {  # of the model itself, of a and of b
    step: (ENDED, LEFT_AND_REDUCED, LEFT_AND_REDUCED),
    accumulate: (ENDED, LEFT, LEFT),
    call_a_layer_twice: (ENDED, LEFT_AND_REDUCED, LEFT_AND_REDUCED),
    leave_parameters_out: (ENDED, REDUCED, REDUCED_AND_LEFT),
    ask_for_the_gradient_of_the_input: (ENDED, ENDED, LEFT),
    train_what_is_before: (REDUCED, LEFT_AND_REDUCED, LEFT_AND_REDUCED),
    fail_in_the_first_layer: (ENDED, ENDED, LEFT_AND_REDUCED),
}


@way
@pytest.mark.parametrize("program", WAYS, ids=lambda each: each.__name__)
def test_a_program_goes_its_way_through_the_phases(program: Program, strategy: Any, where: Any):
    def body(model: Any, backend: Backend) -> list[str]:
        fsdp = FSDP(model, backend, strategy=strategy)
        for group in fsdp._runtime.groups:
            group.__class__, group.way = Noting, group.phase.name
        program(fsdp)
        return [group.way for group in fsdp._runtime.groups]

    assert on_ranks(where, RANKS, build, body) == [list(WAYS[program])] * RANKS


def test_these_programs_go_along_every_arrow():
    gone = set()
    for path in {path for paths in WAYS.values() for path in paths}:
        words = path.split()
        gone |= {(words[at], words[at + 1], words[at + 2]) for at in range(0, len(words) - 1, 2)}
    assert gone == {
        (before.name, event, after.name) for (before, event), after in TRANSITIONS.items()
    }


class Penalized(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = super().forward(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope


@way
def test_while_a_graph_is_there_that_a_pass_has_kept_a_group_is_left_at_the_end(
    strategy: Any, where: Any
):
    def body(model: Any, backend: Backend) -> str:
        fsdp = FSDP(model, backend, strategy=strategy, unit=Penalized)
        (group,) = fsdp._runtime.groups
        group.__class__, group.way = Noting, group.phase.name
        kept = loss_of(fsdp)
        step(fsdp)
        del kept
        return group.way

    ways = on_ranks(where, RANKS, lambda: seeded(Penalized), body)
    assert ways == ["IDLE" + 3 * " enter BACKWARD end IDLE"] * RANKS


class OnceMore(torch.autograd.Function):
    """Its backward pass runs another one, from what has been put in a box to its own output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, box: list[Tensor]) -> Tensor:
        ctx.box = box
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        later, own = ctx.box
        torch.autograd.grad(later, own, torch.ones_like(later))
        return grad, None


class Parallel(Chain):
    """It calls `b` for two inputs; a pass comes twice to that of the first call."""

    def forward(self, x: Tensor) -> Tensor:
        box: list[Tensor] = []
        x = self.a(x)
        second = x + 1
        x = OnceMore.apply(x, box)
        first = x + 2
        box += [first, x]
        return self.b(first) + self.b(second)


@way
def test_a_call_that_was_left_is_left_when_a_pass_comes_to_its_input_again(
    strategy: Any, where: Any
):
    def body(model: Any, backend: Backend) -> str:
        fsdp = FSDP(model, backend, strategy=strategy)
        group = fsdp._runtime.groups[2]
        group.__class__, group.way = Noting, group.phase.name
        model.b.uses_all = False
        step(fsdp)
        return group.way

    assert on_ranks(where, RANKS, lambda: seeded(Parallel), body) == [REDUCED_AND_LEFT] * RANKS


@way
def test_to_leave_what_was_not_entered_is_an_error_of_the_package(strategy: Any, where: Any):
    def body(model: Any, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy)
        step(fsdp)
        runtime = fsdp._runtime
        error = outcome_of(lambda: runtime.post_backward(runtime.groups[2]))
        assert type(error) is DistributedError
        assert error.rank == backend.rank
        assert f"rank {backend.rank}: FSDP: leave of b," in str(error)
        step(fsdp)

    on_ranks(where, RANKS, build, body)
