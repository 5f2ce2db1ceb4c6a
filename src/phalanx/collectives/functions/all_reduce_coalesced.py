"""all_reduce_coalesced: the reductions of many tensors, as few messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import xxhash
from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.backends.memory import copy_bits
from phalanx.collectives.checks import check_distinct, check_tensor
from phalanx.collectives.layout import ranges_of
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.reduce_op import ReduceOp, reduction_for
from phalanx.collectives.run import checked_algorithm, start
from phalanx.collectives.task import finish_into, in_place, memory_for

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
