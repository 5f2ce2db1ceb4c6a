"""The states of a parameter group: the table, the way around it, and who may use it when."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from ddp_models import noise, seeded
from ddp_runs import assert_close, outcome_of
from fsdp_runs import (
    COMMON,
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

from phalanx import FSDP, Backend, MisuseError
from phalanx.fsdp import unsharded
from phalanx.fsdp.unsharded import TRANSITIONS, USABLE

RANKS = 2
STATES = ("SHARDED", "UNSHARDING", "UNSHARDED", "SUMMONED")
EVENTS = ("unshard", "wait", "reshard", "summon", "restore")
WAYS = [
    (FULL_SHARD, COMMON),
    (FULL_SHARD, MESSAGES),
    (SHARD_GRAD_OP, MESSAGES),
    (NO_SHARD, COMMON),
]
way = every_way(WAYS)


class Noted(torch.autograd.Function):
    """Nothing but a note in each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer) -> Tensor:
        ctx.layer = layer
        layer.note("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.layer.note("backward")
        return grad, None


class Layer(nn.Module):
    """Says when it computes; keeps the parameter that it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.note: Any = lambda direction: None

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["kept"] = self.linear.weight
        return Noted.apply(torch.tanh(self.linear(x)), self)


class Chain(nn.Module):
    """Three layers, of which the last is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Layer(), Layer(), Layer()
        self.stops_early = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        return x if self.stops_early else self.c(x)


def build() -> nn.Module:
    return seeded(Chain)


def states(fsdp: FSDP) -> list[str]:
    """Of the groups a, b and c."""
    return [group.state.now for group in fsdp._runtime.groups[1:]]


def uses(layer: Layer) -> BaseException | None:
    return outcome_of(lambda: layer.kept + 1)


def test_the_table_is_what_the_transitions_say():
    rows = [("state", *EVENTS, "use")]
    for state in STATES:
        after = [TRANSITIONS.get((state, event), ".") for event in EVENTS]
        rows.append((state, *after, "allowed" if state in USABLE else "MisuseError"))
    widths = [max(map(len, column)) + 3 for column in zip(*rows, strict=True)]
    drawn = [
        "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    assert "\n".join(f"    {line}" for line in drawn) in unsharded.__doc__


def test_the_picture_has_an_arrow_for_each_transition():
    picture = unsharded.__doc__.split("\n\n")[2]
    words = Counter(picture.replace("(", " ").split())
    for event, arrows in Counter(event for _, event in TRANSITIONS).items():
        assert words[event] == arrows
    assert all(words[state] == 1 for state in STATES)


FORWARD_AND_BACKWARD = """
    forward a     UNSHARDED    UNSHARDING   SHARDED
    forward b     SHARDED      UNSHARDED    UNSHARDING
    forward c     SHARDED      SHARDED      UNSHARDED
    between       SHARDED      SHARDED      SHARDED
    backward c    SHARDED      UNSHARDING   UNSHARDED
    backward b    UNSHARDING   UNSHARDED    SHARDED
    backward a    UNSHARDED    SHARDED      SHARDED
    after         SHARDED      SHARDED      SHARDED
"""


@way
def test_a_step_goes_around_the_states_one_group_after_the_other(strategy: Any, where: Any):
    def body(model: Any, backend: Backend) -> str:
        fsdp = FSDP(model, backend, strategy=strategy)
        lines: list[str] = []

        def note(what: str) -> None:
            lines.append("    " + f"{what:14}" + "".join(f"{s:13}" for s in states(fsdp)).rstrip())

        for name in "abc":
            getattr(model, name).note = lambda way, name=name: note(f"{way} {name}")
        for _ in range(2):
            lines.clear()
            loss = fsdp(noise(4, 6, seed=backend.rank)).sum()
            note("between")
            loss.backward()
            note("after")
        return "\n".join(["", *lines, ""])

    assert on_ranks(where, RANKS, build, body) == [FORWARD_AND_BACKWARD] * RANKS


@way
def test_parameters_may_be_used_in_two_of_the_states(strategy: Any, where: Any):
    def body(model: Any, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy)
        loss = fsdp(noise(4, 6)).sum()
        assert states(fsdp)[0] == "SHARDED"
        assert isinstance(uses(model.a), MisuseError)
        if not strategy.keeps_whole:
            fsdp.prefetch_forward_params()
            assert states(fsdp)[0] == "UNSHARDING"
            assert isinstance(uses(model.a), MisuseError)
        with fsdp.summon_full_params():
            assert states(fsdp) == ["SUMMONED"] * 3
            assert uses(model.a) is None
            with fsdp.writing():
                pass
            assert uses(model.a) is None
        loss = fsdp(noise(4, 6)).sum()
        model.a.note = lambda way: found.append((states(fsdp)[0], uses(model.a)))
        found: list[Any] = []
        loss.backward()
        assert found == [("UNSHARDED", None)]
        assert isinstance(uses(model.a), MisuseError)

    on_ranks(where, RANKS, build, body)


@way
def test_a_backward_pass_while_summoned_leaves_the_copies_there(strategy: Any, where: Any):
    def body(model: Any, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        loss = fsdp(noise(4, 6, seed=backend.rank)).sum()
        with fsdp.summon_full_params(writeback=False):
            loss.backward()
            assert states(fsdp) == ["SUMMONED"] * 3
            assert uses(model.a) is None
        assert states(fsdp) == ["SHARDED"] * 3
        return gradient_pieces(fsdp)

    losses = [lambda m, r=rank: m(noise(4, 6, seed=r)).sum() for rank in range(RANKS)]
    assert_close(joined(on_ranks(where, RANKS, build, body)), alone(build, losses))


@way
def test_who_writes_ends_the_use_of_what_a_graph_of_gradients_would_read(strategy: Any, where: Any):
    def body(model: Any, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy)
        x = noise(4, 6).requires_grad_()
        torch.autograd.grad(fsdp(x).sum(), x, create_graph=True)
        assert states(fsdp)[0] == "UNSHARDED"
        with fsdp.writing():
            assert states(fsdp) == ["SHARDED"] * 3
            assert isinstance(uses(model.a), MisuseError)

    on_ranks(where, RANKS, build, body)


@way
def test_what_was_unsharded_ahead_and_not_used_is_unsharded_anew_after_a_write(
    strategy: Any, where: Any
):
    def double(fsdp: FSDP) -> None:
        with fsdp.writing(), torch.no_grad():
            for parameter in fsdp.parameters():
                parameter.mul_(2)

    def body(model: Any, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy)
        fsdp(noise(4, 6))
        double(fsdp)
        model.stops_early = True
        fsdp(noise(4, 6))
        model.stops_early = False
        double(fsdp)
        found = fsdp(noise(4, 6))
        plain = build()
        plain.load_state_dict(fsdp.full_state_dict())
        torch.testing.assert_close(found, plain(noise(4, 6)))

    on_ranks(where, 3, build, body)
