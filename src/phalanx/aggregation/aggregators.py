"""`GradientAggregator`: gradients in, their average out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor

from phalanx.collectives import ReduceOp, all_reduce_coalesced
from phalanx.collectives.check_same import difference
from phalanx.compression import Compressor
from phalanx.compression.compressor import (
    GradientBucket,
    Member,
    check_compressor,
    check_floating,
    is_finite,
)
from phalanx.compression.state import RESIDUAL
from phalanx.core.backend import Backend
from phalanx.errors import DesyncError, SizeMismatchError, UnsupportedOperationError
from phalanx.parallel.averaging import Exchange
from phalanx.parallel.compressor_state import load_own, own_state


class GradientAggregator(ABC):
    """Averages gradients over ranks. One method: to write another one, write `aggregate`.

    backend   the ranks; None if there is one only
    steps     how many training steps it has been used for (`distributed_train_step` counts them)
    """

    backend: Backend | None = None
    steps: int = 0

    @abstractmethod
    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The average of each of some gradients over all ranks.

        gradients   any number, of any shapes and dtypes; alike on every rank, in the same order;
                    not changed

        Blocks until this rank has the averages, of the same shapes and dtypes: the same bits on
        every rank.
        """


class LocalAggregator(GradientAggregator):
    """Of one rank: the average is the gradient. Tensors are given back as they are, not copied."""

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients themselves, in a new list."""
        return checked(gradients, "LocalAggregator")


def checked(gradients: Iterable[Tensor], who: str, backend: Backend | None = None) -> list[Tensor]:
    """The gradients as a list. TypeError unless it is one of tensors, and for several ranks
    `UnsupportedOperationError` unless they are dense.
    """
    rank = None if backend is None else backend.rank
    where = f"{who}.aggregate" if rank is None else f"rank {rank}: {who}.aggregate"
    if isinstance(gradients, Tensor):  # whose rows would be taken for gradients
        raise TypeError(f"{where} takes a list of gradients, not one tensor")
    if not isinstance(gradients, Iterable):
        raise TypeError(f"{where} takes a list of gradients, not a {type(gradients).__name__}")
    listed = list(gradients)
    for number, gradient in enumerate(listed):
        if not isinstance(gradient, Tensor):
            raise TypeError(
                f"{where}: gradient {number} is a {type(gradient).__name__}, not a tensor; "
                "leave out parameters without a gradient, or give zeros"
            )
        if rank is not None and (gradient.layout is not torch.strided or gradient.is_nested):
            raise UnsupportedOperationError(
                f"{where}: gradient {number} is {gradient.layout}; only dense gradients are "
                "averaged: pass sparse=False to the embedding, or give gradient.to_dense()",
                rank=rank,
                op="aggregate",
            )
    return listed


# ------------------------------------------------------------------------------
# The average by all-reduce: every rank does the same.


class AllReduceAggregator(GradientAggregator):
    """The mean over the ranks of a backend, all gradients of a dtype in one message.

    reproducible   sum in rank order: the same bits on every backend and for every list
    timeout        seconds that a message waits at most; by default the backend's

    A ring sends 2(p-1)/p of the gradients' bytes from each of p ranks, and 16 bytes to compare the
    lists. Raises `DesyncError` on every rank, naming the first gradient that differs, before
    anything is summed; and what `all_reduce_coalesced` raises.
    """

    backend: Backend

    def __init__(
        self, backend: Backend, *, reproducible: bool = False, timeout: float | None = None
    ) -> None:
        self.backend = backend
        self.reproducible = reproducible
        self.timeout = timeout

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The means, new tensors."""
        listed = checked(gradients, "AllReduceAggregator", self.backend)
        check_same_list(listed, self.backend, "AllReduceAggregator", timeout=self.timeout)
        return all_reduce_coalesced(
            [gradient.detach() for gradient in listed],
            self.backend,
            ReduceOp.MEAN,
            reproducible=self.reproducible,
            timeout=self.timeout,
        )


# ------------------------------------------------------------------------------
# The average of compressed gradients.


class CompressedAggregator(GradientAggregator):
    """The mean over the ranks of a backend, of which messages are compressed.

    compressor   `ErrorFeedback(TopK(0.01))`, `PowerSGD(4)`, ...; a copy is made, `.compressor`, so
                 that one may be given to many

    All gradients of a dtype are compressed together (top-k takes the largest of all of them);
    matrices keep their shapes. A gradient is known to the compressor by its number in the list:
    always give those of the same parameters (under error feedback, `SizeMismatchError` on every
    rank for another shape than before). Raises `DesyncError` on every rank, naming the first
    gradient that differs, before anything is summed; `UnsupportedOperationError`, before anything
    is sent, for dtypes that cannot be compressed.

    Where averages are not finite they are returned so, and the compressor's state stays as it was:
    such a step is skipped. So it does if a call fails.
    """

    backend: Backend

    def __init__(self, backend: Backend, compressor: Compressor) -> None:
        check_compressor(compressor, "CompressedAggregator")
        self.backend = backend
        self.compressor = deepcopy(compressor)
        self._exchange = Exchange(backend)
        self._shapes: dict[int, torch.Size] = {}  # of what something may be left over of

    @property
    def bytes_sent(self) -> int:
        """By this rank so far, as rings and direct messages send them."""
        return self._exchange.bytes_sent

    @torch.no_grad()
    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The means, new tensors."""
        listed = checked(gradients, "CompressedAggregator", self.backend)
        for number, gradient in enumerate(listed):
            which = f"rank {self.backend.rank}: gradient {number}: {self.compressor}"
            check_floating(gradient, which)
        who = f"CompressedAggregator({self.compressor!r})"
        check_same_list(listed, self.backend, who)
        self._check_shapes(listed)
        groups = numbers_by_kind(listed)
        bundles = [
            GradientBucket.of([listed[n] for n in numbers], [*map(str, numbers)])
            for numbers in groups
        ]
        part = Member(self.backend.rank, self.backend.world_size)
        try:
            under_way = [
                self._exchange.begin(self.compressor.average_(bundle, part), who)
                for bundle in bundles
            ]
            self._exchange.finish(under_way)
        except BaseException:
            self.compressor.rollback()
            raise
        if all(is_finite(bundle.flat) for bundle in bundles):
            self.compressor.commit()
            self._shapes.update((number, g.shape) for number, g in enumerate(listed))
        else:
            self.compressor.rollback()
        results: dict[int, Tensor] = {}
        for numbers, bundle in zip(groups, bundles, strict=True):
            same = [listed[number] for number in numbers]
            results.update(zip(numbers, cut_like(bundle.flat, same), strict=True))
        return [results[number] for number in range(len(listed))]

    def state_dict(self) -> dict[str, Tensor]:
        """What the compressor remembers on this rank, under keys that say which rank it is:
        `compression@<rank>/<ranks>.<key>`. Those of all ranks may be joined into one dict.
        """
        return own_state(self.compressor, self.backend)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from states that were saved by any number of ranks, joined into one dict.

        For as many ranks as before, each needs its own only; else all of them are needed. A warning
        in the log says which ones are missing: what these had left over is lost. Nothing is sent.
        """
        load_own(self.compressor, state, self.backend)
        self._shapes.clear()

    def _check_shapes(self, listed: Sequence[Tensor]) -> None:
        """Refuse gradients in another order: others' leavings would be added to them."""
        if RESIDUAL not in self.compressor.remembers():
            return
        for number, gradient in enumerate(listed):
            before = self._shapes.get(number, gradient.shape)
            if before != gradient.shape:
                rank = self.backend.rank
                raise SizeMismatchError(
                    f"rank {rank}: {self.compressor}: gradient {number} has the shape "
                    f"{list(gradient.shape)}, and what is left over is of one of {list(before)}: "
                    "give the gradients of the same parameters in the same order in every call, or "
                    "make a new aggregator for others",
                    rank=rank,
                    op="aggregate",
                )


# ------------------------------------------------------------------------------
# Whether all ranks give lists of gradients alike.


def check_same_list(
    gradients: Sequence[Tensor], backend: Backend, who: str, *, timeout: float | None = None
) -> None:
    """Raise `DesyncError` on every rank, naming the first gradient that differs, unless all have as
    many, of the same shapes and dtypes. Blocks for one message of 16 bytes, before any sum, and at
    most `timeout` seconds, by default the backend's.
    """
    mine = [
        f"gradient {number} ({str(gradient.dtype).removeprefix('torch.')} {list(gradient.shape)})"
        for number, gradient in enumerate(gradients)
    ]
    differ = difference([f"called {who}", *mine], backend, end="no more gradients", timeout=timeout)
    if differ is None:
        return
    if differ.place == 0:
        problem = f"the ranks do different things: {differ.text}"
    else:
        problem = (
            f"the ranks' lists of gradients differ: {differ.text}. Give the gradients of the same "
            "parameters on every rank, in the same order, and zeros for one that a rank does not "
            "have"
        )
    raise DesyncError(
        f"rank {backend.rank}: {who}: {problem}",
        rank=backend.rank,
        peer=differ.odd[0],
        op="aggregate",
    )


# ------------------------------------------------------------------------------
# Lists of tensors as flat memory, one piece for each dtype, and back.


def numbers_by_kind(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Which tensors are of one dtype, and on one device: their numbers."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(number)
    return list(kinds.values())


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Copies of some tensors of one kind, one after the other."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def cut_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """New tensors with the values of flat memory, in the shapes of those that it was made of."""
    sizes = [tensor.numel() for tensor in tensors]
    return [
        piece.view(like.shape).clone()
        for piece, like in zip(torch.split(flat, sizes), tensors, strict=True)
    ]
