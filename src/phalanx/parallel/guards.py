"""Guards: the ranks' comparisons before and during training, so that no rank diverges.

before training     check_same_model    names, shapes, dtypes, options     one message of 8 bytes
in each pass        FiniteCheck         infinite or NaN gradients          one message of 8 bytes
every k-th pass     DriftCheck          hashes of the parameters           one message of 8 bytes
when ranks diverge  explain             adds the likely cause to an error  no message
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ContextDecorator
from types import TracebackType
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from phalanx.collectives import all_gather
from phalanx.collectives.check_same import difference, minority
from phalanx.compression.compressor import is_finite
from phalanx.core.backend import Backend
from phalanx.core.replaceable import ReplaceableBackend
from phalanx.errors import (
    CollectiveTimeoutError,
    DeadlockError,
    DesyncError,
    DistributedError,
    MisuseError,
    PeerLostError,
)
from phalanx.parallel.averaging import Bucket
from phalanx.wire.memory import readable_bytes

log = logging.getLogger("phalanx")


def refuse(
    who: str,
    rank: int,
    problem: str,
    kind: type[DistributedError] = MisuseError,
    peer: int | None = None,
) -> NoReturn:
    """Raise an error of a wrapper, or of another `who`, on this rank."""
    raise kind(f"rank {rank}: {who}: {problem}", rank=rank, peer=peer, op=who)


def check_ranks_stay(who: str, backend: Backend, instead: str) -> None:
    """Raise `MisuseError` on the backend of an elastic job, whose ranks come and go."""
    if isinstance(backend, ReplaceableBackend):
        refuse(who, backend.rank, f"on the backend of an elastic job: {instead}")


# ------------------------------------------------------------------------------
# Before training: do the ranks hold the same model, and are they about to do the same?


def describe(name: str, tensor: Tensor) -> str:
    """Describe a parameter or buffer for a message: name, dtype, shape, whether it is frozen."""
    frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return f"{name} ({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{frozen})"


def describe_with_values(name: str, tensor: Tensor) -> str:
    """Return a parameter or buffer for `check_agreement`, with a hash of its values.

    The meta device has none. Reads the tensor once.
    """
    if tensor.is_meta:
        return f"{describe(name, tensor)} without values"
    digest = xxh3_64_hexdigest(readable_bytes(tensor.detach().cpu()))
    return f"{describe(name, tensor)} with values of hash {digest}"


def check_same_model(
    module: nn.Module, backend: Backend, options: Mapping[str, object], *, who: str = "DDP"
) -> None:
    """Raise `DesyncError` on every rank unless all have parameters alike, in the same order.

    Compares names, shapes, dtypes and `requires_grad`, not values; and `options`, which have to be
    equal on every rank, too. Costs one message of 8 bytes; the descriptions themselves are
    exchanged only when they differ.
    """
    mine = [f"{name}={value!r}" for name, value in options.items()]
    mine += [describe(name, parameter) for name, parameter in module.named_parameters()]
    mine += [f"buffer {describe(name, buffer)}" for name, buffer in module.named_buffers()]
    differ = difference(mine, backend, end="no more parameters")
    if differ is not None:
        what, remedy = "models", "Build the same model on every rank, in the same order"
        if differ.place < len(options):
            what, remedy = f"options of {who}", "Pass the same ones on every rank"
        raise DesyncError(
            f"rank {backend.rank}: the ranks' {what} differ: {differ.text}. {remedy}",
            rank=backend.rank,
            peer=differ.odd[0],
            op=who,
        )


def check_agreement(lines: Sequence[str], backend: Backend, *, op: str, remedy: str) -> None:
    """Raise `DesyncError` on every rank unless all give the same lines.

    lines    this rank's next action, in words
    op       the operation, for the message
    remedy   the advice, a sentence without its full stop

    Blocks for one message of 8 bytes; the lines themselves are exchanged only when they differ. The
    error names the first line that differs, and the ranks in the minority (if there is none, those
    that differ from rank 0).
    """
    differ = difference(lines, backend, end="nothing more")
    if differ is not None:
        problem = f"the ranks differ: {differ.text}. {remedy}"
        refuse(op, backend.rank, problem, DesyncError, peer=differ.odd[0])


# ------------------------------------------------------------------------------
# In each pass: a step is skipped on every rank if gradients of one rank are infinite or NaN.


class Skip(NamedTuple):
    """A step that was skipped.

    number      of the averaging backward pass, counted from 0
    parameters  for each rank with such gradients, the first parameter of the model that has one;
    of rank -1 if all ranks' gradients were finite and their average is not
    """

    number: int
    parameters: dict[int, str]


def first_on_ranks(mine: int, names: Sequence[str], backend: Backend) -> dict[int, str]:
    """Return each rank's name at `mine`, if that is a place in `names`. One message of 8 bytes."""
    found = all_gather(torch.tensor([mine], dtype=torch.int64), backend).tolist()
    return {rank: names[first] for rank, first in enumerate(found) if first < len(names)}


class FiniteCheck:
    """Looks for gradients that are not finite, and agrees with the other ranks on the result.

    skipped   number of skipped steps
    last      the last of them
    """

    def __init__(self, names: Mapping[Tensor, str], backend: Backend) -> None:
        self.skipped = 0
        self.last: Skip | None = None
        self._names = list(names.values())
        self._place = {parameter: place for place, parameter in enumerate(names)}
        self._backend = backend
        self._passes = 0
        self._first = self._none = len(self._names)

    def look(self, bucket: Bucket) -> None:
        """Look at a bucket: one pass over its memory, and one result to wait for."""
        self._first = min(self._first, self._first_in(bucket))

    def forget(self) -> None:
        """Forget the findings of a pass that did not end."""
        self._first = self._none

    def agree(self, averaged: Sequence[Bucket]) -> bool:
        """Return whether all ranks skip this step. One message of 8 bytes; another one if means are
        not on all ranks.
        """
        mine, self._first = self._first, self._none
        bad = first_on_ranks(mine, self._names, self._backend)
        if not bad:  # and then the average may still be too large for its dtype, on all ranks alike
            first = min(map(self._first_in, averaged), default=self._none)
            if any(bucket.owner is not None for bucket in averaged):
                found = first_on_ranks(first, self._names, self._backend).values()
                first = min((self._names.index(name) for name in found), default=self._none)
            bad = {-1: self._names[first]} if first < self._none else {}
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
        """Return the place in the model of a bucket's first parameter with a bad gradient."""
        if is_finite(bucket.flat):
            return self._none
        return min(
            (self._place[p] for p, view in bucket.views.items() if not is_finite(view)),
            default=self._none,
        )


# ------------------------------------------------------------------------------
# Every k-th pass: are the ranks' parameters still the same bits, and which ranks' are not?


class DriftCheck:
    """Compares a hash of all parameters over the ranks after each `every` backward passes.

    parameters   returns them, with their names, in the order of the model
    every        number of backward passes

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

        Raises `DesyncError` on every rank. It names the first parameter that differs, and the ranks
        in the minority (all of them if there is no majority).
        """
        self._passes += 1
        if self._passes % self._every:
            return
        digests = {  # of 63 bits: torch has no full uint64
            name: xxh3_64_intdigest(readable_bytes(value.detach().cpu())) >> 1
            for name, value in self._parameters()
        }
        whole = xxh3_64_intdigest(b"".join(d.to_bytes(8, "little") for d in digests.values())) >> 1
        everyone = all_gather(torch.tensor([whole], dtype=torch.int64), self._backend).tolist()
        if len({everyone[rank] for rank in active}) > 1:
            mine = torch.tensor([list(digests.values())], dtype=torch.int64)
            table = all_gather(mine, self._backend).tolist()
            self._raise(list(digests), {rank: table[rank] for rank in active})

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
        refuse(
            "DDP",
            rank,
            f"after {self._passes} backward passes the ranks' parameters differ: {verdict}{more}. "
            "Something changed it on that rank only: code that runs on some ranks, an optimizer "
            "with other settings, faulty memory. Go back to a checkpoint, or call "
            "broadcast_parameters(root) with a rank that is right",
            DesyncError,
            peer=next((other for other in odd if other != rank), odd[0]),
        )


# ------------------------------------------------------------------------------
# When ranks diverge: the likely cause, in the words of the wrapper.

_ANOTHER = (
    "another one does something else: its batches ran out (see DDP.join), a backward pass of it "
    "failed or was left out, or its loss does not depend on the model's outputs"
)
EVERY_RANK = (
    "every rank calls the model, its units, its methods and the optimizer in the same order. If "
    "some ranks leave out a layer, pass a unit= around it that every rank calls, or call it on all "
    "and multiply what it gives by zero"
)
AVERAGING = f"this rank averages gradients, and {_ANOTHER}"
BEGINNING = f"this rank begins a forward pass, and {_ANOTHER}"
UNANSWERED = (
    "on this rank a forward pass was followed by no averaging backward pass through its outputs: "
    "the loss does not depend on them, or backward was left out, or failed"
)


class every_rank_does(ContextDecorator):  # noqa: N801  # a generator costs 1 us more a call
    """Add a rule to errors raised in here that say that ranks do different things."""

    def __init__(self, who: str) -> None:
        self._who = who

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, DistributedError) and EVERY_RANK not in error.message:
            explain(error, EVERY_RANK, who=self._who)


def explain(error: DistributedError, cause: str, *, who: str = "DDP") -> None:
    """Add a sentence to an error which says that ranks do different things, or one does nothing.

    Also for a rank that closed its backend early. Not for one that died: that is no divergence.
    """
    diverged = (
        isinstance(error, (DesyncError, CollectiveTimeoutError))
        or (isinstance(error, PeerLostError) and " left" in error.message)
        or (isinstance(error, DeadlockError) and "(which has returned)" in error.message)
    )
    if diverged:
        end = "\n" if "\n" in error.message else ". "
        error.message = f"{error.message.rstrip('.')}{end}{who}: {cause}"
