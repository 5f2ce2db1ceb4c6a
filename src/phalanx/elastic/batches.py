"""`Batches`: this rank's part of each joined batch, while ranks die, leave and arrive.

A step takes a batch. The cursor moves behind it when the step counts, which it does on all ranks or
on none. What a loader's workers have ready for an older generation is dealt again from there:

    joined batches        0    1    2    3    4    5
    3 ranks have ready   [0]  [1]  [2]  [3]             the step of 0 counts; in that of 1
    2 ranks have ready        [1]  [2]  [3]  [4]        a rank is lost: 1 is dealt again

The joined batches are those of `BatchSampler`, on any number of ranks. So in an epoch each sample
comes once in a step that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from threading import Thread
from typing import Any, Generic, TypeVar, cast

from torch.utils.data import DataLoader, Dataset, IterableDataset

from phalanx.collectives import chunk_ranges
from phalanx.core.backend import Backend
from phalanx.errors import MisuseError, UnsupportedOperationError
from phalanx.parallel.guards import refuse
from phalanx.training.order import Cursor, EpochOrder, Samples

Batch = TypeVar("Batch")
ORDERING = ("shuffle", "seed", "drop_last", "lengths", "pool", "weights")
OURS = ("sampler", "batch_sampler", "in_order")  # options of DataLoader


def sampler(
    samples: Samples, backend: Backend, *, batch_size: int, **options: Any
) -> Batches[list[int]]:
    """Return batches that are the numbers of their samples.

    samples      how many there are, or the numbers of those to be used
    batch_size   samples in a joined batch, over all ranks
    options      shuffle, seed, drop_last, lengths, pool, weights, as for `phalanx.BatchSampler`
    """
    order = EpochOrder("Elastic.sampler", samples, batch_size=batch_size, **options)
    return Batches(order, backend, iter)


def loader(
    dataset: Dataset[Any], backend: Backend, *, batch_size: int, **options: Any
) -> Batches[Any]:
    """Return batches that torch's `DataLoader` loads: shuffled, unless `shuffle` is False.

    options   as for `sampler`, and all others of DataLoader, such as num_workers and collate_fn

    Workers go on from epoch to epoch, and begin anew in each generation: what they draw at random
    is then what those of a newcomer draw. Raises `UnsupportedOperationError` for an iterable
    dataset, and `MisuseError` for the options sampler, batch_sampler and in_order.
    """
    who = "Elastic.loader"
    if isinstance(dataset, IterableDataset):
        raise UnsupportedOperationError(
            f"{who}: samples of an iterable dataset have no numbers, so ranks that come and go "
            "cannot share them: give a dataset with __getitem__ and __len__"
        )
    if given := [name for name in OURS if name in options]:
        raise MisuseError(
            f"{who}: {given[0]}: which sample comes when is the job's, since ranks come and go. "
            "For a part of the samples give a torch.utils.data.Subset"
        )
    ordering = {name: options.pop(name) for name in ORDERING if name in options}
    order = EpochOrder(who, len(cast(Sized, dataset)), batch_size=batch_size, **ordering)
    load = partial(DataLoader, dataset, **options)
    load(batch_sampler=[])  # here torch refuses options that it does not take
    return Batches(
        order, backend, lambda parts: load(batch_sampler=parts), options.get("num_workers", 0)
    )


class Batches(Generic[Batch]):
    """This rank's part of each joined batch, one in each step, epoch after epoch without an end.

    order         the joined batches
    backend       the ranks that share them: those that it has when a generation takes its first
    load          makes batches of the numbers of their samples, one after another, perhaps ahead
    num_workers   processes that `load` starts

    The user calls `take`, and the job all other methods. None of them sends anything.
    """

    def __init__(
        self,
        order: EpochOrder,
        backend: Backend,
        load: Callable[[Iterator[list[int]]], Iterable[Batch]],
        num_workers: int = 0,
    ) -> None:
        self._order, self._backend, self._load = order, backend, load
        self._num_workers = num_workers
        self._cursor = order.start(0)
        self._in_step = False
        self._after: Cursor | None = None  # where the cursor moves if this step counts
        self._running: Any = None  # an iterator that begins with the batch at the cursor
        self.weight = 1.0  # of what this step has taken

    # For the user -----------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The number of the epoch that this step's batch is of."""
        return self._cursor.epoch

    def take(self) -> Batch:
        """Return this rank's part of the step's joined batch: once in a step, inside its block.

        If the batch has fewer samples than there are ranks, those without one get its first, with
        weight 0. What the dataset raises is raised here; to call again is then to try again.
        """
        if not self._in_step or self._after is not None:
            what = "a second time in one step" if self._in_step else "outside of a step's block"
            refuse(
                "Elastic",
                self._backend.rank,
                f"batches.take() {what}: call it once inside of `with step:`, on every rank",
            )
        rank, ranks = self._backend.rank, self._backend.world_size
        try:
            if self._running is None:
                parts = _parts(self._order, self._cursor, rank, ranks)
                self._running = iter(self._load(parts))
            batch: Batch = next(self._running)
        except BaseException:
            self._drop()  # it may go on behind this batch
            raise
        self._after = self._order.after(self._cursor)
        joined = self._after.taken - self._cursor.taken
        begin, end = chunk_ranges(joined, ranks)[rank]
        self.weight = (end - begin) * ranks / joined
        return batch

    @property
    def taken(self) -> bool:
        """True if this step has taken its batch."""
        return self._after is not None

    # For the job ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the block of a step."""
        self._in_step, self.weight = True, 1.0

    def count(self) -> None:
        """Move the cursor behind the batch that the step has taken, if any."""
        if self._after is not None:
            self._cursor = self._order.next(self._after)
        self._in_step, self._after = False, None

    def undo(self) -> None:
        """Take the same batch again: the step did not count."""
        if self._after is not None:
            self._drop()
        self._in_step, self._after = False, None

    def regrouped(self) -> None:
        """Deal anew from the cursor on: the backend has other ranks. A step has not counted."""
        self.undo()
        self._drop()

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor: numbers and text, the same on every rank, as `BatchSampler` has it."""
        return self._order.state_dict(self._cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor, on any number of ranks and with any batch size.

        Raises ValueError if the state is of other samples or another seed.
        """
        self._cursor = self._order.next(self._order.load_state_dict(state))
        self.regrouped()

    def identity(self) -> dict[str, Any]:
        """Return what has to be the same on all ranks: numbers and text."""
        return self._order.arguments()

    def close(self) -> None:
        """End the workers. Waits for what they are at, 5 s each at most."""
        self._drop(wait=True)

    def _drop(self, *, wait: bool = False) -> None:
        """Begin anew at the next `take`. Old workers finish what they are at; a thread waits."""
        running, self._running = self._running, None
        if running is not None and self._num_workers:
            # This ends them even if something else, such as a traceback, refers to the iterator.
            thread = Thread(target=running.__del__, name="phalanx: old workers")
            thread.start()
            if wait:
                thread.join()


def _parts(order: EpochOrder, cursor: Cursor, rank: int, ranks: int) -> Iterator[list[int]]:
    """Yield the samples of a rank's parts from this cursor on, epoch after epoch."""
    while True:
        for batch in order.batches(cursor):
            begin, end = chunk_ranges(len(batch), ranks)[rank]
            yield (batch[begin:end] if begin < end else batch[:1]).tolist()
        cursor = order.start(cursor.epoch + 1)
