"""A step of data-parallel training, made of three functions; and an epoch of such steps."""

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
from phalanx.parallel.guards import refuse
from phalanx.training.mean import mean

Loss = TypeVar("Loss")


def distributed_train_step(
    compute_gradients: Callable[[], tuple[Loss, Sequence[Tensor]]],
    apply_gradients: Callable[[list[Tensor]], object],
    aggregator: GradientAggregator,
    *,
    step: int | None = None,
    weight: float | None = None,
) -> Loss:
    """Compute gradients, average them over the ranks, apply the averages; return this rank's loss.

    compute_gradients   returns the loss and the gradients of this rank's batch
    apply_gradients     is given their averages, in the same order
    step                its number, in errors; by default that of the aggregator's steps so far
    weight              of this rank's batch, of the sum of whose losses the gradients are then; see
                        `GradientAggregator.aggregate`

    Every rank calls it equally often. Blocks as the aggregator does. Errors of all three pass
    through unchanged, with a note (which Python shows from 3.11 on) of the step's number and phase.
    TypeError, before anything is sent, if `compute_gradients` returns something else, or
    `aggregator` is not an aggregator.
    """
    if not isinstance(aggregator, GradientAggregator):
        raise TypeError(
            "distributed_train_step takes a GradientAggregator, such as "
            f"AllReduceAggregator(backend), not {aggregator!r}"
        )
    number = aggregator.steps if step is None else step
    doing = "computing gradients"
    try:
        loss, gradients = _checked_pair(compute_gradients())
        doing = "aggregating gradients"
        options = {} if weight is None else {"weight": weight}  # not each aggregator takes one
        averages = aggregator.aggregate(gradients, **options)
        doing = "applying gradients"
        apply_gradients(averages)
    except Exception as error:
        note = f"in training step {number}, {doing}"
        if hasattr(error, "add_note"):  # since Python 3.11
            error.add_note(note)
        else:
            error.__dict__["__notes__"] = [*getattr(error, "__notes__", []), note]
        raise
    aggregator.steps += 1
    if aggregator.backend is not None:
        aggregator.backend.progress.count(aggregator)
    return loss


def _checked_pair(computed: tuple[Loss, Sequence[Tensor]]) -> tuple[Loss, Sequence[Tensor]]:
    """Return the argument, if it is a loss and gradients; else TypeError."""
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


# ------------------------------------------------------------------------------
# An epoch, with a progress bar

Batch = TypeVar("Batch")


def train_epoch(
    batches: Iterable[Batch],
    compute_gradients: Callable[[Batch], tuple[Any, Sequence[Tensor]]],
    apply_gradients: Callable[[list[Tensor]], object],
    aggregator: GradientAggregator,
    *,
    weight: float | Callable[[Batch], float] | None = None,
    description: str = "epoch",
    console: Console | None = None,
) -> float:
    """Take a training step for each of this rank's batches; return the mean of its losses.

    batches             equally many on every rank; if it has a length, the bar has an end
    compute_gradients   returns the loss (a number, or a tensor of one) and the gradients of a batch
    apply_gradients     is given their averages
    weight              of a batch, or a function of it, where losses and gradients are sums: of
                        tokens, say. The result is (sum of losses) / (sum of weights), of all ranks,
                        and takes a message of 24 bytes more; see `mean`
    description         stands before the bar
    console             shows rank 0's bar: standard error by default, and nothing
                        unless that is a terminal

    Blocks and raises as `distributed_train_step` does. After this rank's last batch a message of 8
    bytes checks that the others have no more: if they do, `DesyncError` on every rank names the
    numbers. Without a batch the mean is NaN. TypeError, before anything is sent, for a loss that is
    no number.
    """
    first = aggregator.backend is None or aggregator.backend.rank == 0
    console = console or Console(stderr=True)
    total, seen, count = 0.0, 0.0, 0
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
            given = weight(batch) if callable(weight) else weight
            loss = distributed_train_step(
                lambda batch=batch: _with_number(compute_gradients(batch)),  # type: ignore[misc]
                apply_gradients,
                aggregator,
                weight=given,
            )
            counts = 1.0 if given is None else float(given)
            count, seen = count + 1, seen + counts
            if counts:
                total += float(loss.detach() if isinstance(loss, Tensor) else loss)
            bar.update(task, advance=1, loss=f"{total / (seen or 1):.4g}")
    _check_all_over(count, aggregator)
    if weight is not None and count and aggregator.backend is not None:
        return mean(total / (seen or 1), aggregator.backend, weights=seen)
    return total / seen if count else math.nan


def _with_number(computed: Any) -> Any:
    """Return the result; TypeError if its loss is no number."""
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


def _check_all_over(count: int, aggregator: GradientAggregator) -> None:
    """Raise `DesyncError` unless every rank has had equally many batches.

    A rank with more batches is in its aggregator, whose collectives find the difference, too.
    """
    backend = aggregator.backend
    if backend is None:
        return
    mine = f"come to the end of its epoch, after {count} batches"
    differ = difference([mine], backend, end="more batches")
    if differ is not None:
        refuse(
            "train_epoch",
            backend.rank,
            f"the ranks have different numbers of batches: {differ.text}. Give every rank as many: "
            "leave out the last ones, or repeat some",
            DesyncError,
            peer=differ.odd[0],
        )
