"""One pass over the data, with a progress bar."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from phalanx.aggregation import GradientAggregator
from phalanx.collectives.alike import difference
from phalanx.errors import DesyncError
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
