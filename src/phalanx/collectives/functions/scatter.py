"""scatter: every rank gets its slice of the root's tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.plan import Plan
from phalanx.collectives.prepare import (
    check_into,
    check_slices,
    check_tensor,
    copy_bits,
    empty,
    finish_into,
    plain,
)
from phalanx.collectives.run import launch, planned
from phalanx.errors import SizeMismatchError


def scatter(
    tensor: Tensor | None,
    backend: Backend,
    root: int = 0,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    timeout: float | None = None,
) -> Tensor:
    """Slice `rank` of the tensor of rank `root`.

    tensor      on the root, what is cut: its dim 0 has to be divisible by the world size, and
                `[p * n, ...]` gives `[n, ...]`. It is not changed. The other ranks say what is to
                come: with any tensor of the root's shape and dtype, whose values do not matter
                (`torch.empty`, or one on the device "meta", which takes no memory); or with None,
                and `into` of the shape of the slice
    root        the rank whose tensor is cut; the same on every rank
    algorithm   `auto`, or `tree`, `star`
    into        where to put the slice, of that shape and the same dtype; else a new tensor
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has its slice (the root: until its sends are done). The root sends
    (p-1)/p of the tensor's bytes, which is the least there is: as p-1 messages (star), or as
    ceil(log2 p) messages to ranks that pass on those of others (binomial tree). Raises, before
    anything is sent, `InvalidRankError` for a root that does not exist and `SizeMismatchError` if
    dim 0 does not divide, `into` does not fit, or neither says what is to come;
    `CollectiveTimeoutError`, `PeerLostError`, and `DesyncError` if ranks expect different tensors.
    """
    return _start(tensor, backend, root, algorithm=algorithm, into=into, timeout=timeout).wait()


def async_scatter(
    tensor: Tensor | None,
    backend: Backend,
    root: int = 0,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`scatter` that returns at once; `wait()` gives the slice."""
    return _start(
        tensor, backend, root, algorithm=algorithm, into=into, timeout=timeout, background=True
    )


def _start(
    tensor: Tensor | None,
    backend: Backend,
    root: int,
    *,
    algorithm: str,
    into: Tensor | None,
    timeout: float | None,
    background: bool = False,
) -> PendingCollective[Tensor]:
    backend.check_rank(root, "root")
    whole, dtype = _what_is_cut(tensor, backend, root, into)
    shape = check_slices(whole, backend, "scatter")
    check_into(into, shape, dtype, backend, "scatter")
    plan = planned("scatter", whole, dtype, backend, root=root, algorithm=algorithm)
    if backend.rank == root:
        assert tensor is not None
        work = plain(tensor)
        own = work[root * shape[0] : (root + 1) * shape[0]]
        return launch(
            plan,
            work,
            backend,
            lambda: _copied(own, into),
            timeout=timeout,
            background=background,
        )
    return _receive(plan, shape, backend, into, timeout=timeout, background=background)


def _what_is_cut(
    tensor: Tensor | None, backend: Backend, root: int, into: Tensor | None
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the root's tensor, from what this rank was given."""
    if tensor is not None:
        if not isinstance(tensor, Tensor) or backend.rank == root or tensor.device.type != "meta":
            check_tensor(tensor, backend, "scatter")
        return tuple(tensor.shape), tensor.dtype
    if backend.rank == root:
        raise SizeMismatchError(
            f"rank {root}: scatter: the root gives the tensor that is cut, and gave None",
            rank=root,
            op="scatter",
        )
    if into is None:
        raise SizeMismatchError(
            f"rank {backend.rank}: scatter cannot tell what rank {root} will send: give a tensor "
            "of the shape and dtype of the root's (its values do not matter), or into= of the "
            "shape of the slice",
            rank=backend.rank,
            peer=root,
            op="scatter",
        )
    check_tensor(into, backend, "scatter")
    rows = into.shape[0] if into.dim() else 0
    return (backend.world_size * rows, *into.shape[1:]), into.dtype


def _receive(
    plan: Plan,
    shape: tuple[int, ...],
    backend: Backend,
    into: Tensor | None,
    *,
    timeout: float | None,
    background: bool,
) -> PendingCollective[Tensor]:
    dtype = plan.key.dtype
    work, result = empty(shape, dtype, backend, into, "scatter")
    if plan.work_size > work.nbytes:  # other ranks' slices pass through this one
        count = work.numel()
        work = backend.empty(plan.work_size // dtype.itemsize, dtype=dtype)
        own = work[:count].view(shape)
        return launch(
            plan,
            work,
            backend,
            lambda: _copied(own, into),
            timeout=timeout,
            background=background,
        )
    return launch(plan, work, backend, result, timeout=timeout, background=background)


def _copied(own: Tensor, into: Tensor | None) -> Tensor:
    """This rank's slice in memory of its own, so that the others do not stay in memory with it."""
    if into is not None:
        return finish_into(into, own)
    copy = torch.empty(own.shape, dtype=own.dtype)
    copy_bits(copy, own)
    return copy
