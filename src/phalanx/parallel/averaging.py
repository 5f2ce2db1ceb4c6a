"""How buckets are averaged: by all-reduce, or compressed.

begin    a bucket is full: do what can be done while backward goes on
finish   the pass is over: wait for all that has begun; buckets hold averages then
settle   it is known whether the step counts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from phalanx.aggregation.exchange import Exchange, bytes_of
from phalanx.backends.base import Backend
from phalanx.collectives import PendingCollective, ReduceOp
from phalanx.collectives.run import start
from phalanx.collectives.task import in_place
from phalanx.compression import Compressor
from phalanx.compression.bundle import Bundle
from phalanx.compression.exchange import Mean, Part
from phalanx.compression.feedback import FORGET, Feedback
from phalanx.compression.finite import is_finite


class Gradients(Protocol):
    """Of some parameters, flat: what is averaged together."""

    parameters: list[nn.Parameter]
    flat: Tensor


class Averaging(Protocol):
    """Averages gradients over the ranks, in place."""

    @property
    def bytes_sent(self) -> int:
        """By this rank so far, as rings and direct messages send them."""

    def begin(self, gradients: Gradients, label: str) -> Any:
        """Begin to average with those of that label on the other ranks; a handle for `finish`."""

    def finish(self, begun: Sequence[Any]) -> None:
        """Wait for all of them. Raises the first error, after all ended."""

    def settle(self, averaged: Sequence[Gradients], *, skipped: bool) -> None:
        """The pass is over: these are its averages, and its step counts unless it is skipped."""


class AllReduced:
    """By one all-reduce each, in the background."""

    def __init__(self, backend: Backend) -> None:
        self.bytes_sent = 0
        self._backend = backend

    def begin(self, gradients: Gradients, label: str) -> PendingCollective[Tensor]:
        """Start the all-reduce."""
        self.bytes_sent += bytes_of(Mean(gradients.flat), self._backend.world_size)
        return start(
            in_place("all_reduce", gradients.flat, op=ReduceOp.MEAN),
            self._backend,
            background=self._backend.spares_a_processor,
            label=label,
        )

    def finish(self, begun: Sequence[PendingCollective[Tensor]]) -> None:
        """Wait for all of them."""
        problem: BaseException | None = None
        for pending in begun:
            try:
                pending.wait()
            except Exception as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def settle(self, averaged: Sequence[Gradients], *, skipped: bool) -> None:
        """Nothing is remembered."""


class Compressed:
    """By a compressor, which knows each gradient by its parameter's name.

    What it computes before its first message it does when the bucket is full, inside of backward;
    the rest at the end, all buckets' messages of a round together.

    feedback   is told what the compressor leaves out, unless that keeps it by itself
    """

    def __init__(
        self,
        compressor: Compressor,
        names: Mapping[nn.Parameter, str],
        backend: Backend,
        *,
        feedback: Feedback = FORGET,
    ) -> None:
        self.compressor = compressor
        self._feedback = feedback
        self._names = names
        self._exchange = Exchange(backend)
        self._part = Part(backend.rank, backend.world_size)

    @property
    def bytes_sent(self) -> int:
        """By this rank so far."""
        return self._exchange.bytes_sent

    @torch.no_grad()
    def begin(self, gradients: Gradients, label: str) -> Any:
        """Compress, and start the first exchange."""
        bundle = Bundle(
            gradients.flat,
            [self._names[parameter] for parameter in gradients.parameters],
            [parameter.shape for parameter in gradients.parameters],
        )
        rounds = self.compressor.average_(bundle, self._part, self._feedback)
        return self._exchange.begin(rounds, label)

    @torch.no_grad()
    def finish(self, begun: Sequence[Any]) -> None:
        """Carry out all that is left."""
        try:
            self._exchange.finish(begun)
        except BaseException:
            self.compressor.rollback()
            raise

    def settle(self, averaged: Sequence[Gradients], *, skipped: bool) -> None:
        """A step that is skipped leaves the compressor's state as it was. So does one whose
        averages are not finite, on every rank alike: a gradient scaler skips it.
        """
        if skipped or not all(is_finite(gradients.flat) for gradients in averaged):
            self.compressor.rollback()
        else:
            self.compressor.commit()
