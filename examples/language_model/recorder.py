"""Measures each step: loss, speed, and the share of time that goes into waiting for others."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

import phalanx as px
from language_model.history import History, TrainPoint


class Recorder:
    """Notes steps on this rank; now and then `collect` averages them over all ranks.

    A step is what lies between `begin` and `end`. So held-out losses and checkpoints do not count
    as training, and measuring costs one message for many steps.
    """

    def __init__(self, history: History, backend: px.Backend, *, tokens_per_step: int) -> None:
        self._history = history
        self._backend = backend
        self._tokens = tokens_per_step
        self._rates: list[float] = []
        self._rows: list[tuple[float, float, float]] = []

    def begin(self) -> None:
        """A step begins."""
        self._began = perf_counter()
        self._waited = self._backend.seconds_waiting

    def end(self, loss: Tensor, learning_rate: float) -> None:
        """It has ended, with this loss on this rank."""
        waited = self._backend.seconds_waiting - self._waited
        self._rows.append((loss.item(), perf_counter() - self._began, waited))
        self._rates.append(learning_rate)

    def collect(self) -> None:
        """Add what was noted since the last time to the history: the mean over the ranks."""
        rows = torch.tensor(self._rows, dtype=torch.float64)
        px.all_reduce_(rows, self._backend, px.ReduceOp.MEAN)
        for (loss, seconds, waited), rate in zip(rows.tolist(), self._rates, strict=True):
            step = len(self._history.steps) + 1
            point = TrainPoint(step, loss, rate, self._tokens / seconds, waited / seconds)
            self._history.steps.append(point)
            self._history.seconds += seconds
        self._rows.clear()
        self._rates.clear()
