"""One pass over the data, with a progress bar."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from phalanx.aggregation import GradientAggregator
from phalanx.training.step import distributed_train_step

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

    Blocks as `distributed_train_step` does, and raises what that does. Without a batch the mean is
    NaN.
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
                lambda batch=batch: compute_gradients(batch),  # type: ignore[misc]
                apply_gradients,
                aggregator,
            )
            total, count = total + _number(loss), count + 1
            bar.update(task, advance=1, loss=f"{total / count:.4g}")
    return total / count if count else math.nan


def _number(loss: Any) -> float:
    return float(loss.detach() if isinstance(loss, Tensor) else loss)
