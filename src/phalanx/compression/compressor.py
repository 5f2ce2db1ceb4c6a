"""`Compressor`: makes gradients smaller, and averages them in that form.

    compress         a tensor -> a message that counts its bytes
    decompress       a message -> the receiver's tensor
    average_         a generator: local arithmetic between requests, so that the same code is
                     carried out at once, in the background, or by a test without any rank
    average_shard_   the same, if each member needs only its own shard of the mean

    class        average_                                   average_shard_
    Half         all-reduce of messages (*)                 all-to-all, sum
    RandomK      all-reduce of messages                     reduce-scatter
    PowerSGD     two all-reduces of factors                 the same; the product of the shard alone
    TopK         all-gather, everybody sums                 all-to-all, sum
    Quantized    all-to-all, sum, quantize, all-gather      all-to-all, sum

    (*) with error feedback as Quantized, so that rounding errors of the mean are kept, too

The part that a member leaves out of its message is lost, unless a `ResidualStore` keeps it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from phalanx.errors import UnsupportedOperationError

# ------------------------------------------------------------------------------
# Requests: the common operations of an average's members, as data for an executor. The
# arithmetic knows no rank and no backend: a test plays all members in one thread.


class Member(NamedTuple):
    """A member of the group that averages together: number `number` of `parts`."""

    number: int
    parts: int


class AllReduceMean(NamedTuple):
    """x -> the mean of x over all members: the same bits everywhere. x may be overwritten."""

    tensor: Tensor


class ReduceScatterMean(NamedTuple):
    """x, of [members, ...] -> its own row of the mean, [...]. x may be overwritten."""

    tensor: Tensor


class AllGather(NamedTuple):
    """x -> [members, *x.shape]: row i is member i's x; all have one shape and dtype."""

    tensor: Tensor


class AllToAll(NamedTuple):
    """x, of [members, ...] -> [members, ...]: row i is member i's row for this one."""

    tensor: Tensor


Request: TypeAlias = AllReduceMean | ReduceScatterMean | AllGather | AllToAll
Rounds: TypeAlias = Generator[Request, Tensor, None]


# ------------------------------------------------------------------------------
# Gradients that are compressed and averaged together, one after the other in memory.
#
# names   weight                  bias
# flat    [ . . . . . . . . . . | . . ]     one dtype
# shapes  (2, 5)                  (2,)


class GradientRange(NamedTuple):
    """The place of a gradient in a bucket: elements start:stop."""

    name: str
    shape: torch.Size
    start: int
    stop: int


class GradientBucket:
    """Flat memory, and the gradients in it.

    flat    1-D, contiguous; as long as the gradients, or longer, padded with zeros
    names   of the gradients; the same on every member: residuals are kept by these names
    shapes  of the gradients
    """

    def __init__(self, flat: Tensor, names: Sequence[str], shapes: Sequence[torch.Size]) -> None:
        self.flat = flat
        stops = list(accumulate(shape.numel() for shape in shapes))
        self.pieces = tuple(
            GradientRange(name, shape, stop - shape.numel(), stop)
            for name, shape, stop in zip(names, shapes, stops, strict=True)
        )

    @classmethod
    def of(cls, tensors: Sequence[Tensor], names: Sequence[str]) -> GradientBucket:
        """Return a bucket of copies of tensors of one dtype."""
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        return cls(flat, names, [tensor.shape for tensor in tensors])

    @property
    def size(self) -> int:
        """The number of the gradients' values."""
        return self.pieces[-1].stop if self.pieces else 0

    def unpadded(self) -> GradientBucket:
        """Return the gradients alone, in the same memory."""
        names, shapes = [p.name for p in self.pieces], [p.shape for p in self.pieces]
        return GradientBucket(self.flat[: self.size], names, shapes)

    def shards(self, parts: int) -> Tensor:
        """Return the flat memory as `[parts, ...]`: row i is member i's shard."""
        return self.flat.view(parts, len(self.flat) // parts)

    def cut(self, flat: Tensor) -> Iterator[tuple[GradientRange, Tensor]]:
        """Yield each gradient's place, and its view, in its shape, of a tensor like `flat`."""
        for place in self.pieces:
            yield place, flat[place.start : place.stop].view(place.shape)

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[GradientRange, int, int]]:
        """Yield the gradients that overlap elements start:stop, and the common elements."""
        for place in self.pieces:
            low, high = max(place.start, start), min(place.stop, stop)
            if low < high:
                yield place, low, high


# ------------------------------------------------------------------------------
# State: tensors by name, and how often a compressor was called.

State: TypeAlias = Mapping[str, Tensor]


class NamedTensors:
    """Tensors by name. A pass puts in others, which replace them when it is committed.

    committed   as of the last commit
    pending     put in by this pass; nobody else writes them
    """

    def __init__(self) -> None:
        self.committed: dict[str, Tensor] = {}
        self.pending: dict[str, Tensor] = {}

    def latest(self, name: str) -> Tensor | None:
        """Return this pass's tensor of that name; else the committed one."""
        return self.pending.get(name, self.committed.get(name))

    def commit(self) -> None:
        """Keep the tensors of this pass."""
        self.committed.update(self.pending)
        self.pending.clear()

    def rollback(self) -> None:
        """Drop the tensors of this pass: the state is that of the last commit."""
        self.pending.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the committed tensors by name."""
        return {name: tensor.clone() for name, tensor in self.committed.items()}

    def load_state_dict(self, state: State) -> None:
        """Replace all by copies of these."""
        self.committed = {name: tensor.detach().clone() for name, tensor in state.items()}
        self.pending.clear()


class CallCounter(NamedTensors):
    """Numbers calls, so that each has its own random numbers, the same on every member.

    A pass that is rolled back is counted again: members that stopped at different calls go on
    alike. The state is the number of committed calls; its name is empty.
    """

    def __init__(self) -> None:
        super().__init__()
        self.load_state_dict({})

    def next(self) -> int:
        """Return the number of this call."""
        number = self.pending.get("", self.committed[""])
        self.pending[""] = number + 1
        return int(number)

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict({"": torch.tensor(int(state.get("", 0)), dtype=torch.int64)})


def strip_prefix(prefix: str, state: State) -> dict[str, Tensor]:
    """Return the entries whose keys have that prefix, without it."""
    return {k[len(prefix) :]: value for k, value in state.items() if k.startswith(prefix)}


# ------------------------------------------------------------------------------
# Residuals: the values that a compressor leaves out.


class ResidualStore:
    """Stores the values that compression leaves out, the residuals. This one keeps nothing.

    A quantized average leaves out values twice: each member those of its own gradients, and the
    owner of a slice, which has summed it, those of that mean.
    """

    def add_residual(self, bucket: GradientBucket, member: Member) -> Tensor:
        """Return the bucket's values to send, with their former residuals added: flat. A store that
        keeps residuals returns a new tensor, float32 or wider, which only `residual()` below
        writes.
        """
        return bucket.flat

    def store_residual(self, bucket: GradientBucket, residual: Callable[[], Tensor]) -> None:
        """Store `residual()`, the values left out: flat, as long as the bucket. It may be computed
        in the memory that `add_residual` returned, which nobody reads afterwards.
        """

    def add_owned_residual(self, bucket: GradientBucket, start: int, mean: Tensor) -> Tensor:
        """Return the values to send of this member's mean, elements `start` and on."""
        return mean

    def store_owned_residual(
        self, bucket: GradientBucket, start: int, residual: Callable[[], Tensor]
    ) -> None:
        """Store `residual()`, the values left out of that mean."""


NO_RESIDUALS = ResidualStore()
"""What is left out is lost."""


# ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class EncodedTensor:
    """A message that is sent in the place of a tensor.

    sent    as it is on the wire
    shape   of the tensor
    dtype   of the tensor
    call    number of the call, if a receiver needs it to draw the same random numbers
    """

    sent: tuple[Tensor, ...]
    shape: torch.Size
    dtype: torch.dtype
    call: int = 0

    @property
    def nbytes(self) -> int:
        """Number of bytes on the wire."""
        return sum(tensor.nbytes for tensor in self.sent)


class Compressor(ABC):
    """A way to make gradients smaller.

    Tensors are float16, bfloat16, float32 or float64, of any shape, on any device; other dtypes
    raise `UnsupportedOperationError`. Infinity and NaN stay visible: if a gradient of one member
    has either, the average of its bucket is not finite on any member.

    Some have a state: random numbers that go on, or earlier messages. It changes for good with
    `commit`, after a pass over all gradients; `rollback` forgets a pass without a result.

    waits_for_step   whether passes count only if an optimizer takes the step, as in a pipeline,
                     whose steps have several, and whose gradients may be infinite elsewhere
    """

    waits_for_step = False

    @abstractmethod
    def compress(self, tensor: Tensor) -> Any:
        """Return a message for the tensor, which stays as it is. `nbytes` are its bytes as sent."""

    @abstractmethod
    def decompress(self, message: Any) -> Tensor:
        """Return the receiver's new tensor, of the compressed one's shape, dtype and device."""

    @abstractmethod
    def average_(
        self, bucket: GradientBucket, member: Member, feedback: ResidualStore = NO_RESIDUALS
    ) -> Rounds:
        """Overwrite the bucket with the mean over all members: the same bits on each of them.

        A generator: it yields requests, and is sent their results. All members have to run it for
        equal buckets, in the same order.
        """

    def average_shard_(
        self, bucket: GradientBucket, member: Member, feedback: ResidualStore = NO_RESIDUALS
    ) -> Rounds:
        """Overwrite this member's shard of the bucket with the mean over all members.

        The flat memory is cut into as many shards as there are members (`GradientBucket.shards`),
        and padded for it. The contents of the other shards are undefined afterwards. A value that
        is not finite shows at least in its own shard. This implementation computes the whole mean.
        """
        yield from self.average_(bucket.unpadded(), member, feedback)

    def contraction(self) -> Compressor:
        """Return the form of this compressor for error feedback.

        Its residual is smaller than its input, on average over time. By default the compressor
        itself; one that trades this for being unbiased returns another.
        """
        return self

    def remembers(self) -> Mapping[str, NamedTensors | Compressor]:
        """Return the parts of its state, by the prefix of the keys under which they are saved."""
        return {}

    def commit(self) -> None:
        """Keep the state of the averages since the last commit: they count."""
        for part in self.remembers().values():
            part.commit()

    def end_pass(self, *, counts: bool) -> None:
        """End a pass: commit, unless the step is waited for, or roll back."""
        if not counts:
            self.rollback()
        elif not self.waits_for_step:
            self.commit()

    def rollback(self) -> None:
        """Drop the state of the averages since the last commit."""
        for part in self.remembers().values():
            part.rollback()

    def state_dict(self) -> dict[str, Tensor]:
        """Return this member's state as of the last commit: copies, by names."""
        return {
            prefix + key: value
            for prefix, part in self.remembers().items()
            for key, value in part.state_dict().items()
        }

    def load_state_dict(self, state: State) -> None:
        """Take the `state_dict` of this member, or of one like it."""
        for prefix, part in self.remembers().items():
            part.load_state_dict(strip_prefix(prefix, state))

    def reshard(self, states: Sequence[State | None], parts: int) -> list[dict[str, Tensor]]:
        """Return the states for another number of members.

        states   of all former members, in their order; None where one is lost
        """
        known = next((state for state in states if state is not None), {})
        return [dict(known) for _ in range(parts)]


def check_compressor(compressor: object, who: str) -> None:
    """Raise TypeError unless it is a compressor; a class is none."""
    if not isinstance(compressor, Compressor):
        raise TypeError(f"{who} takes a compressor, such as TopK(0.01), not {compressor!r}")


def listed_tensors(
    tensors: Iterable[Tensor],
    who: str,
    *,
    what: str = "gradient",
    advice: str = "; leave out parameters without a gradient, or give zeros",
) -> list[Tensor]:
    """Return the tensors, `what` they are, as a list. TypeError unless it is a list of tensors."""
    if isinstance(tensors, Tensor):  # whose rows would be taken for the list
        raise TypeError(f"{who} takes a list of {what}s, not one tensor")
    if not isinstance(tensors, Iterable):
        raise TypeError(f"{who} takes a list of {what}s, not a {type(tensors).__name__}")
    listed = list(tensors)
    for number, tensor in enumerate(listed):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{who}: {what} {number} is a {type(tensor).__name__}, not a tensor{advice}"
            )
    return listed


# ------------------------------------------------------------------------------
# Dtypes, rounding, and random numbers that are the same again.

_FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def check_floating(tensor: Tensor, what: object) -> None:
    """Raise `UnsupportedOperationError` unless gradients of the dtype can be compressed."""
    if tensor.dtype not in _FLOATING:
        raise UnsupportedOperationError(
            f"{what} compresses float16, bfloat16, float32 and float64, not "
            f"{str(tensor.dtype).removeprefix('torch.')}; average such gradients uncompressed"
        )


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute with: float64 for that, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def narrowed(values: Tensor, dtype: torch.dtype, parts: int = 1) -> Tensor:
    """Return the values in the dtype in which they are sent, rounded to nearest.

    Values too large for it become its largest, or the largest that a sum over `parts` members can
    bear: error feedback would send an infinity from a cast again and again. Infinities stay.
    """
    if dtype is values.dtype and parts == 1:
        return values
    most = torch.finfo(dtype).max / (parts + 1 if parts > 1 else 1)  # sums are rounded
    most = min(most, torch.finfo(values.dtype).max)
    if values.device.type == "cpu" and values.numel():  # where a check costs no wait
        low, high = values.aminmax()  # NaN, if there is one
        if -most <= low and high <= most:
            return values.to(dtype, copy=True)
    return torch.where(values.isinf(), values, values.clamp(-most, most)).to(dtype)


def generator(*what: object, device: torch.device) -> torch.Generator:
    """Return a new generator, not torch's global one, seeded with its purpose: numbers, words."""
    digest = xxh3_64_intdigest(repr(what).encode()) >> 1  # 63 bits: it takes no negative number
    return torch.Generator(device).manual_seed(digest)


def is_finite(values: Tensor) -> bool:
    """Return whether all values are finite, at the speed of memory. Waits for the device."""
    dtype = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    if values.numel() == 0 or values.sum(dtype=dtype).isfinite():
        return True  # else a value is not, or the sum is too large itself
    return bool(values.isfinite().all())
