"""Whether the ranks' parameters are still the same bits, and whose are not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from phalanx.collectives import all_gather
from phalanx.collectives.check_same import difference, minority
from phalanx.core.backend import Backend
from phalanx.errors import (
    CollectiveTimeoutError,
    DeadlockError,
    DesyncError,
    DistributedError,
    PeerLostError,
)
from phalanx.parallel.buckets import Bucket
from phalanx.wire.memory import readable_bytes


class DriftCheck:
    """Compares a hash of all parameters over the ranks, every so many backward passes.

    parameters   gives them, with their names, in the order of the model
    every        backward passes

    Parameters only: buffers are rank 0's again at each forward pass, or else each rank's own.
    """

    def __init__(
        self, parameters: Callable[[], Iterable[tuple[str, Tensor]]], backend: Backend, every: int
    ) -> None:
        self._parameters = parameters
        self._backend = backend
        self._every = every
        self._passes = 0

    def pass_is_over(self, active: list[int]) -> None:
        """Compare, if it is time: one message of 8 bytes, and a second one only on a difference.

        active   the ranks that train; the others take part and need not be equal

        Raises `DesyncError`, on every rank, that names the first parameter that differs, and the
        ranks that are in the minority with theirs (all of them if there is no majority).
        """
        self._passes += 1
        if self._passes % self._every:
            return
        named = list(self._parameters())
        digests = [_digest(value) for _, value in named]
        whole = xxh3_64_intdigest(b"".join(d.to_bytes(8, "little") for d in digests)) >> 1
        everyone = all_gather(torch.tensor([whole], dtype=torch.int64), self._backend).tolist()
        if len({everyone[rank] for rank in active}) <= 1:
            return
        table = all_gather(torch.tensor([digests], dtype=torch.int64), self._backend).tolist()
        self._raise([name for name, _ in named], {rank: table[rank] for rank in active})

    def _raise(self, names: list[str], digests: dict[int, list[int]]) -> NoReturn:
        different = [
            place for place in range(len(names)) if len({d[place] for d in digests.values()}) > 1
        ]
        place = different[0]
        odd = minority({rank: own[place] for rank, own in digests.items()})
        several = len(odd) > 1
        whose = f"{'ranks' if several else 'rank'} {', '.join(map(str, odd))}"
        verdict = (
            f"{names[place]} of {whose} {'are' if several else 'is'} not that of the majority"
            if len(odd) < len(digests)
            else f"{names[place]} is not the same on {whose}, and no majority says whose is right"
        )
        more = f" (and {len(different) - 1} parameters more)" if len(different) > 1 else ""
        rank = self._backend.rank
        raise DesyncError(
            f"rank {rank}: DDP: after {self._passes} backward passes the ranks' parameters differ: "
            f"{verdict}{more}. Something changed it on that rank only: code that runs on some "
            "ranks, an optimizer with other settings, faulty memory. Go back to a checkpoint, or "
            "call broadcast_parameters(root) with a rank that is right",
            rank=rank,
            peer=next((other for other in odd if other != rank), odd[0]),
            op="DDP",
        )


def _digest(value: Tensor) -> int:
    return xxh3_64_intdigest(readable_bytes(value.detach().cpu())) >> 1  # torch has no full uint64


# ------------------------------------------------------------------------------
# Steps that are skipped on every rank, because gradients of one are infinite or not a number.

log = logging.getLogger("phalanx")


class Skip(NamedTuple):
    """A step that was skipped.

    number      of the averaging backward pass, counted from 0
    parameters  for each rank with such gradients, the first parameter of the model that has one;
                of rank -1 where all ranks' gradients were finite and their average is not
    """

    number: int
    parameters: dict[int, str]


class FiniteCheck:
    """Looks for gradients that are not finite, and agrees with the other ranks on what it found.

    skipped   how many steps were
    last      the last of them
    """

    def __init__(self, names: dict[nn.Parameter, str], backend: Backend) -> None:
        self.skipped = 0
        self.last: Skip | None = None
        self._names = list(names.values())
        self._place = {parameter: place for place, parameter in enumerate(names)}
        self._backend = backend
        self._passes = 0
        self._first = len(self._names)  # none

    def look(self, bucket: Bucket) -> None:
        """See what is in a bucket: one pass over its memory, and one result to wait for."""
        self._first = min(self._first, self._first_in(bucket))

    def forget(self) -> None:
        """A pass did not come to its end."""
        self._first = len(self._names)

    def agree(self, averaged: list[Bucket]) -> bool:
        """Whether this step is to be skipped, the same on every rank. One message of 8 bytes."""
        none = len(self._names)
        mine, self._first = self._first, none
        found = all_gather(torch.tensor([mine], dtype=torch.int64), self._backend).tolist()
        bad = {rank: self._names[first] for rank, first in enumerate(found) if first < none}
        if not bad:  # and then the average may still be too large for its dtype, on all ranks alike
            first = min(map(self._first_in, averaged), default=none)
            bad = {-1: self._names[first]} if first < none else {}
        number, self._passes = self._passes, self._passes + 1
        if not bad:
            return False
        self.skipped += 1
        self.last = Skip(number, bad)
        log.warning(
            "rank %d: DDP: step %d is skipped on every rank: gradients are not finite: %s",
            self._backend.rank,
            number,
            "; ".join(
                f"{name} on rank {rank}" if rank >= 0 else f"the average of {name}"
                for rank, name in bad.items()
            ),
        )
        return True

    def _first_in(self, bucket: Bucket) -> int:
        none = len(self._names)
        if _is_finite(bucket.flat):
            return none
        return min(
            (self._place[p] for p, view in bucket.views.items() if not _is_finite(view)),
            default=none,
        )


def _is_finite(values: Tensor) -> bool:
    """Whether all are. Their sum tells, at the speed of memory, unless it is too large itself."""
    wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    if values.numel() == 0 or values.sum(dtype=wide).isfinite():
        return True
    return bool(values.isfinite().all())


# ------------------------------------------------------------------------------
# Whether the ranks hold the same model, and which parameter differs if they do not.


def describe(name: str, tensor: Tensor) -> str:
    """A parameter or buffer for a message: its name, dtype, shape, and whether it is frozen."""
    frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return f"{name} ({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{frozen})"


def check_same_model(
    module: nn.Module, backend: Backend, options: Mapping[str, object], *, who: str = "DDP"
) -> None:
    """Raise `DesyncError` on every rank unless all have parameters alike, in the same order.

    Names, shapes, dtypes and `requires_grad` are compared, not values; and `options`, which every
    rank has to give alike, too. Costs one message of 16 bytes; the descriptions themselves are
    exchanged only when they differ.
    """
    mine = [f"{name}={value!r}" for name, value in options.items()]
    mine += [describe(name, parameter) for name, parameter in module.named_parameters()]
    mine += [f"buffer {describe(name, buffer)}" for name, buffer in module.named_buffers()]
    differ = difference(mine, backend, end="no more parameters")
    if differ is None:
        return
    what, remedy = (
        (f"options of {who}", "Pass the same ones on every rank")
        if differ.place < len(options)
        else ("models", "Build the same model on every rank, in the same order")
    )
    raise DesyncError(
        f"rank {backend.rank}: the ranks' {what} differ: {differ.text}. {remedy}",
        rank=backend.rank,
        peer=differ.odd[0],
        op=who,
    )


# ------------------------------------------------------------------------------
# Whether the ranks are about to do the same, and what they say differently if they are not.


def check_agreement(lines: Sequence[str], backend: Backend, *, op: str, remedy: str) -> None:
    """Raise `DesyncError` on every rank unless all of them say the same, line by line.

    lines    what this rank is about to do, in words
    op       who asks, for the message
    remedy   what to do about it, a sentence without its full stop

    Blocks for one message of 16 bytes; the lines themselves are exchanged only when they differ.
    The error names the first line that does, and the ranks in the minority (if there is none, those
    that do not say what rank 0 says).
    """
    differ = difference(lines, backend, end="nothing more")
    if differ is None:
        return
    raise DesyncError(
        f"rank {backend.rank}: {op}: the ranks differ: {differ.text}. {remedy}",
        rank=backend.rank,
        peer=differ.odd[0],
        op=op,
    )


def describe_with_values(name: str, tensor: Tensor) -> str:
    """A parameter or buffer for `check_agreement`, with a hash of its values.

    On the meta device there are none. Costs reading it once.
    """
    if tensor.is_meta:
        return f"{describe(name, tensor)} without values"
    digest = xxh3_64_hexdigest(readable_bytes(tensor.detach().cpu()))
    return f"{describe(name, tensor)} with values of hash {digest}"


# ------------------------------------------------------------------------------
# What a disagreement between ranks means, in the words of who wraps the module.


@contextmanager
def hint(text: str, *, who: str = "DDP") -> Iterator[None]:
    """Add a sentence to the error that says that ranks do different things, or one does nothing."""
    try:
        yield
    except DistributedError as error:
        if isinstance(error, _APART) or _has_left(error):
            error.message = f"{error.message.rstrip('.')}. {who}: {text}"
        raise


_APART = (DesyncError, CollectiveTimeoutError)


def _has_left(error: DistributedError) -> bool:
    """Whether somebody has ended in peace: one who died does not mean anything by it."""
    if isinstance(error, PeerLostError):
        return " left" in error.message
    return isinstance(error, DeadlockError) and "(which has returned)" in error.message


_ANOTHER = (
    "another one does something else: its batches ran out (see DDP.join), a backward pass of it "
    "failed or was left out, or its loss does not depend on the model's outputs"
)
AVERAGING = f"this rank averages gradients, and {_ANOTHER}"
BEGINNING = f"this rank begins a forward pass, and {_ANOTHER}"
UNANSWERED = (
    "on this rank a forward pass was followed by no averaging backward pass through its outputs: "
    "the loss does not depend on them, or backward was left out, or failed"
)
