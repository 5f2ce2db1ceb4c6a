"""scatter: every rank gets its slice of the root's tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.checks import check_slices, check_tensor
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.run import run, start
from phalanx.collectives.task import Task, given, out_for
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
    task = _task(tensor, backend, root, into)
    return run(task, backend, algorithm=algorithm, timeout=timeout)


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
    task = _task(tensor, backend, root, into)
    return start(task, backend, algorithm=algorithm, timeout=timeout, background=True)


def _task(tensor: Tensor | None, backend: Backend, root: int, into: Tensor | None) -> Task[Tensor]:
    backend.check_rank(root, "root")
    whole, dtype, device = _what_is_cut(tensor, backend, root, into)
    shape = check_slices(whole, backend, "scatter")
    out, result = out_for(shape, dtype, backend, into, "scatter", device=device)
    source = None
    if backend.rank == root:
        assert tensor is not None
        source = given(tensor, out)
    return Task("scatter", whole, dtype, source, out, result, root=root)


def _what_is_cut(
    tensor: Tensor | None, backend: Backend, root: int, into: Tensor | None
) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    """Shape and dtype of the root's tensor, and where the slice goes, from what was given here."""
    if tensor is not None:
        if not isinstance(tensor, Tensor) or backend.rank == root or tensor.device.type != "meta":
            check_tensor(tensor, backend, "scatter")
            return tuple(tensor.shape), tensor.dtype, tensor.device
        return tuple(tensor.shape), tensor.dtype, torch.device("cpu")
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
    return (backend.world_size * rows, *into.shape[1:]), into.dtype, into.device
