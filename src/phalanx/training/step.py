"""One step of data-parallel training, of three functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from phalanx.aggregation import GradientAggregator

Loss = TypeVar("Loss")


def distributed_train_step(
    compute_gradients: Callable[[], tuple[Loss, Sequence[Tensor]]],
    apply_gradients: Callable[[list[Tensor]], object],
    aggregator: GradientAggregator,
    *,
    step: int | None = None,
) -> Loss:
    """Compute gradients, average them over the ranks, apply the averages; the loss of this rank.

    compute_gradients   returns the loss and the gradients of this rank's batch
    apply_gradients     is given their averages, in the same order
    step                its number, in errors; by default how many the aggregator was used for

    Every rank calls it as often. Blocks as the aggregator does. Errors of all three pass through as
    they are, with a note (from Python 3.11 on) that says which step it was, and what of it.
    """
    number = aggregator.steps if step is None else step
    doing = "computing gradients"
    try:
        loss, gradients = compute_gradients()
        doing = "aggregating gradients"
        averages = aggregator.aggregate(gradients)
        doing = "applying gradients"
        apply_gradients(averages)
    except Exception as error:
        if hasattr(error, "add_note"):  # since Python 3.11
            error.add_note(f"in training step {number}, {doing}")
        raise
    aggregator.steps += 1
    return loss
