"""`Compressor`: how gradients are made smaller, and how they are averaged in that form.

    compress      a tensor -> a message that counts its bytes
    decompress    a message -> what a receiver makes of it
    average_      a generator: local arithmetic between requests (exchange.py), so that the same
                  code is carried out at once, in the background, or by a test without any rank
    average_shard_   the same, where each part needs its own shard of the mean only

    who          average_: how parts meet                   average_shard_
    Half         all-reduce of messages (*)                 all-to-all, sum
    RandomK      all-reduce of messages                     reduce-scatter
    PowerSGD     two all-reduces of factors                 the same; the product of the shard alone
    TopK         all-gather, everybody sums                 all-to-all, sum
    Quantized    all-to-all, sum, quantize, all-gather      all-to-all, sum

    (*) with a feedback as Quantized, so that it is told of what is rounded off the mean, too

What a part leaves out of its message is lost, unless a `Feedback` (feedback.py) keeps it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from phalanx.compression.memory import Bundle, Remembers, under
from phalanx.errors import UnsupportedOperationError

# ------------------------------------------------------------------------------
# What the parts of an average do together, as data: requests, which somebody else carries out.
#
#     request         this part gives        every part gets
#     Mean(x)         x                      the mean over all parts, of the same shape
#     MeanShard(x)    x, of [parts, ...]     [...]: this part's row of that mean
#     Gather(x)       x                      [parts, *x.shape]: row i is part i's x
#     Swap(x)         x, of [parts, ...]     [parts, ...]: row i is what part i had for this one
#
# So arithmetic knows of no rank and no backend: a test plays all parts in one thread.


class Part(NamedTuple):
    """One of those who average together: number `number` of `parts`."""

    number: int
    parts: int


class Mean(NamedTuple):
    """The mean of a tensor over all parts; the same bits everywhere. It may be overwritten."""

    tensor: Tensor


class MeanShard(NamedTuple):
    """Of the mean of a tensor over all parts row i, for part i. It may be overwritten."""

    tensor: Tensor


class Gather(NamedTuple):
    """The tensors of all parts, which have one shape and dtype, as rows."""

    tensor: Tensor


class Swap(NamedTuple):
    """Row i of a tensor goes to part i."""

    tensor: Tensor


Request: TypeAlias = Mean | MeanShard | Gather | Swap
Rounds: TypeAlias = Generator[Request, Tensor, None]


# ------------------------------------------------------------------------------
# `Feedback`: who keeps what a compressor leaves out, so that it can be sent later.


class Feedback(Protocol):
    """Asked before anything is left out, told afterwards what was.

    A quantized average leaves out twice: each part of its own gradients; and the part that has
    summed a slice, its owner, of that mean.
    """

    def recall(self, bundle: Bundle, part: Part) -> Tensor:
        """What is to be sent of the bundle: flat, float32 or wider; `rest` alone may write it."""

    def keep(self, bundle: Bundle, rest: Callable[[], Tensor]) -> None:
        """`rest()` of that was left out: flat, as long as the bundle. It may be computed in the
        memory that `recall` gave, which nobody reads afterwards.
        """

    def recall_owned(self, bundle: Bundle, start: int, mean: Tensor) -> Tensor:
        """What is to be sent of a mean whose owner this part is: elements `start` and on."""

    def keep_owned(self, bundle: Bundle, start: int, rest: Callable[[], Tensor]) -> None:
        """`rest()` of that was left out."""


class _Forget:
    """Keeps nothing, and so computes nothing."""

    def recall(self, bundle: Bundle, part: Part) -> Tensor:
        return bundle.flat

    def keep(self, bundle: Bundle, rest: Callable[[], Tensor]) -> None:
        pass

    def recall_owned(self, bundle: Bundle, start: int, mean: Tensor) -> Tensor:
        return mean

    def keep_owned(self, bundle: Bundle, start: int, rest: Callable[[], Tensor]) -> None:
        pass


FORGET: Feedback = _Forget()
"""No feedback: what is left out is lost."""


# ------------------------------------------------------------------------------

State = Mapping[str, Tensor]


class Message(Protocol):
    """A compressed tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, exactly."""


class Compressor(ABC):
    """A way to make gradients smaller.

    Tensors are float16, bfloat16, float32 or float64, of any shape, on any device; other dtypes
    raise `UnsupportedOperationError`. What is not finite stays visible: wherever a gradient of one
    part is infinite or NaN, the average of its bundle is not finite either, on all parts.

    Some have a state: random numbers that go on, what was sent before. It changes for good with
    `commit`, after a pass over all gradients; `rollback` forgets a pass that came to nothing.
    """

    @abstractmethod
    def compress(self, tensor: Tensor) -> Any:
        """A `Message` that stands for the tensor, which is not changed."""

    @abstractmethod
    def decompress(self, message: Any) -> Tensor:
        """What a receiver makes of a message: a new tensor, of the compressed one's shape, dtype
        and device.
        """

    @abstractmethod
    def average_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """Overwrite the bundle with the mean over all parts: the same bits on every part.

        A generator: it yields requests, and is sent their results. All parts have to run it for
        bundles alike, in the same order.
        """

    def average_shard_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """Overwrite this part's shard of the bundle with the mean over all parts.

        The flat memory is cut into as many shards as there are parts (`Bundle.shards`), which it is
        padded for. What the other shards hold afterwards is not said. What is not finite is seen by
        the part whose shard it is in, at least. Here by way of the whole mean.
        """
        yield from self.average_(bundle.unpadded(), part, feedback)

    def contraction(self) -> Compressor:
        """The form of this that error feedback works with: what it leaves out is smaller than what
        it is given, on average over time. Itself, unless it trades that for being unbiased.
        """
        return self

    def remembers(self) -> Mapping[str, Remembers]:
        """What it has a state in, by the prefix of the keys under which that is saved."""
        return {}

    def commit(self) -> None:
        """The averages since the last commit count: remember what they leave behind."""
        for memory in self.remembers().values():
            memory.commit()

    def rollback(self) -> None:
        """They do not count: be as after the last commit."""
        for memory in self.remembers().values():
            memory.rollback()

    def state_dict(self) -> dict[str, Tensor]:
        """What this part remembers, as of the last commit: copies, by names."""
        return {
            prefix + key: value
            for prefix, memory in self.remembers().items()
            for key, value in memory.state_dict().items()
        }

    def load_state_dict(self, state: State) -> None:
        """Be as the part, or one like it, was whose `state_dict` this is."""
        for prefix, memory in self.remembers().items():
            memory.load_state_dict(under(prefix, state))

    def reshard(self, states: Sequence[State | None], parts: int) -> list[dict[str, Tensor]]:
        """The states of another number of parts.

        states   of all parts that there were, in their order; None where one is lost
        """
        known = next((state for state in states if state is not None), {})
        return [dict(known) for _ in range(parts)]


def check_floating(tensor: Tensor, what: object) -> None:
    """Raise `UnsupportedOperationError` unless it has a dtype that gradients are compressed in."""
    if tensor.dtype not in _FLOATING:
        raise UnsupportedOperationError(
            f"{what} compresses float16, bfloat16, float32 and float64, not "
            f"{str(tensor.dtype).removeprefix('torch.')}; average such gradients uncompressed"
        )


_FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def check_compressor(compressor: object, who: str) -> None:
    """TypeError unless it is one: a class is none yet."""
    if not isinstance(compressor, Compressor):
        raise TypeError(f"{who} takes a compressor, such as TopK(0.01), not {compressor!r}")


def narrowed(values: Tensor, dtype: torch.dtype, parts: int = 1) -> Tensor:
    """Values in the dtype in which they are sent, rounded to nearest.

    Those that are too large for it are its largest, or as large as a sum over so many parts can
    bear: an infinity that came of a cast would come again and again. Infinities stay.
    """
    if dtype is values.dtype and parts == 1:
        return values
    most = torch.finfo(dtype).max / (parts + 1 if parts > 1 else 1)  # sums are rounded
    most = min(most, torch.finfo(values.dtype).max)
    if values.device.type == "cpu" and values.numel():  # where to look first costs no wait
        low, high = values.aminmax()  # NaN, if there is one
        if -most <= low and high <= most:
            return values.to(dtype, copy=True)
    return torch.where(values.isinf(), values, values.clamp(-most, most)).to(dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute with: float64 for that, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


# ------------------------------------------------------------------------------
# Random numbers that are the same again: a generator for a seed and what it is drawn for.


def generator(*what: object, device: torch.device) -> torch.Generator:
    """A generator on that device, seeded with numbers and words; apart from torch's global one."""
    digest = xxh3_64_intdigest(repr(what).encode()) >> 1  # 63 bits: it takes no negative number
    return torch.Generator(device).manual_seed(digest)


# ------------------------------------------------------------------------------
# Whether values are finite, at the speed of memory.


def is_finite(values: Tensor) -> bool:
    """Whether all are. Their sum tells, unless it is too large itself. Waits for the device."""
    dtype = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    if values.numel() == 0 or values.sum(dtype=dtype).isfinite():
        return True
    return bool(values.isfinite().all())
