"""Training with a `ShardedOptimizer`, and the same with the plain optimizers that it is made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ddp_models import loss_of, mlp, vectors
from ddp_runs import rows_of
from forms import sizes
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from phalanx import Backend, ShardedOptimizer, clip_grad_norm_

Make = Callable[..., Optimizer]
FACTORIES: dict[str, Make] = {
    "SGD": partial(SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(AdamW, lr=0.01),
    "Adafactor": partial(Adafactor, lr=0.05),
    "Muon": partial(Muon, lr=0.02),
}
STEPS = sizes(5, 20)


def optimizers(model: nn.Module, factory: Make, *, sharded: bool) -> list[Optimizer]:
    """One optimizer for all parameters; of Muon's, which takes matrices, another for the rest."""
    whole = dict(mlp().named_parameters())
    named = dict(model.named_parameters())
    groups = {factory: list(named.values())}
    if factory is FACTORIES["Muon"]:
        groups = {
            factory: [p for name, p in named.items() if whole[name].ndim == 2],
            FACTORIES["AdamW"]: [p for name, p in named.items() if whole[name].ndim != 2],
        }
    if sharded:
        return [ShardedOptimizer(make, model, groups=group) for make, group in groups.items()]
    return [make(group) for make, group in groups.items()]


def train(
    model: nn.Module,
    steppers: list[Optimizer],
    backend: Backend | None = None,
    *,
    steps: int = STEPS,
    first: int = 0,
    clip: float = 0.0,
) -> None:
    """Train on this rank's rows of the batches, or on all."""
    for number in range(first, first + steps):
        inputs, targets = vectors(60, seed=number)
        if backend is not None:
            inputs, targets = rows_of(inputs, backend), rows_of(targets, backend)
        for optimizer in steppers:
            optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        if clip:
            clip_grad_norm_(model, clip)
        for optimizer in steppers:
            optimizer.step()


def whole_values(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters, by name; of an FSDP, whole ones."""
    if hasattr(model, "full_state_dict"):
        return model.full_state_dict()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def plainly(factory: Make, *, steps: int = STEPS, clip: float = 0.0) -> dict[str, Tensor]:
    """The parameters of one process after these steps."""
    model = mlp()
    train(model, optimizers(model, factory, sharded=False), steps=steps, clip=clip)
    return whole_values(model)
