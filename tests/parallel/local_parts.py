"""Steps of parts of any weight, taken by ranks that synchronize now and then; and one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from ddp_models import mlp, vectors
from local_runs import MakeOptimizer, Values, sgd
from torch import Tensor, nn

from phalanx import Backend, DiLoCo, LocalSGD
from phalanx.parallel.local_sgd.periodic import PeriodicSync

EVERY = 2
EXACT = {"rtol": 1e-12, "atol": 1e-14}
Part = Sequence[float]  # a micro-batch: the weight of each row
Step = Sequence[Part]


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


KINDS: dict[str, Callable[[nn.Module, Backend], PeriodicSync]] = {
    "local": lambda m, b: LocalSGD(m, b, every=EVERY),
    "diloco": lambda m, b: DiLoCo(m, b, every=EVERY, outer=nesterov),
}


class Counts(nn.Module):
    """A layer with a buffer that follows its inputs, as batch norm's statistics do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.sum(0), 0.1)
        return self.inner(x)


def build() -> nn.Module:
    return Counts().double()


def losses(model: nn.Module, rank: int, number: int, step: Step, nan: bool = False) -> list[Tensor]:
    """The sum of the losses of each micro-batch. With `nan`, of a rank without weight it is NaN."""
    found = []
    for at, part in enumerate(step):
        x, y = vectors(len(part), 10_000 * rank + 100 * number + at)
        each = (model(x.double()) - y.double()).pow(2).sum(1)
        weights = torch.tensor(part, dtype=torch.float64)
        found.append((each * weights).sum() * (float("nan") if nan and not sum(part) else 1.0))
    return found


def weight_of(step: Step) -> float:
    return float(sum(map(sum, step)))


def take(
    model: PeriodicSync, optimizer: torch.optim.Optimizer, rank: int, number: int, step: Step
) -> float:
    """A step of a rank; its loss."""
    optimizer.zero_grad()
    with model.step(weight_of(step), micro_batches=len(step)) as joined:
        for loss in losses(model, rank, number, step, nan=not weight_of(step)):
            joined.backward(loss)
    optimizer.step()
    return joined.loss


class OneProcess:
    """Every rank's model in one process, and syncs written out: with the weights seen since."""

    def __init__(self, kind: str, ranks: int, inner: MakeOptimizer = sgd) -> None:
        self.models = [build() for _ in range(ranks)]
        self.optimizers = [inner(list(model.parameters())) for model in self.models]
        self.shared = deepcopy(self.models[0])
        self.outer = nesterov(self.shared.parameters()) if kind == "diloco" else None
        self.seen = [0.0] * ranks

    def take(self, rank: int, number: int, step: Step, *, counts: float | None = None) -> float:
        model, weight = self.models[rank], weight_of(step)
        self.optimizers[rank].zero_grad()
        total = torch.stack([*losses(model, rank, number, step), torch.zeros(())]).sum()
        if weight:
            (total / weight).backward()
        else:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        self.optimizers[rank].step()
        self.seen[rank] += weight if counts is None else counts
        return float(total.detach() / weight) if weight else float("nan")

    @torch.no_grad()
    def sync(self) -> None:
        total = sum(self.seen)
        everyone = [model.state_dict() for model in self.models]
        for name, value in self.shared.state_dict().items():
            mean = sum(
                one[name] * (seen / total) for one, seen in zip(everyone, self.seen, strict=True)
            )
            parameter = dict(self.shared.named_parameters()).get(name)
            if parameter is None or self.outer is None:
                value.copy_(mean)
            else:
                parameter.grad = parameter - mean
        if self.outer is not None:
            self.outer.step()
        for model in self.models:
            model.load_state_dict(self.shared.state_dict())
        self.seen = [0.0] * len(self.models)


def assert_near(found: Values, expected: Values) -> None:
    """The norm of the difference is at most 1e-12 of the norm, for each tensor."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-12 * value.norm(), name
