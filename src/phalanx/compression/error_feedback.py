"""Error feedback: the values that a compressor leaves out are added to the next gradient.

    sent + residual  ==  gradient + former residual

(Seide et al. 2014; Stich et al. 2018; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD".)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from phalanx.compression.compressor import (
    Compressor,
    GradientBucket,
    Member,
    NamedTensors,
    ResidualStore,
    Rounds,
    State,
    check_compressor,
    check_floating,
    narrowed,
    strip_prefix,
    wide,
)
from phalanx.errors import SizeMismatchError


class ErrorFeedback(Compressor, ResidualStore):
    """A compressor that loses nothing: values that it leaves out are sent later.

    compressor   any other one. Quantized rounds to nearest in here, unless told otherwise;
                 `inner` is the compressor in the form that is used

    Sums and residuals are float32 for all gradients but float64, which stay that. The equation
    above holds bit for bit for `TopK`, `RandomK` and `Half`, whose messages are some of the values
    themselves or their rounding; else to one rounding of the larger of `sent` and `residual`. For
    an average it holds for sums over all members, with the residuals of members and owners of
    slices.

    It costs memory of the gradients' size twice (4 bytes a value each): the residuals, and while a
    pass runs, its new ones. A pass without a result (`rollback`) leaves them as they were.

    Its state (the keys are below) is this member's; `reshard` turns all members' states into those
    for another number of members.
    """

    def __init__(self, compressor: Compressor) -> None:
        check_compressor(compressor, "ErrorFeedback")
        if isinstance(compressor, ErrorFeedback):
            raise ValueError(f"{compressor!r} forgets nothing already")  # noqa: TRY004 - not a type
        self.inner = compressor.contraction()
        self._residuals = NamedTensors()
        self._owned = NamedTensors()
        self._parts = 1  # of the averages of this pass

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.inner!r})"

    def compress(self, tensor: Tensor, name: str = "") -> Any:
        """Return the compressor's message for the tensor and the residual of that name."""
        check_floating(tensor, self)
        bucket = GradientBucket.of([tensor], [name])
        wanted = self.add_residual(bucket, Member(0, 1))
        message = self.inner.compress(narrowed(wanted, tensor.dtype).view(tensor.shape))
        sent = self.inner.decompress(message).flatten()
        self.store_residual(bucket, lambda: wanted - sent.to(wanted.dtype))
        self.commit()
        return message

    def decompress(self, message: Any) -> Tensor:
        """Return the compressor's tensor of the message."""
        return self.inner.decompress(message)

    def residual(self, name: str = "") -> Tensor | None:
        """Return a flat copy of the gradient's residual on this member; None if there is none."""
        residual = self._residuals.committed.get(name)
        return residual.clone() if residual is not None else None

    def scale_(self, factor: float) -> None:
        """Multiply all residuals by `factor`, as when the loss's scale changes by it."""
        for residual in chain(self._residuals.committed.values(), self._owned.committed.values()):
            residual.mul_(factor)

    def average_(self, bucket: GradientBucket, member: Member, feedback: object = None) -> Rounds:
        """Run the compressor's rounds, with the residuals kept here."""
        yield from self.inner.average_(bucket, member, self)

    def average_shard_(
        self, bucket: GradientBucket, member: Member, feedback: object = None
    ) -> Rounds:
        """Run the compressor's rounds, with the residuals kept here."""
        yield from self.inner.average_shard_(bucket, member, self)

    def add_residual(self, bucket: GradientBucket, member: Member) -> Tensor:
        """Return the sum of gradients and their residuals: flat, new."""
        self._parts = member.parts
        wanted = bucket.flat.to(wide(bucket.flat.dtype), copy=True)
        for name, _, start, stop in bucket.pieces:
            residual = self._residuals.latest(name)
            if residual is None:
                continue
            if len(residual) != stop - start:
                raise SizeMismatchError(
                    f"{self}: gradient {name!r} has {stop - start} values, and what was left over "
                    f"of it {len(residual)}: load the state of the same model"
                )
            wanted[start:stop].add_(residual)
        return wanted

    def store_residual(self, bucket: GradientBucket, residual: Callable[[], Tensor]) -> None:
        """Store the residual, for the case that the pass counts."""
        flat = residual()
        for place in bucket.pieces:
            self._residuals.pending[place.name] = flat[place.start : place.stop]

    def add_owned_residual(self, bucket: GradientBucket, start: int, mean: Tensor) -> Tensor:
        """Return the sum of a mean and the last one's residual: new."""
        wanted = mean.clone()
        for key, part in _owned_slices(bucket, start, wanted):
            residual = self._owned.latest(key)
            if residual is not None:
                part.add_(residual)
        return wanted

    def store_owned_residual(
        self, bucket: GradientBucket, start: int, residual: Callable[[], Tensor]
    ) -> None:
        """Store the residual, for the case that the pass counts."""
        for key, part in _owned_slices(bucket, start, residual()):
            self._owned.pending[key] = part

    def remembers(self) -> Mapping[str, NamedTensors | Compressor]:
        """Return the residuals, and the compressor's own state."""
        return {RESIDUAL: self._residuals, OWNED: self._owned, INNER: self.inner}

    def commit(self) -> None:
        """Keep the pass's residuals for the next one. Residuals of means that have another owner
        now are added to this member's own.
        """
        for key, left in list(self._owned.committed.items()):
            name, start, stop = read_slice_key(key)
            residual = self._residuals.pending.get(name)
            if residual is not None and key not in self._owned.pending:
                residual[start:stop].add_(left, alpha=self._parts)
                del self._owned.committed[key]
        super().commit()

    def reshard(self, states: Sequence[State | None], parts: int) -> list[dict[str, Tensor]]:
        """Return as many members' states as before bit for bit; for another number, equal shares of
        the missing part of averages, summed in float64 and rounded once.
        """
        known = [state for state in states if state is not None]
        inner = self.inner.reshard(
            [None if state is None else strip_prefix(INNER, state) for state in states], parts
        )
        resharded = [{INNER + key: value for key, value in own.items()} for own in inner]
        if parts == len(states):
            for mine, state in zip(resharded, states, strict=True):
                mine.update((k, v) for k, v in (state or {}).items() if not k.startswith(INNER))
            return resharded
        for name, total in total_residual(known, len(states)).items():
            dtype = next(s[RESIDUAL + name].dtype for s in known if RESIDUAL + name in s)
            for mine, share in zip(resharded, split_residual(total, parts, dtype), strict=True):
                mine[RESIDUAL + name] = share
        return resharded


def _owned_slices(
    bucket: GradientBucket, start: int, values: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the values of a bucket from element `start` on, by gradient: their keys, and views."""
    for place, low, high in bucket.overlaps(start, start + len(values)):
        key = slice_key(place.name, low - place.start, high - place.start)
        yield key, values[low - start : high - start]


# ------------------------------------------------------------------------------
# Residuals in a state dict: their keys, and their use by another number of members.
#
#   residual.<name>              what a member has left out of its gradient
#   owned.<start>-<stop>.<name>  what it has left out of the mean of these elements of the gradient
#   inner.<key>                  the compressor's own
#
# An average lacks  sum over p members of residual / p  +  sum of owned.  Of q members each gets an
# equal share of that, so that it lacks as much afterwards.
#
# If gradients are cut into shards before they are averaged, a member knows only slices of them:
# then <name> is <start>-<stop>.<name>, elements start:stop of that gradient.

RESIDUAL, OWNED, INNER = "residual.", "owned.", "inner."


def slice_key(name: str, start: int, stop: int) -> str:
    """Return the key of elements start:stop of a gradient, without its prefix."""
    return f"{start}-{stop}.{name}"


def read_slice_key(key: str) -> tuple[str, int, int]:
    """Return the name, start and stop of such a key."""
    span, name = key.split(".", 1)
    start, stop = span.split("-")
    return name, int(start), int(stop)


def total_residual(states: Sequence[State], parts: int) -> dict[str, Tensor]:
    """Return the part that averages of that many members lack, by name; float64.

    states   of the members, as far as they are known
    """
    total: dict[str, Tensor] = {}
    for state in states:
        for name, residual in strip_prefix(RESIDUAL, state).items():
            mine = residual.double() / parts
            total[name] = total[name] + mine if name in total else mine
    for state in states:
        for key, residual in strip_prefix(OWNED, state).items():
            name, start, stop = read_slice_key(key)
            total[name][start:stop] += residual.double()
    return total


def join_slices(slices: State, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return whole gradients from slices of them, by name; zeros for missing ones.

    sizes   of the gradients, by name, as far as they are known
    """
    whole: dict[str, Tensor] = {}
    for key, values in slices.items():
        name, start, stop = read_slice_key(key)
        known = whole.setdefault(name, values.new_zeros(sizes.get(name, stop)))
        if len(known) < stop:
            known = whole[name] = torch.cat([known, known.new_zeros(stop - len(known))])
        known[start:stop] += values
    return whole


def split_residual(total: Tensor, parts: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the residuals of `parts` members whose mean is `total` (float64).

    Rounded to `dtype` so that together they are off by half a unit in the last place of one.
    """
    rest, shares = total * parts, []
    for remaining in range(parts, 0, -1):
        shares.append((rest / remaining).to(dtype))
        rest = rest - shares[-1].double()
    return shares
