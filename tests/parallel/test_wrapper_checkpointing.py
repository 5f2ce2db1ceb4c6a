"""Activation checkpointing: parts of the forward pass run again inside the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ddp_models import noise, seeded
from ddp_runs import Gradients, assert_close, gradients, naive_gradients, outcome_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from wrappings import (
    DDPS,
    FSDPS,
    Wrapping,
    assert_gradients,
    every_ddp,
    every_fsdp,
    every_wrapping,
    keeping,
)

from phalanx import Backend, MisuseError

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


class Block(nn.Module):
    """`inside`: it computes its own layers again, which are no groups."""

    def __init__(self, inside: bool | None = None) -> None:
        super().__init__()
        self.inside = inside
        self.one = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.two = nn.Linear(8, 6)

    def compute(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.norm(self.one(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.inside is None:
            return x + self.compute(x)
        return x + checkpoint(self.compute, x, use_reentrant=self.inside)


class Inside(nn.Module):
    """Checkpoints inside groups."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(reentrant) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Around(nn.Module):
    """A checkpoint around each group."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Several(Around):
    """One checkpoint around several groups, and one inside the other."""

    def pair(self, x: Tensor) -> Tensor:
        return self.blocks[1](checkpoint(self.blocks[0], x, use_reentrant=self.reentrant))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.pair, self.first(x), use_reentrant=self.reentrant)
        return self.blocks[2](self.blocks[0](x))


class InSequence(Around):
    def forward(self, x: Tensor) -> Tensor:
        layers = nn.Sequential(*self.blocks)
        return checkpoint_sequential(layers, 2, self.first(x), use_reentrant=self.reentrant)


class Recurrent(nn.Module):
    """The same layer in two checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layer = nn.Linear(6, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=self.reentrant)
        return self.last(x)


class InList(list):
    """A container that nobody looks into."""


class GivesList(Around):
    """Its last layer is in no checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> InList:
        return InList([self.last(super().forward(x))])


def of(kind: Callable[[bool], nn.Module], reentrant: bool) -> Callable[[], nn.Module]:
    return lambda: seeded(lambda: kind(reentrant))


def backward(model: Any, rank: int, number: int = 0) -> None:
    """The inputs need gradients, or a reentrant checkpoint has none to give."""
    model(noise(4, 6, seed=10 * number + rank).requires_grad_()).pow(2).sum().backward()


def assert_as_without_checkpoints(
    found: Gradients, ranks: int, kind: Callable[[bool], nn.Module], one: Callable[..., None]
) -> None:
    """Checkpoints that are not reentrant change no gradient of a naive DDP, which has no hooks."""
    assert_gradients(found, ranks, of(kind, False), one)


KINDS = (Inside, Around, Several, InSequence)
LAYERS = [wrap._replace(options={**wrap.options, "unit": nn.Linear}) for wrap in FSDPS[1:3]]
CASES = [
    *((wrap, kind) for wrap in [*FSDPS, *LAYERS] for kind in KINDS),
    # Reentrant checkpoints give DDP a layer's gradient in parts: see `Recurrent` below.
    *((wrap, kind) for wrap in DDPS for kind in KINDS if kind is not Several),
]


@pytest.mark.checkered
@REENTRANT
@pytest.mark.parametrize(("wrap", "kind"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_gradients_are_those_without_checkpoints(
    wrap: Wrapping, kind: Callable[[bool], nn.Module], reentrant: bool
):
    """In the second pass, in which DDP has buckets in another order."""
    passes = [partial(backward, number=number) for number in range(2)]
    _, found = wrap.gradients(2, of(kind, reentrant), *passes)
    assert_as_without_checkpoints(found, 2, kind, passes[-1])


@pytest.mark.checkered
@REENTRANT
@every_wrapping
def test_accumulation_works_with_checkpoints(wrap: Wrapping, reentrant: bool):
    def two(model: Any, rank: int) -> None:
        with keeping(model):
            backward(model, rank)
        backward(model, rank, 1)

    *_, found = wrap.gradients(2, of(Around, reentrant), two, two)
    assert_as_without_checkpoints(found, 2, Around, two)


@REENTRANT
@every_ddp
def test_a_layer_in_two_checkpoints_is_averaged_whole_or_refused(wrap: Wrapping, reentrant: bool):
    """Reentrant checkpoints deliver its gradient in two parts, the first of which is not final."""

    def body(model: nn.Module, backend: Backend) -> Gradients | BaseException:
        ddp = wrap(model, backend)

        def train() -> None:
            backend.barrier()
            for number in range(3):
                ddp.zero_grad()
                backward(ddp, backend.rank, number)

        return outcome_of(train) or gradients(ddp)

    wanted = naive_gradients(of(Recurrent, False), 2, partial(backward, number=2))
    for found in wrap.on_ranks(2, of(Recurrent, reentrant), body):
        if isinstance(found, BaseException):
            assert reentrant
            assert isinstance(found, MisuseError)
            assert "layer." in str(found)
        else:
            assert_close(found, wanted)


@pytest.mark.checkered
@REENTRANT
@every_wrapping
@pytest.mark.parametrize("inside", [False, True])
def test_the_whole_wrapper_may_be_inside_a_checkpoint(
    inside: bool, wrap: Wrapping, reentrant: bool
):
    """Also if it has checkpoints of its own, which are not reentrant."""
    build = of(Around, False) if inside else lambda: seeded(Block)

    def whole(model: nn.Module, rank: int, number: int) -> None:
        x = noise(4, 6, seed=10 * number + rank).requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).pow(2).sum().backward()

    passes = [partial(whole, number=number) for number in range(3)]
    *_, found = wrap.gradients(2, build, *passes)
    assert_gradients(found, 2, build, passes[-1])


@pytest.mark.checkered
@REENTRANT
@every_ddp
def test_outputs_in_a_container_of_the_user_s_own_work_with_checkpoints(
    wrap: Wrapping, reentrant: bool
):
    def one(model: nn.Module, rank: int, number: int) -> None:
        x = noise(4, 6, seed=10 * number + rank).requires_grad_()
        model(x)[0].pow(2).sum().backward()

    passes = [partial(one, number=number) for number in range(2)]
    *_, found = wrap.gradients(2, of(GivesList, reentrant), *passes)
    assert_as_without_checkpoints(found, 2, GivesList, passes[-1])


@pytest.mark.checkered
@REENTRANT
@every_fsdp
def test_an_error_while_it_is_computed_again_reaches_the_caller_and_training_goes_on(
    wrap: Wrapping, reentrant: bool
):
    def fail(*_: Any) -> None:
        raise ArithmeticError("a bad batch")

    def fails(model: Any, rank: int) -> None:
        loss = model(noise(4, 6, seed=rank).requires_grad_()).pow(2).sum()
        handle = model.module.blocks[1].norm.register_forward_hook(fail)
        with pytest.raises(ArithmeticError):
            loss.backward()
        handle.remove()

    _, found = wrap.gradients(2, of(Around, reentrant), fails, backward)
    assert_as_without_checkpoints(found, 2, Around, backward)
