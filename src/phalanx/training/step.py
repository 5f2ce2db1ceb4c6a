"""One step of data-parallel training, of three functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
    they are, with a note (which Python shows from 3.11 on) that says which step it was, and what of
    it. TypeError, before anything is sent, if `compute_gradients` returns something else, or the
    aggregator is none.
    """
    if not isinstance(aggregator, GradientAggregator):
        raise TypeError(
            "distributed_train_step takes a GradientAggregator, such as "
            f"AllReduceAggregator(backend), not {aggregator!r}"
        )
    number = aggregator.steps if step is None else step
    doing = "computing gradients"
    try:
        loss, gradients = _pair(compute_gradients())
        doing = "aggregating gradients"
        averages = aggregator.aggregate(gradients)
        doing = "applying gradients"
        apply_gradients(averages)
    except Exception as error:
        _note(error, f"in training step {number}, {doing}")
        raise
    aggregator.steps += 1
    return loss


def _pair(computed: tuple[Loss, Sequence[Tensor]]) -> tuple[Loss, Sequence[Tensor]]:
    """What `compute_gradients` has returned, if it is a loss and gradients."""
    found: Any = computed
    if not isinstance(found, (tuple, list)):
        has = f"a {type(found).__name__}"
    elif len(found) != 2:
        has = f"a {type(found).__name__} of {len(found)}"
    elif found[1] is None or isinstance(found[1], (Tensor, str, dict)):
        has = f"gradients that are a {type(found[1]).__name__}"
    else:
        return computed
    raise TypeError(
        "compute_gradients has to return two things, the loss and a list of gradients: "
        f"`return loss, gradients`; it has returned {has}"
    )


def _note(error: Exception, note: str) -> None:
    if hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(note)
    else:
        notes = [*getattr(error, "__notes__", []), note]  # for who looks
        error.__dict__["__notes__"] = notes
