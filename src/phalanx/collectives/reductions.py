"""all_reduce: every rank gets the reduction of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import xxhash
from torch import Tensor

from phalanx.collectives.checks import check_distinct, check_slices, check_tensor
from phalanx.collectives.layout import ranges_of
from phalanx.collectives.reduce_op import ReduceOp, reduction_for
from phalanx.collectives.request import (
    PendingCollective,
    Task,
    finish_into,
    given,
    in_place,
    memory_for,
    out_for,
)
from phalanx.collectives.resolve import checked_algorithm, run, start
from phalanx.core.backend import Backend
from phalanx.wire.memory import copy_bits, plain


def all_reduce(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    into: Tensor | None = None,
    timeout: float | None = None,
) -> Tensor:
    """The reduction of every rank's `tensor`, bit for bit the same on all of them.

    tensor      of the same shape and dtype on every rank; not changed
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`, `two_level`
    reproducible  sum in rank order, whatever the backend and the size (it selects `direct`)
    into        where to put the result, of the same shape and dtype; else a new tensor
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has the result. A ring sends 2(p-1)/p of the tensor's bytes from each
    of p ranks (Patarasuk & Yuan 2009), which is optimal. Not recorded by autograd. Raises
    `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`; `UnsupportedOperationError` if the
    reduction has no meaning for the dtype.
    """
    return run(
        _all_reduce_request(tensor, backend, op, into),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
    )


def async_all_reduce(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    into: Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`all_reduce` that returns at once; `wait()` gives the result."""
    return start(
        _all_reduce_request(tensor, backend, op, into),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
        background=True,
    )


def all_reduce_(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    timeout: float | None = None,
) -> Tensor:
    """`all_reduce` in place: `tensor` is overwritten, and returned. Half the memory traffic."""
    return run(
        _all_reduce_in_place_request(tensor, backend, op),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
    )


def async_all_reduce_(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`all_reduce_` that returns at once; `tensor` holds the result after `wait()`."""
    return start(
        _all_reduce_in_place_request(tensor, backend, op),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
        background=True,
    )


def _all_reduce_request(
    tensor: Tensor, backend: Backend, op: ReduceOp, into: Tensor | None
) -> Task[Tensor]:
    check_tensor(tensor, backend, "all_reduce")
    shape = tuple(tensor.shape)
    out, result = out_for(shape, tensor.dtype, backend, into, "all_reduce", device=tensor.device)
    source = given(tensor, out, same=out)
    return Task("all_reduce", shape, tensor.dtype, source, out, result, op)


def _all_reduce_in_place_request(tensor: Tensor, backend: Backend, op: ReduceOp) -> Task[Tensor]:
    check_tensor(tensor, backend, "all_reduce_")
    return in_place("all_reduce", tensor, op=op)


# ------------------------------------------------------------------------------
# reduce: the root gets the reduction of all ranks' tensors.


def reduce(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    into: Tensor | None = None,
    timeout: float | None = None,
) -> Tensor | None:
    """The reduction of every rank's `tensor`, on rank `root`; None on the others.

    tensor      of the same shape and dtype on every rank; not changed
    root        the rank that gets the result; the same on every rank
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`, `two_level`
    reproducible  sum in rank order, whatever the backend and the size (it selects `direct`)
    into        where the root puts the result, of the same shape and dtype; else a new tensor. The
                other ranks need not give it, and leave it alone
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until the root has the result; the others, until their part is done. A tree sends the
    tensor once from every rank but the root; a ring, and halving, at most (p-1)/p of it and then
    what is complete to the root, which gets at most 2(p-1)/p of it rather than log2 p times the
    tensor (Rabenseifner 2004). Not recorded by autograd. Raises `InvalidRankError` for a root that
    does not exist, `UnsupportedOperationError` if the reduction has no meaning for the dtype;
    `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`.
    """
    return run(
        _reduce_request(tensor, backend, root, op, into),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
    )


def async_reduce(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    into: Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[Tensor | None]:
    """`reduce` that returns at once; `wait()` gives the result on the root, None elsewhere."""
    return start(
        _reduce_request(tensor, backend, root, op, into),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
        background=True,
    )


def reduce_(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    timeout: float | None = None,
) -> Tensor:
    """`reduce` in place: the root's `tensor` is overwritten, the others' is not; it is returned."""
    return run(
        _reduce_in_place_request(tensor, backend, root, op),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
    )


def async_reduce_(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`reduce_` that returns at once; the root's `tensor` holds the result after `wait()`."""
    return start(
        _reduce_in_place_request(tensor, backend, root, op),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
        background=True,
    )


def _reduce_request(
    tensor: Tensor, backend: Backend, root: int, op: ReduceOp, into: Tensor | None
) -> Task[Tensor | None]:
    backend.check_rank(root, "root")
    check_tensor(tensor, backend, "reduce")
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if backend.rank != root:
        return Task("reduce", shape, dtype, plain(tensor), None, lambda: None, op, root)
    out, result = out_for(shape, dtype, backend, into, "reduce", device=tensor.device)
    return Task("reduce", shape, dtype, given(tensor, out, same=out), out, result, op, root)


def _reduce_in_place_request(
    tensor: Tensor, backend: Backend, root: int, op: ReduceOp
) -> Task[Tensor]:
    backend.check_rank(root, "root")
    check_tensor(tensor, backend, "reduce_")
    if backend.rank == root:
        return in_place("reduce", tensor, op=op, root=root)
    source = plain(tensor)
    return Task("reduce", tuple(tensor.shape), tensor.dtype, source, None, lambda: tensor, op, root)


# ------------------------------------------------------------------------------
# reduce_scatter: every rank gets its slice of the reduction of all ranks' tensors.


def reduce_scatter(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    into: Tensor | None = None,
    timeout: float | None = None,
) -> Tensor:
    """Slice `rank` of the reduction of every rank's `tensor`.

    tensor      of the same shape and dtype on every rank; not changed. Its dim 0 has to be
                divisible by the world size: `[p * n, ...]` gives `[n, ...]`
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`, `two_level`
    reproducible  sum in rank order, whatever the backend and the size (it selects `direct`)
    into        where to put the result, of that shape and the same dtype; else a new tensor
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has its slice. A ring sends (p-1)/p of the tensor's bytes from each of
    p ranks, which is optimal. Raises `SizeMismatchError` before anything is sent if dim 0 does not
    divide or `into` does not fit; `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`.
    """
    return run(
        _reduce_scatter_request(tensor, backend, op, into),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
    )


def async_reduce_scatter(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    into: Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`reduce_scatter` that returns at once; `wait()` gives the result."""
    return start(
        _reduce_scatter_request(tensor, backend, op, into),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
        background=True,
    )


def _reduce_scatter_request(
    tensor: Tensor, backend: Backend, op: ReduceOp, into: Tensor | None
) -> Task[Tensor]:
    check_tensor(tensor, backend, "reduce_scatter")
    whole = tuple(tensor.shape)
    shape = check_slices(whole, backend, "reduce_scatter")
    out, result = out_for(
        shape, tensor.dtype, backend, into, "reduce_scatter", device=tensor.device
    )
    return Task("reduce_scatter", whole, tensor.dtype, given(tensor, out), out, result, op)


# ------------------------------------------------------------------------------
# all_reduce_coalesced: the reductions of many tensors, as few messages.

NAME = "all_reduce_coalesced"


def all_reduce_coalesced(
    tensors: Iterable[Tensor],
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    timeout: float | None = None,
) -> list[Tensor]:
    """The reduction of each of some tensors, bit for bit the same on every rank.

    tensors     any number, of any dtypes; equally many on every rank, in the same order, of the
                same shapes and dtypes; not changed
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`, `two_level`
    reproducible  sum in rank order: the same bits as if each had been reduced alone
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has the results, new tensors, in order. All tensors of one dtype are
    copied into one, and reduced by one `all_reduce`. Raises as that does, and `DesyncError` if
    ranks give different lists.
    """
    return _start(
        _listed(tensors, backend),
        backend,
        op,
        _new,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
    ).wait()


def async_all_reduce_coalesced(
    tensors: Iterable[Tensor],
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    timeout: float | None = None,
) -> PendingCollective[list[Tensor]]:
    """`all_reduce_coalesced` that returns at once; `wait()` gives the results."""
    return _start(
        _listed(tensors, backend),
        backend,
        op,
        _new,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
        background=True,
    )


def all_reduce_coalesced_(
    tensors: Iterable[Tensor],
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    timeout: float | None = None,
) -> list[Tensor]:
    """`all_reduce_coalesced` in place: the tensors are overwritten, and returned as a list."""
    return _start(
        _distinct(tensors, backend),
        backend,
        op,
        finish_into,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
    ).wait()


def async_all_reduce_coalesced_(
    tensors: Iterable[Tensor],
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    timeout: float | None = None,
) -> PendingCollective[list[Tensor]]:
    """`all_reduce_coalesced_` that returns at once; the tensors are overwritten by `wait()`."""
    return _start(
        _distinct(tensors, backend),
        backend,
        op,
        finish_into,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
        background=True,
    )


def _start(
    tensors: list[Tensor],
    backend: Backend,
    op: ReduceOp,
    deliver: Callable[[Tensor, Tensor], Tensor],
    *,
    algorithm: str,
    reproducible: bool,
    timeout: float | None,
    background: bool = False,
) -> PendingCollective[list[Tensor]]:
    """`deliver(tensor, reduced)` makes a result of a tensor, and of its place in flat memory."""
    for tensor in tensors:
        reduction_for(op, tensor.dtype, rank=backend.rank, collective=NAME)
    algorithm = checked_algorithm("all_reduce", algorithm, backend, reproducible=reproducible)
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(number)
    label = _label(tensors)
    reduced: dict[int, Tensor] = {}  # a tensor's number -> its place in flat memory
    last = None
    for (dtype, device), numbers in by_kind.items():
        places = ranges_of([tensors[n].numel() for n in numbers])
        flat = memory_for(backend, (places[-1][1],), dtype, device)
        for number, place in zip(numbers, places, strict=True):
            reduced[number] = flat[slice(*place)].view(tensors[number].shape)
            copy_bits(reduced[number], tensors[number])
        last = start(
            in_place("all_reduce", flat, op=op),
            backend,
            algorithm=algorithm,
            name=NAME,
            timeout=timeout,
            background=background,
            label=label,
        )

    def results() -> list[Tensor]:
        return [deliver(tensor, reduced[number]) for number, tensor in enumerate(tensors)]

    if last is None:
        operation = backend.start(NAME, (), signature=label, timeout=timeout)
        return PendingCollective(backend, operation, results)
    # Collectives of a group run in their order: when the last is done, all are.
    return last.giving(results)


def _new(tensor: Tensor, reduced: Tensor) -> Tensor:
    """A tensor of its own, so that the others do not stay in memory with it."""
    return reduced.clone()


def _listed(tensors: Iterable[Tensor], backend: Backend) -> list[Tensor]:
    if isinstance(tensors, Tensor):  # whose rows would be taken for tensors
        raise TypeError(f"rank {backend.rank}: {NAME} takes a list of tensors, not one tensor")
    listed = list(tensors)
    for tensor in listed:
        check_tensor(tensor, backend, NAME)
    return listed


def _distinct(tensors: Iterable[Tensor], backend: Backend) -> list[Tensor]:
    listed = _listed(tensors, backend)
    for tensor in listed:
        check_distinct(tensor)
    return listed


def _label(tensors: list[Tensor]) -> str:
    """What the list is, the same on every rank: how many tensors, and a hash of what they are."""
    listed = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)
    return f"{len(tensors)} tensors {xxhash.xxh3_64_hexdigest(listed.encode())}"
