"""A training step, data-parallel: 6 layers of 1024 x 1024, 32 samples on each rank.

    ours     phalanx.DDP on one of Phalanx's backends
    theirs   torch's DistributedDataParallel over Gloo
    alone    the same step without any communication, on all ranks at the same time

A stretch of steps begins with the same weights each time, and what the weights are after it is
compared with what one process gets that has all ranks' samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.bench.exchange import Exchange
from phalanx.bench.operations import Operation
from phalanx.bench.peers.peer import Binder, Peer

__all__ = ["Alone", "TrainingStep", "make_model"]

WIDTH, DEPTH, BATCH = 1024, 6, 32
_RATE = 0.05


def make_model() -> nn.Module:
    """The same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(DEPTH):
            layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


def _batch(rank: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(rank + 1)
    shape = (2, BATCH, WIDTH)
    inputs, targets = torch.randn(shape, generator=made)
    return inputs, targets


class _Steps:
    """A model with its optimizer and its batch, and the weights that it begins with."""

    def __init__(self, model: Any, ranks: range) -> None:
        self.model = model
        self.plain: nn.Module = getattr(model, "module", model)
        batches = [_batch(rank) for rank in ranks]
        self.inputs = torch.cat([inputs for inputs, _ in batches])
        self.targets = torch.cat([targets for _, targets in batches])
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=_RATE)
        self.first = [p.detach().clone() for p in self.plain.parameters()]

    def begin_again(self) -> None:
        """Forget all steps."""
        with torch.no_grad():
            for parameter, value in zip(self.plain.parameters(), self.first, strict=True):
                parameter.copy_(value)

    def step(self) -> None:
        """Forward, backward, and the optimizer's step."""
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(self.inputs), self.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


class TrainingStep(Exchange):
    """One step a call. `ranks` are those whose samples count for the gradients of this model."""

    def __init__(self, operation: Operation, model: Any, *, rank: int, ranks: range) -> None:
        self._steps = _Steps(model, range(rank, rank + 1))
        super().__init__(operation, None, None, self._steps.step)
        self._ranks = ranks
        self._expected: dict[int, list[Tensor]] = {}

    def load(self) -> None:
        """Begin again."""
        self._steps.begin_again()

    def count_wrong(self, calls: int) -> int:
        """How many parameters are not what one process gets, but for rounding."""
        if calls not in self._expected:
            steps = _Steps(make_model(), self._ranks)
            for _ in range(calls):
                steps.step()
            self._expected[calls] = [p.detach() for p in steps.plain.parameters()]
        return sum(
            int((~torch.isclose(own.detach(), expected, rtol=1e-3, atol=1e-6)).sum())
            for own, expected in zip(
                self._steps.plain.parameters(), self._expected[calls], strict=True
            )
        )


class Alone(Peer):
    """The step of one rank, as if there were no others."""

    @property
    def binders(self) -> Mapping[str, Binder]:
        """One operation."""
        return {"ddp": self._step}

    def _step(self, operation: Operation, *_: object) -> Exchange:
        ranks = range(self.rank, self.rank + 1)
        return TrainingStep(operation, make_model(), rank=self.rank, ranks=ranks)
