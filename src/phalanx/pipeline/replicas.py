"""A step of a joined batch, of which replicas, pipelines with the same layers, have a part each.

    pipeline 0    weight 30    losses x 3 / 42    gradients   \\
    pipeline 1    weight 12    losses x 3 / 42    gradients    mean: those of the joined batch
    pipeline 2    weight  0    no batch           zeros       /

FSDP averages in each micro-batch, and a rank without a batch does as its leader tells. DDP averages
once, after the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from phalanx.core.backend import Backend
from phalanx.parallel.ddp import DDP
from phalanx.parallel.joined_step import JoinedStep, checked_weight
from phalanx.parallel.uneven import Join, JoinPhase
from phalanx.parallel.wrapper import Wrapper
from phalanx.pipeline.handshake import Begun


class ReplicaStep(JoinedStep):
    """One step of this rank of a pipeline, and of its replicas, which have the same layers.

    begin     agrees with the other ranks of the pipeline: `begun`
    scaled    this rank's sum of scaled losses
    """

    begun: Begun
    scaled = 0.0

    def __init__(self, pipeline: Wrapper, replicas: Backend, begin: Callable[[], Begun]) -> None:
        super().__init__(pipeline, 0.0, 0)
        self._backend = replicas
        self._begin = begin

    def _checked(self, *_: Any) -> tuple[float, int]:
        self.begun = self._begin()
        weight = checked_weight(self.begun.weight, "train_step() with replicas=")
        return weight, int(weight > 0)

    def begin(self, agreed: Join) -> None:
        """Begin, with what the replicas have agreed on."""
        super().begin(agreed)
        self.begun = self.begun._replace(scale=self._backend.world_size / self.weight)
        self._in_backward = True  # in all of them
        for each in self._all:
            if isinstance(each, DDP):
                each.answer(JoinPhase.FORWARD)  # the leader's buffers

    def _synchronize(self) -> None:
        self._short = self._short if self._in_rounds else []  # replicas that have to be told
        for each in self._all:
            each.passes.synchronize = each.in_rounds

    def _finish(self) -> None:
        self._done = self._counts[self._backend.rank]
        self._losses = [torch.tensor(self.scaled / self.begun.scale, dtype=torch.float64)]
        super()._finish()
        self._short = []  # all replicas do the rest by themselves
        for each in self._all:
            if isinstance(each, DDP) and each.passes.accumulated:
                each.sync_gradients()
            elif isinstance(each, DDP):
                each.answer(JoinPhase.CATCHING_UP)
