"""`BatchSampler`: which samples are in which batch of which rank.

The samples of an epoch have one order. It is cut into joined batches, and each of these into parts:

    order of an epoch   7 2 5 0 | 9 3 8 1 | 6 4         batch_size=4
    rank 0 of 2         7 2       9 3       6
    rank 1 of 2             5 0       8 1     4

The order depends on seed and epoch, and not on the number of ranks. So the place that a training
has come to is one number, the samples taken so far, and it goes on from there on any other number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from math import ceil
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils.data import Sampler

from phalanx.collectives import chunk_ranges
from phalanx.core.backend import Backend
from phalanx.parallel.guards import check_agreement, check_ranks_stay, refuse
from phalanx.training.order import Cursor, EpochOrder, Numbers, Samples, numbered

Batch = TypeVar("Batch")
WHO = "BatchSampler"


class BatchSampler(Sampler[list[int]]):
    """The samples of this rank's part of each joined batch: a `batch_sampler` of a DataLoader.

        sampler = phalanx.BatchSampler(len(data), backend, batch_size=64)   # 64 over all ranks
        loader = DataLoader(data, batch_sampler=sampler, num_workers=2)
        for epoch in range(sampler.epoch, 10):
            for x, y in sampler.track(loader): ...

    In an epoch each sample comes once, on one rank; the last batch may be smaller. The order of the
    samples, and so every joined batch, is the same on any number of ranks. The parts of a batch
    differ by one sample at most.

    samples     how many there are, or the numbers of those to be used (a subset)
    backend     the ranks that share each batch (of a mesh, those of its data axis)
    batch_size  samples in a joined batch; with `per_rank`, in each rank's part, so that the joined
                batch grows with the number of ranks
    shuffle     in a new order in every epoch; else in the order given
    seed        of the orders, which are a function of it and of the epoch's number
    drop_last   leave out the last batch of an epoch if it is smaller than the others
    lengths     of the samples: those of like length come together. An epoch's order is cut into
                pools of `pool` batches; a pool is sorted by length; all batches are then shuffled
    weights     draw as many samples as there are, each time one in proportion to its weight,
                with replacement. A sample may come often in an epoch, or not at all
    allow_empty  let ranks have empty parts where a batch has fewer samples than there are ranks;
                without it this is a ValueError here. `collate_fn` then has to take an empty list

    # Notes
    Construction, `resize` and `load_state_dict` block for a message of 8 bytes: every rank calls
    them. Raises `DesyncError`, on every rank, if the ranks' arguments differ.

    # Where the training is
    Workers of a DataLoader ask for batches ahead of the training. `track` counts those that the
    training has been given; `state_dict` is the place after them. A loop over `track` goes on at
    this place: after a `break`, too. A loop over the loader itself takes a whole epoch, the next
    one each time, as with torch's samplers; `state_dict` is refused after it has begun.
    """

    def __init__(
        self,
        samples: Samples,
        backend: Backend,
        *,
        batch_size: int,
        per_rank: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        lengths: Numbers | None = None,
        pool: int = 100,
        weights: Numbers | None = None,
        allow_empty: bool = False,
    ) -> None:
        if not isinstance(backend, Backend):
            raise TypeError(
                f"{WHO} takes samples, then a backend, not {type(samples).__name__} and "
                f"{type(backend).__name__}"
            )
        instead = (
            "a step that does not count takes its batch again, on other ranks. Take job.sampler or "
            "job.loader"
        )
        check_ranks_stay(WHO, backend, instead)
        self.backend = backend
        self._allow_empty = allow_empty
        self._ordered = partial(
            EpochOrder,
            WHO,
            batch_size=batch_size,
            ranks=backend.world_size if per_rank else 1,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            pool=pool,
        )
        self._cursor: Cursor
        self._begun = False  # a loop over the loader itself has begun in this epoch
        self._tracks = False
        self._use(self._ordered(samples, lengths=lengths, weights=weights), epoch=0)

    # As a batch_sampler -----------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of batches in an epoch, the same on every rank."""
        count = self.size / self.batch_size
        return int(count) if self._order.drop_last else ceil(count)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the samples of this rank's part of each batch of the rest of the epoch."""
        # From the first `next` on: a DataLoader with workers begins twice, and uses the second.
        if self._begun and self._tracks:
            self._refuse("track: the loader has begun a second pass over the sampler in one loop")
        begun = self._order.start(self._cursor.epoch + 1) if self._begun else self._cursor
        self._cursor, self._begun = self._order.next(begun), True
        for batch in self._order.batches(self._cursor):
            ranges = chunk_ranges(len(batch), self.backend.world_size)
            yield batch[slice(*ranges[self.backend.rank])].tolist()

    # For the user -----------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The number of the epoch that the training is in; of the next one after its last batch."""
        return self._order.next(self._cursor).epoch

    @property
    def taken(self) -> int:
        """Number of samples of this epoch, over all ranks, that `track` has given."""
        return self._order.next(self._cursor).taken

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of this epoch; in the epoch that `track` is in, change nothing."""
        if epoch != self.epoch or self._begun:
            self._cursor, self._begun = self._order.start(epoch), False

    def track(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of a loader that uses this sampler, and count them as taken.

        It begins where the training is, and ends with the epoch. Raises `MisuseError` if the loader
        does not use this sampler, or a loop over `track` is under way.
        """
        if self._tracks:
            self._refuse("track: another loop over track has not ended; it has to, first")
        self._cursor = self._order.next(self._cursor)
        self._tracks, self._begun = True, False
        try:
            for batch in loader:
                if not self._begun or self._order.next(self._cursor) != self._cursor:
                    self._refuse(
                        "track: the loader does not take its batches from here: "
                        "DataLoader(data, batch_sampler=sampler)",
                    )
                self._cursor = self._order.after(self._cursor)
                yield batch
        finally:
            self._tracks = self._begun = False

    def state_dict(self) -> dict[str, Any]:
        """Return the place that the training has come to: the same on every rank, a few numbers.

        Nothing is sent. Raises `MisuseError` in a loop over the loader that is not tracked.
        """
        if self._begun and not self._tracks:
            self._refuse(
                "state_dict: workers of a loader ask for more batches than the training has been "
                "given, so the place is not known. Loop over sampler.track(loader)",
            )
        return self._order.state_dict(self._cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at this place, on any number of ranks and with any `batch_size`. Blocks.

        Raises ValueError if the state is of other samples or another seed; the place stays as it
        was then. `MisuseError` inside a loop over `track`.
        """
        if self._tracks:
            self._refuse(
                "load_state_dict: a loop over track is under way. Load the state before it; with "
                "torchdata's StatefulDataLoader load the sampler's state, and not the loader's, "
                "which is the place that its workers have come to"
            )
        cursor = self._order.load_state_dict(state)
        self._check_parts(self._order, self.size - cursor.taken)
        self._check_same({"state": dict(state)})
        self._cursor, self._begun = cursor, False

    def resize(
        self,
        samples: Samples,
        *,
        lengths: Numbers | None = None,
        weights: Numbers | None = None,
    ) -> None:
        """Use other samples from the next epoch on: between epochs, on every rank. Blocks."""
        if self.taken:
            self._refuse(
                f"resize: {self.taken} samples of epoch {self.epoch} are taken: resize between "
                "epochs",
            )
        self._use(self._ordered(samples, lengths=lengths, weights=weights), self.epoch)

    @staticmethod
    def evaluation(samples: Samples, backend: Backend, *, batch_size: int) -> EvaluationSampler:
        """Return a `batch_sampler` that has each sample once, in order, over all ranks."""
        return EvaluationSampler(samples, backend, batch_size=batch_size)

    # ------------------------------------------------------------------------------------------

    def _use(self, order: EpochOrder, epoch: int) -> None:
        self._check_parts(order, order.size)
        self._check_same({**order.arguments(), "allow_empty": self._allow_empty})
        self._order, self._begun = order, False
        self._cursor = order.start(epoch)
        self.size, self.batch_size, self.seed = order.size, order.batch_size, order.seed

    def _check_parts(self, order: EpochOrder, left: int) -> None:
        """Raise ValueError if with so many samples left a rank's part of a batch were empty, and
        that is not allowed.
        """
        ranks, last = self.backend.world_size, left % order.batch_size
        if self._allow_empty:
            return
        if order.batch_size < ranks:
            raise ValueError(
                f"{WHO}: batch_size {order.batch_size} leaves some of {ranks} ranks without a "
                "sample: it is that of the joined batch (per_rank=True: of each rank's part)"
            )
        if 0 < last < ranks and not order.drop_last:
            raise ValueError(
                f"{WHO}: the last batch of {left} samples has {last} of them, and there are "
                f"{ranks} ranks: pass drop_last=True, another batch_size, or allow_empty=True if "
                "collate_fn takes an empty list"
            )

    def _refuse(self, problem: str) -> NoReturn:
        refuse(WHO, self.backend.rank, problem)

    def _check_same(self, given: Mapping[str, Any]) -> None:
        lines = [f"{name}={value}" for name, value in given.items()]
        check_agreement(lines, self.backend, op=WHO, remedy="Give the same on every rank")


class EvaluationSampler(Sampler[list[int]]):
    """Each sample once, in order, over all ranks: no sample is repeated to fill a batch.

        loader = DataLoader(data, batch_sampler=BatchSampler.evaluation(len(data), backend,
                                                                        batch_size=256))
        accuracy = phalanx.mean([is_right(model, x) for x in loader], backend, weights=...)

    samples, backend, batch_size   as for `BatchSampler`

    Every rank has equally many batches, none of them empty, as FSDP needs them. Sizes of joined
    batches differ by one at most; they are `batch_size` at most, or larger if that would leave a
    rank without a sample. Nothing is sent. Raises ValueError for fewer samples than ranks.
    """

    def __init__(self, samples: Samples, backend: Backend, *, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"{WHO}.evaluation: batch_size must be at least 1, not {batch_size}")
        self._backend = backend
        self._samples, self._size = numbered(WHO, samples)
        if self._size < backend.world_size:
            raise ValueError(
                f"{WHO}.evaluation: {self._size} samples are fewer than the {backend.world_size} "
                "ranks"
            )
        self._batches = min(ceil(self._size / batch_size), self._size // backend.world_size)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        rank, ranks = self._backend.rank, self._backend.world_size
        for begin, end in chunk_ranges(self._size, self._batches):
            first, last = chunk_ranges(end - begin, ranks)[rank]
            part = torch.arange(begin + first, begin + last)
            yield (part if self._samples is None else self._samples[part]).tolist()
