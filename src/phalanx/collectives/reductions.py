"""The collectives that reduce: all_reduce, reduce, reduce_scatter, and many tensors at a time.

Each is written once, as its request; the `async_` forms are made of the blocking ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor
from typing_extensions import override

from phalanx.collectives.layout import ranges_of
from phalanx.collectives.pieces import Pieces
from phalanx.collectives.request import (
    ProgramRequest,
    Request,
    asynchronous,
    check_slices,
    check_tensor,
    collective,
    finish_into,
    given,
    out_for,
    work_in_place,
)
from phalanx.collectives.resolve import Options, TensorRequest, checked_algorithm
from phalanx.core.backend import Backend
from phalanx.core.reduce_op import ReduceOp, reduction_for
from phalanx.core.work import Work
from phalanx.wire.memory import check_distinct, copy_bits, plain


@collective
def all_reduce(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    into: Tensor | None = None,
    label: str = "",
    timeout: float | None = None,
) -> Request[Tensor]:
    """The reduction of every rank's `tensor`, bit for bit the same on all of them.

    tensor      of the same shape and dtype on every rank; not changed
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`, `two_level`
    reproducible  sum in rank order, whatever the backend and the size (it selects `direct`)
    into        where to put the result, of the same shape and dtype; else a new tensor
    label       what the call is about: ranks whose labels differ get a `DesyncError`
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has the result. A ring sends 2(p-1)/p of the tensor's bytes from each
    of p ranks, a slice more or less if p does not divide the elements (Patarasuk & Yuan 2009),
    which is optimal; a tree or star, more from rank 0. Not recorded by autograd. Raises
    `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`; `UnsupportedOperationError` if the
    reduction has no meaning for the dtype.
    """
    check_tensor(tensor, backend, "all_reduce")
    shape, dtype = tensor.shape, tensor.dtype
    out, result = out_for(shape, dtype, backend, into, "all_reduce", device=tensor.device)
    options = (algorithm, reproducible, label, timeout)
    return TensorRequest(
        backend, "all_reduce", shape, dtype, given(tensor, out, place=0), out, result, options, op
    )


@collective
def all_reduce_(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    label: str = "",
    timeout: float | None = None,
) -> Request[Tensor]:
    """`all_reduce` in place: `tensor` is overwritten, and returned. Half the memory traffic."""
    check_tensor(tensor, backend, "all_reduce_")
    memory, result = work_in_place(tensor)
    options = (algorithm, reproducible, label, timeout)
    return TensorRequest.all_reduce_(memory, backend, op, result, options)


@collective
def reduce(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    into: Tensor | None = None,
    label: str = "",
    timeout: float | None = None,
) -> Request[Tensor | None]:
    """The reduction of every rank's `tensor`, on rank `root`; None on the others.

    tensor      of the same shape and dtype on every rank; not changed
    root        the rank that gets the result; the same on every rank
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`, `two_level`
    reproducible  sum in rank order, whatever the backend and the size (it selects `direct`)
    into        where the root puts the result, of the same shape and dtype; else a new tensor. The
                other ranks need not give it, and leave it alone
    label       what the call is about: ranks whose labels differ get a `DesyncError`
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until the root has the result; the others, until their part is done. A tree sends the
    tensor once from every rank but the root; a ring (p-1)/p of it, and then what is complete to the
    root, which gets 2(p-1)/p of it rather than log2 p times the tensor; so does halving, if p is a
    power of two (Rabenseifner 2004). Not recorded by autograd. Raises `InvalidRankError` for a root
    that does not exist, `UnsupportedOperationError` if the reduction has no meaning for the dtype;
    `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`.
    """
    check_tensor(tensor, backend, "reduce")
    root = backend.check_rank(root, "root")
    shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
    result: Callable[[], Tensor | None]
    source, out, result = plain(tensor), None, lambda: None
    if backend.rank == root:
        out, result = out_for(shape, dtype, backend, into, "reduce", device=device)
        source = given(tensor, out, place=0)
    options = (algorithm, reproducible, label, timeout)
    return TensorRequest(backend, "reduce", shape, dtype, source, out, result, options, op, root)


@collective
def reduce_(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    label: str = "",
    timeout: float | None = None,
) -> Request[Tensor]:
    """`reduce` in place: the root's `tensor` is overwritten, the others' is not; it is returned."""
    check_tensor(tensor, backend, "reduce_")
    root = backend.check_rank(root, "root")
    has_result = backend.rank == root
    source, result = work_in_place(tensor) if has_result else (plain(tensor), lambda: tensor)
    out = source if has_result else None
    options = (algorithm, reproducible, label, timeout)
    return TensorRequest(
        backend, "reduce", tensor.shape, tensor.dtype, source, out, result, options, op, root
    )


@collective
def reduce_scatter(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    into: Tensor | None = None,
    label: str = "",
    timeout: float | None = None,
) -> Request[Tensor]:
    """Slice `rank` of the reduction of every rank's `tensor`.

    tensor      of the same shape and dtype on every rank; not changed. Its dim 0 has to be
                divisible by the world size: `[p * n, ...]` gives `[n, ...]`. A tensor of no
                dimensions has none, and is refused in a world of 1 as in any
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`, `two_level`
    reproducible  sum in rank order, whatever the backend and the size (it selects `direct`)
    into        where to put the result, of that shape and the same dtype; else a new tensor
    label       what the call is about: ranks whose labels differ get a `DesyncError`
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has its slice. A ring sends (p-1)/p of the tensor's bytes from each of
    p ranks, which is optimal. Raises `SizeMismatchError` before anything is sent if dim 0 does not
    divide or `into` does not fit; `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`.
    """
    return _scattered(tensor, backend, op, into, (algorithm, reproducible, label, timeout))


def _scattered(
    tensor: Tensor, backend: Backend, op: ReduceOp, into: Tensor | None, options: Options
) -> TensorRequest[Tensor]:
    check_tensor(tensor, backend, "reduce_scatter")
    whole, dtype = tensor.shape, tensor.dtype
    shape = check_slices(whole, backend, "reduce_scatter")
    out, result = out_for(shape, dtype, backend, into, "reduce_scatter", device=tensor.device)
    return TensorRequest(
        backend, "reduce_scatter", whole, dtype, given(tensor, out), out, result, options, op
    )


async_all_reduce = asynchronous(all_reduce)
async_all_reduce_ = asynchronous(all_reduce_)
async_reduce = asynchronous(reduce)
async_reduce_ = asynchronous(reduce_)
async_reduce_scatter = asynchronous(reduce_scatter)


# ------------------------------------------------------------------------------
# Of gradients, which are overwritten, and of which a rank's own slice may lie in pieces.


@collective
def reduce_overwriting_(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    label: str = "",
) -> Request[Tensor]:
    """`reduce_` of a tensor that the other ranks let be overwritten, too, which saves copies."""
    make: Callable[..., TensorRequest[Tensor]] = reduce_.request  # type: ignore[attr-defined]
    request = make(tensor, backend, root, op, algorithm=algorithm, label=label)
    request.consume = True
    return request


@collective
def reduce_scatter_pieces(
    pieces: Pieces,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    label: str = "",
) -> Request[Tensor]:
    """`reduce_scatter` of a tensor that may be overwritten, which saves a copy of it."""
    request = _scattered(pieces.tensor, backend, op, into, (algorithm, False, label, None))
    request.elsewhere, request.consume = pieces.elsewhere, True
    return request


async_reduce_overwriting_ = asynchronous(reduce_overwriting_)
async_reduce_scatter_pieces = asynchronous(reduce_scatter_pieces)


# ------------------------------------------------------------------------------
# Many tensors, as few messages.

COALESCED = "all_reduce_coalesced"


@collective
def all_reduce_coalesced(
    tensors: Iterable[Tensor],
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    label: str = "",
    timeout: float | None = None,
) -> Request[list[Tensor]]:
    """The reduction of each of some tensors, bit for bit the same on every rank.

    tensors     any number, of any dtypes; equally many on every rank, in the same order, of the
                same shapes and dtypes; not changed
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`, `two_level`
    reproducible  sum in rank order: the same bits as if each had been reduced alone
    label       what the call is about: ranks whose labels differ get a `DesyncError`
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has the results, new tensors, in order. All tensors of one dtype are
    copied into one, and reduced by one `all_reduce`. Raises as that does, and `DesyncError` if
    ranks give different lists.
    """
    options = (algorithm, reproducible, label, timeout)
    return _Coalesced(backend, _listed(tensors, backend), op, _new, options)


@collective
def all_reduce_coalesced_(
    tensors: Iterable[Tensor],
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    label: str = "",
    timeout: float | None = None,
) -> Request[list[Tensor]]:
    """`all_reduce_coalesced` in place: the tensors are overwritten, and returned as a list."""
    listed = _listed(tensors, backend)
    for tensor in listed:
        check_distinct(tensor)
    options = (algorithm, reproducible, label, timeout)
    return _Coalesced(backend, listed, op, finish_into, options)


async_all_reduce_coalesced = asynchronous(all_reduce_coalesced)
async_all_reduce_coalesced_ = asynchronous(all_reduce_coalesced_)


@dataclass(slots=True)
class _Coalesced(Request[list[Tensor]]):
    """One all_reduce for each dtype and device among the tensors.

    `deliver(tensor, reduced)` makes a result of a tensor, and of its place in flat memory.
    """

    backend: Backend
    tensors: list[Tensor]
    op: ReduceOp
    deliver: Callable[[Tensor, Tensor], Tensor]
    options: Options

    @override
    def issue(self, *, background: bool = True) -> Work[list[Tensor]]:
        """Issue all, which run in their order: when the last is done, all are."""
        backend, tensors, op = self.backend, self.tensors, self.op
        for tensor in tensors:
            reduction_for(op, tensor.dtype, rank=backend.rank, collective=COALESCED)
        algorithm, reproducible, label, timeout = self.options
        algorithm = checked_algorithm("all_reduce", algorithm, backend, reproducible=reproducible)
        what = f"{_signature(tensors)}, {label}" if label else _signature(tensors)
        options = (algorithm, False, what, timeout)
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, tensor in enumerate(tensors):
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(number)
        reduced: dict[int, Tensor] = {}  # a tensor's number -> its place in flat memory

        def results() -> list[Tensor]:
            return [self.deliver(tensor, reduced[n]) for n, tensor in enumerate(tensors)]

        work: Work[list[Tensor]] | None = None
        for (dtype, device), numbers in by_kind.items():
            places = ranges_of([tensors[n].numel() for n in numbers])
            flat = backend.empty(places[-1][1], dtype=dtype, device=device)
            for number, place in zip(numbers, places, strict=True):
                reduced[number] = flat[slice(*place)].view(tensors[number].shape)
                copy_bits(reduced[number], tensors[number])
            request = TensorRequest.all_reduce_(flat, backend, op, results, options)
            request.name = COALESCED
            work = request.issue(background=background)
        if work is None:
            return ProgramRequest(backend, COALESCED, (), (), results, what, timeout).issue()
        return work


def _new(tensor: Tensor, reduced: Tensor) -> Tensor:
    """Return a tensor of its own, so that the others do not stay in memory with it."""
    return reduced.clone()


def _listed(tensors: Iterable[Tensor], backend: Backend) -> list[Tensor]:
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        what = "one tensor" if isinstance(tensors, Tensor) else type(tensors).__name__
        raise TypeError(f"rank {backend.rank}: {COALESCED} takes a list of tensors, not {what}")
    listed = list(tensors)
    for tensor in listed:
        check_tensor(tensor, backend, COALESCED)
    return listed


def _signature(tensors: list[Tensor]) -> str:
    """Return the list's signature, the same on every rank: length, and a hash of the tensors."""
    listed = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)
    return f"{len(tensors)} tensors {xxhash.xxh3_64_hexdigest(listed.encode())}"
