"""`BatchSampler`: which samples are in which batch of which rank.

The samples of an epoch have one order. It is cut into joined batches, and each of these into parts:

    order of an epoch   7 2 5 0 | 9 3 8 1 | 6 4         batch_size=4
    rank 0 of 2         7 2       9 3       6
    rank 1 of 2             5 0       8 1     4

The order depends on seed and epoch, and not on the number of ranks. So the place that a training
has come to is one number, the samples taken so far, and it goes on from there on any other number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil
from operator import index
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Sampler
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from phalanx.collectives import chunk_ranges
from phalanx.core.backend import Backend
from phalanx.parallel.guards import check_agreement, refuse
from phalanx.wire.memory import readable_bytes

Batch = TypeVar("Batch")
Samples = int | Sequence[int] | Tensor
Numbers = Sequence[float] | Tensor
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
        for name, value in {"batch_size": batch_size, "pool": pool}.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{WHO}: {name} must be an integer of at least 1, not {value!r}")
        if weights is not None and (not shuffle or lengths is not None):
            raise ValueError(f"{WHO}: weights draw at random: not together with shuffle or lengths")
        self.backend = backend
        self.batch_size = batch_size * (backend.world_size if per_rank else 1)
        self.seed = seed
        self._options = {"shuffle": shuffle, "drop_last": drop_last, "allow_empty": allow_empty}
        self._pool = pool
        self.size = 0
        self._epoch = 0
        self._taken = 0  # samples of the epoch
        self._laid_out_for = self.batch_size  # the one at the epoch's start: lengths depend on it
        self._begun = False  # a loop over the loader itself has begun in this epoch
        self._tracks = False
        self.resize(samples, lengths=lengths, weights=weights)

    # As a batch_sampler -----------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of batches in an epoch, the same on every rank."""
        count = self.size / self.batch_size
        return int(count) if self._options["drop_last"] else ceil(count)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the samples of this rank's part of each batch of the rest of the epoch."""
        # From the first `next` on: a DataLoader with workers begins twice, and uses the second.
        if self._begun and self._tracks:
            self._refuse("track: the loader has begun a second pass over the sampler in one loop")
        if self._begun or self._taken >= self._end:
            self._begin_epoch(self._epoch + 1)
        self._begun = True
        order, end, backend = self._order(), self._end, self.backend
        for first in range(self._taken, end, self.batch_size):
            batch = order[first : min(first + self.batch_size, end)]
            begin, stop = chunk_ranges(len(batch), backend.world_size)[backend.rank]
            yield batch[begin:stop].tolist()

    # For the user -----------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The number of the epoch that the training is in; of the next one after its last batch."""
        return self._epoch + (self._taken >= self._end)

    @property
    def taken(self) -> int:
        """Number of samples of this epoch, over all ranks, that `track` has given."""
        return self._taken if self._taken < self._end else 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of this epoch; in the epoch that `track` is in, change nothing."""
        if epoch != self.epoch or self._begun:
            self._begin_epoch(epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._taken, self._laid_out_for = epoch, 0, self.batch_size
        self._begun = False

    def track(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of a loader that uses this sampler, and count them as taken.

        It begins where the training is, and ends with the epoch. Raises `MisuseError` if the loader
        does not use this sampler, or a loop over `track` is under way.
        """
        if self._tracks:
            self._refuse("track: another loop over track has not ended; it has to, first")
        if self._taken >= self._end:
            self._begin_epoch(self._epoch + 1)
        self._tracks, self._begun = True, False
        try:
            for batch in loader:
                if not self._begun or self._taken >= self._end:
                    self._refuse(
                        "track: the loader does not take its batches from here: "
                        "DataLoader(data, batch_sampler=sampler)",
                    )
                self._taken = min(self._taken + self.batch_size, self._end)
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
        return {
            "epoch": self.epoch,
            "taken": self.taken,
            "laid_out_for": self._laid_out_for,
            **self._identity(),
        }

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
        for name, value in self._identity().items():
            if state[name] != value:
                raise ValueError(
                    f"{WHO}: the state is of another {name} ({state[name]}, here {value}): the "
                    "same samples would not come in the same order"
                )
        taken = index(state["taken"])
        self._check_parts(self.size - taken)
        self._check_same({"state": dict(state)})
        self._epoch, self._taken, self._begun = index(state["epoch"]), taken, False
        self._laid_out_for = index(state["laid_out_for"]) if taken else self.batch_size

    def resize(
        self,
        samples: Samples,
        *,
        lengths: Numbers | None = None,
        weights: Numbers | None = None,
    ) -> None:
        """Use other samples from the next epoch on: between epochs, on every rank. Blocks."""
        if self._taken and self._taken < self._end:
            self._refuse(
                f"resize: {self._taken} samples of epoch {self._epoch} are taken: resize between "
                "epochs",
            )
        numbers, size = _numbered(samples)
        if size < 1:
            raise ValueError(f"{WHO}: there must be at least 1 sample, not {samples!r}")
        length, weight = _numbers("lengths", lengths, size), _numbers("weights", weights, size)
        if weight is not None and not weight.sum() > 0:
            raise ValueError(f"{WHO}: weights are 0 for all samples")
        if size < self.batch_size and self._options["drop_last"]:
            raise ValueError(
                f"{WHO}: {size} samples do not fill a batch of {self.batch_size}, and drop_last "
                "leaves smaller ones out"
            )
        self._check_parts(size)
        epoch = self.epoch if self.size else 0
        self._samples, self.size, self._lengths, self._weights = numbers, size, length, weight
        self._check_same({**self._identity(), "batch_size": self.batch_size, **self._options})
        self._begin_epoch(epoch)

    @staticmethod
    def evaluation(samples: Samples, backend: Backend, *, batch_size: int) -> EvaluationSampler:
        """Return a `batch_sampler` that has each sample once, in order, over all ranks."""
        return EvaluationSampler(samples, backend, batch_size=batch_size)

    # ------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        """Return all that an epoch's order depends on, but for its number and `_laid_out_for`."""
        order = "shuffled" if self._options["shuffle"] else "as given"
        order = (
            f"by length in pools of {self._pool}, {order}" if self._lengths is not None else order
        )
        order = "drawn by weight" if self._weights is not None else order
        given = [each for each in (self._samples, self._lengths, self._weights) if each is not None]
        digest = xxh3_64_hexdigest(b"".join(bytes(readable_bytes(each)) for each in given))
        return {"size": self.size, "seed": self.seed, "order": order, "samples": digest}

    @property
    def _end(self) -> int:
        """Samples of the epoch that are in its batches, from the place where it is."""
        left = self.size - self._taken
        dropped = left % self.batch_size if self._options["drop_last"] else 0
        return self.size - dropped

    def _order(self) -> Tensor:
        """Return the numbers of the epoch's samples, in their order."""
        drawn_by = xxh3_64_intdigest(f"{self.seed} {self._epoch}".encode()) >> 1
        generator = torch.Generator().manual_seed(drawn_by)
        if self._weights is not None:
            ends = self._weights.cumsum(0)
            drawn = torch.rand(self.size, generator=generator, dtype=torch.float64) * ends[-1]
            below = drawn.clamp_(max=torch.nextafter(ends[-1], torch.zeros_like(ends[-1])))
            order = torch.searchsorted(ends, below, right=True)  # the last samples may have none
        elif self._options["shuffle"]:
            order = torch.randperm(self.size, generator=generator)
        else:
            order = torch.arange(self.size)
        if self._lengths is not None:
            order = self._by_length(order, self._lengths, generator)
        return order if self._samples is None else self._samples[order]

    def _by_length(self, order: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
        batch = self._laid_out_for
        pools = torch.split(order, self._pool * batch)
        order = torch.cat([pool[lengths[pool].argsort(stable=True)] for pool in pools])
        if not self._options["shuffle"]:
            return order
        whole = self.size // batch * batch
        batches = order[:whole].view(-1, batch)
        shuffled = batches[torch.randperm(len(batches), generator=generator)]
        return torch.cat([shuffled.flatten(), order[whole:]])

    def _check_parts(self, left: int) -> None:
        """Raise ValueError if with so many samples left a rank's part of a batch were empty, and
        that is not allowed.
        """
        ranks, last = self.backend.world_size, left % self.batch_size
        if self._options["allow_empty"]:
            return
        if self.batch_size < ranks:
            raise ValueError(
                f"{WHO}: batch_size {self.batch_size} leaves some of {ranks} ranks without a "
                "sample: it is that of the joined batch (per_rank=True: of each rank's part)"
            )
        if 0 < last < ranks and not self._options["drop_last"]:
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
        self._samples, self._size = _numbered(samples)
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


def _numbered(samples: Samples) -> tuple[Tensor | None, int]:
    """Return the numbers of the samples, None for all of them, and how many they are."""
    if not hasattr(samples, "__len__"):
        return None, index(samples)
    numbers = torch.as_tensor(samples)
    if numbers.numel() and (numbers.dim() != 1 or numbers.is_floating_point()):
        raise ValueError(f"{WHO}: samples must be integers in one dimension")
    return numbers, numbers.numel()


def _numbers(name: str, given: Numbers | None, size: int) -> Tensor | None:
    """Return the argument as doubles; ValueError unless it is one number of each sample."""
    if given is None:
        return None
    numbers = torch.as_tensor(given, dtype=torch.float64)
    if numbers.shape != (size,) or not bool((numbers.isfinite() & (numbers >= 0)).all()):
        raise ValueError(
            f"{WHO}: {name} must be {size} numbers, finite and not negative, one for each sample"
        )
    return numbers
