"""`EpochOrder`: in which order an epoch's samples come, and in which joined batches.

It is a function of its arguments and of a `Cursor`, and of no rank. `BatchSampler` cuts its batches
into the parts of the ranks; so does elastic training, whose ranks change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from phalanx.wire.memory import readable_bytes

Samples = int | Sequence[int] | Tensor
Numbers = Sequence[float] | Tensor


class Cursor(NamedTuple):
    """Where a training is: so many samples of this epoch are taken, over all ranks.

    laid_out_for   the batch size at the epoch's start: an order by lengths depends on it
    """

    epoch: int
    taken: int
    laid_out_for: int


class EpochOrder:
    """The joined batches of each epoch.

    who      whom errors name
    ranks    how many parts of `batch_size` samples a joined batch has
    others   as for `BatchSampler`
    """

    def __init__(
        self,
        who: str,
        samples: Samples,
        *,
        batch_size: int,
        ranks: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        lengths: Numbers | None = None,
        pool: int = 100,
        weights: Numbers | None = None,
    ) -> None:
        for name, value in {"batch_size": batch_size, "pool": pool}.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{who}: {name} must be an integer of at least 1, not {value!r}")
        if weights is not None and (not shuffle or lengths is not None):
            raise ValueError(f"{who}: weights draw at random: not together with shuffle or lengths")
        self._who = who
        self._samples, self.size = numbered(who, samples)
        if self.size < 1:
            raise ValueError(f"{who}: there must be at least 1 sample, not {samples!r}")
        self._lengths = _numbers(who, "lengths", lengths, self.size)
        self._weights = _numbers(who, "weights", weights, self.size)
        if self._weights is not None and not self._weights.sum() > 0:
            raise ValueError(f"{who}: weights are 0 for all samples")
        self.batch_size = batch_size * ranks
        if self.size < self.batch_size and drop_last:
            raise ValueError(
                f"{who}: {self.size} samples do not fill a batch of {self.batch_size}, and "
                "drop_last leaves smaller ones out"
            )
        self.shuffle, self.seed, self.drop_last, self._pool = shuffle, seed, drop_last, pool
        self._drawn: tuple[int, int] | None = None  # what `_order` is of

    # Places -----------------------------------------------------------------------------------

    def start(self, epoch: int) -> Cursor:
        """Return the place before the first batch of an epoch."""
        return Cursor(epoch, 0, self.batch_size)

    def end(self, cursor: Cursor) -> int:
        """Return how many samples of the epoch are in its batches, if it goes on at this one."""
        left = self.size - cursor.taken
        return self.size - (left % self.batch_size if self.drop_last else 0)

    def next(self, cursor: Cursor) -> Cursor:
        """Return where the next batch begins: here, or in the next epoch if this one has ended."""
        return cursor if cursor.taken < self.end(cursor) else self.start(cursor.epoch + 1)

    def after(self, cursor: Cursor) -> Cursor:
        """Return the place after the batch that begins here."""
        return cursor._replace(taken=min(cursor.taken + self.batch_size, self.end(cursor)))

    def state_dict(self, cursor: Cursor) -> dict[str, Any]:
        """Return where the next batch begins, and which order that is in."""
        return {**self.next(cursor)._asdict(), **self.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor of a state. Raises ValueError if it is one in another order."""
        for name, value in self.identity().items():
            if state[name] != value:
                raise ValueError(
                    f"{self._who}: the state is of another {name} ({state[name]}, here {value}): "
                    "the same samples would not come in the same order"
                )
        cursor = Cursor(*(index(state[name]) for name in Cursor._fields))
        return cursor if cursor.taken else self.start(cursor.epoch)

    # Orders -----------------------------------------------------------------------------------

    def batches(self, cursor: Cursor) -> Iterator[Tensor]:
        """Yield the joined batches of the rest of the epoch."""
        drawn = cursor.epoch, cursor.laid_out_for
        if self._drawn != drawn:  # one of 10 million samples takes 0.3 s
            self._drawn, self._order = drawn, self._draw(*drawn)
        order, end = self._order, self.end(cursor)
        for first in range(cursor.taken, end, self.batch_size):
            yield order[first : min(first + self.batch_size, end)]

    def identity(self) -> dict[str, Any]:
        """Return all that the orders depend on, but for places."""
        order = "shuffled" if self.shuffle else "as given"
        if self._lengths is not None:
            order = f"by length in pools of {self._pool}, {order}"
        if self._weights is not None:
            order = "drawn by weight"
        return {"size": self.size, "seed": self.seed, "order": order, "samples": self._digest}

    @cached_property
    def _digest(self) -> str:
        given = [each for each in (self._samples, self._lengths, self._weights) if each is not None]
        return xxh3_64_hexdigest(b"".join(bytes(readable_bytes(each)) for each in given))

    def arguments(self) -> dict[str, Any]:
        """Return all that has to be the same on every rank."""
        options = ("batch_size", "shuffle", "drop_last")
        return {**self.identity(), **{name: getattr(self, name) for name in options}}

    def _draw(self, epoch: int, laid_out_for: int) -> Tensor:
        """Return the numbers of the epoch's samples, in their order."""
        drawn_by = xxh3_64_intdigest(f"{self.seed} {epoch}".encode()) >> 1
        generator = torch.Generator().manual_seed(drawn_by)
        if self._weights is not None:
            ends = self._weights.cumsum(0)
            drawn = torch.rand(self.size, generator=generator, dtype=torch.float64) * ends[-1]
            below = drawn.clamp_(max=torch.nextafter(ends[-1], torch.zeros_like(ends[-1])))
            order = torch.searchsorted(ends, below, right=True)  # the last samples may have none
        elif self.shuffle:
            order = torch.randperm(self.size, generator=generator)
        else:
            order = torch.arange(self.size)
        if self._lengths is not None:
            order = self._by_length(order, self._lengths, generator, laid_out_for)
        return order if self._samples is None else self._samples[order]

    def _by_length(
        self, order: Tensor, lengths: Tensor, generator: torch.Generator, batch: int
    ) -> Tensor:
        pools = torch.split(order, self._pool * batch)
        order = torch.cat([pool[lengths[pool].argsort(stable=True)] for pool in pools])
        if not self.shuffle:
            return order
        whole = self.size // batch * batch
        batches = order[:whole].view(-1, batch)
        shuffled = batches[torch.randperm(len(batches), generator=generator)]
        return torch.cat([shuffled.flatten(), order[whole:]])


def numbered(who: str, samples: Samples) -> tuple[Tensor | None, int]:
    """Return the numbers of the samples, None for all of them, and how many they are."""
    if not hasattr(samples, "__len__"):
        return None, index(samples)
    numbers = torch.as_tensor(samples)
    if numbers.numel() and (numbers.dim() != 1 or numbers.is_floating_point()):
        raise ValueError(f"{who}: samples must be integers in one dimension")
    return numbers, numbers.numel()


def _numbers(who: str, name: str, given: Numbers | None, size: int) -> Tensor | None:
    """Return the argument as doubles; ValueError unless it is one number of each sample."""
    if given is None:
        return None
    numbers = torch.as_tensor(given, dtype=torch.float64)
    if numbers.shape != (size,) or not bool((numbers.isfinite() & (numbers >= 0)).all()):
        raise ValueError(
            f"{who}: {name} must be {size} numbers, finite and not negative, one for each sample"
        )
    return numbers
