"""One step of data-parallel training, of three functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from phalanx.aggregation import GradientAggregator
from phalanx.collectives.check_same import difference
from phalanx.errors import DesyncError

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


# ------------------------------------------------------------------------------
# One pass over the data, with a progress bar.

Batch = TypeVar("Batch")


def train_epoch(
    batches: Iterable[Batch],
    compute_gradients: Callable[[Batch], tuple[Any, Sequence[Tensor]]],
    apply_gradients: Callable[[list[Tensor]], object],
    aggregator: GradientAggregator,
    *,
    description: str = "epoch",
    console: Console | None = None,
) -> float:
    """A training step for each of this rank's batches; the mean of this rank's losses.

    batches             as many on every rank; if it has a length, the bar has an end
    compute_gradients   returns the loss (a number, or a tensor of one) and the gradients of a batch
    apply_gradients     is given their averages
    description         stands before the bar
    console             where the bar is shown, by rank 0: standard error by default, and nothing
                        unless that is a terminal

    Blocks as `distributed_train_step` does, and raises what that does. When this rank's batches are
    over, a message of 16 bytes asks whether the others' are: if not, `DesyncError` on every rank
    says who had how many. Without a batch the mean is NaN. TypeError, before anything is sent, for
    a loss that is no number.
    """
    first = aggregator.backend is None or aggregator.backend.rank == 0
    console = console or Console(stderr=True)
    total, count = 0.0, 0
    with Progress(
        TextColumn("{task.description}", markup=False),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=not (first and console.is_terminal),
    ) as bar:
        steps = len(batches) if isinstance(batches, Sized) else None
        task = bar.add_task(description, total=steps, loss="-")
        for batch in batches:
            loss = distributed_train_step(
                lambda batch=batch: _checked(compute_gradients(batch)),  # type: ignore[misc]
                apply_gradients,
                aggregator,
            )
            total, count = total + _number(loss), count + 1
            bar.update(task, advance=1, loss=f"{total / count:.4g}")
    _check_all_over(count, aggregator)
    return total / count if count else math.nan


def _checked(computed: Any) -> Any:
    """What `compute_gradients` has returned; TypeError if its loss is no number."""
    if isinstance(computed, (tuple, list)) and computed:
        loss = computed[0]
        one = loss.numel() == 1 if isinstance(loss, Tensor) else hasattr(loss, "__float__")
        if not one:
            kind = f"{list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(
                "train_epoch shows and adds up losses: compute_gradients has to return one that is "
                f"a number, or a tensor of one, not of {kind}"
            )
    return computed


def _number(loss: Any) -> float:
    return float(loss.detach() if isinstance(loss, Tensor) else loss)


def _check_all_over(count: int, aggregator: GradientAggregator) -> None:
    """Raise `DesyncError` unless every rank has come to the end of its batches, after as many.

    A rank that goes on is in its aggregator, which compares what the ranks are about, too.
    """
    backend = aggregator.backend
    if backend is None:
        return
    mine = f"come to the end of its epoch, after {count} batches"
    differ = difference([mine], backend, end="more batches")
    if differ is not None:
        raise DesyncError(
            f"rank {backend.rank}: train_epoch: the ranks have different numbers of batches: "
            f"{differ.text}. Give every rank as many: leave out the last ones, or repeat some",
            rank=backend.rank,
            peer=differ.odd[0],
            op="train_epoch",
        )
