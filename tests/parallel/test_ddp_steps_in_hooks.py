"""Optimizers that step in hooks of a backward pass, before DDP has averaged: refused in words."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from ddp_models import loss_of, mlp, vectors
from ddp_runs import assert_close, assert_same_bits, outcome_of, values
from torch import Tensor, nn

from phalanx import DDP, Backend, MisuseError, simulate

RANKS = 2
Stop = Callable[[], None]


def step_in_hooks_of_parameters(module: nn.Module) -> Stop:
    """Each parameter's optimizer steps when its gradient is accumulated."""
    parameters = list(module.parameters())
    own = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in parameters}

    def step(parameter: Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in parameters]
    return lambda: [handle.remove() for handle in handles] and None


def step_in_hooks_of_layers(module: nn.Module) -> Stop:
    """One optimizer steps for the parameters of each layer when the pass has come through it."""
    layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
    own = {layer: torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers}
    register = nn.Module.register_full_backward_hook
    handles = [register(layer, lambda m, *_: own[m].step()) for layer in layers]
    return lambda: [handle.remove() for handle in handles] and None


@pytest.mark.checkered
@pytest.mark.parametrize("sync", [True, False], ids=["averages", "no_sync"])
@pytest.mark.parametrize("first", [True, False], ids=["before wrapping", "after"])
@pytest.mark.parametrize("hook", [step_in_hooks_of_parameters, step_in_hooks_of_layers])
def test_they_are_refused_on_every_rank_and_nothing_is_written(hook, first: bool, sync: bool):
    def run(backend: Backend):
        module = mlp()
        stop = hook(module) if first else None
        ddp = DDP(module, backend)
        stop = stop or hook(module)
        before = values(ddp)

        def step_of(number: int) -> None:
            inputs, targets = vectors(4, seed=1000 * backend.rank + number)
            loss_of(ddp(inputs), targets).backward()

        with nullcontext() if sync else ddp.no_sync():
            error = outcome_of(lambda: step_of(0))
        stop()
        assert isinstance(error, MisuseError)
        assert_same_bits([before, values(ddp)])
        # The group goes on.
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        optimizer.zero_grad()
        step_of(1)
        optimizer.step()
        return str(error), values(ddp)

    texts, found = zip(*simulate(run, RANKS), strict=True)
    for rank, text in enumerate(texts):
        assert text.startswith(f"rank {rank}: DDP: an optimizer steps on ")
        assert "Step after backward()" in text
    assert_same_bits(list(found))

    alone = mlp()
    batches = [vectors(4, seed=1000 * rank + 1) for rank in range(RANKS)]
    sum(loss_of(alone(x), y) / RANKS for x, y in batches).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert_close(found[0], values(alone), rtol=1e-4, atol=1e-6)


def test_other_models_and_later_passes_may_step_there():
    """A plain model's in hooks; DDP's, in the pass of another model, when its own is over."""

    def run(backend: Backend):
        plain, ddp = mlp(), DDP(mlp(), backend)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        inputs, targets = vectors(4, seed=backend.rank)
        step_in_hooks_of_parameters(plain)
        loss_of(ddp(inputs), targets).backward()
        out = plain(inputs)
        out.register_hook(lambda _: optimizer.step())
        loss_of(out, targets).backward()
        return values(ddp)

    found = simulate(run, RANKS)
    assert_same_bits(list(found))
    assert not torch.equal(next(iter(found[0].values())), next(iter(values(mlp()).values())))
