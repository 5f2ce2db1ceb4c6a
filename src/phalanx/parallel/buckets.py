"""Many tensors as few messages: buckets of gradients, and flat copies of tensors to broadcast.

    bucket 0                     bucket 1
    [ head.bias | head.weight ]  [ body.bias | body.weight ]   flat memory, one dtype each

Each gradient is a view into its bucket, so that it is averaged where it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from phalanx.collectives import broadcast_
from phalanx.core.backend import Backend

MESSAGE = 25 << 20  # bytes that are sent as one message, if nothing else is asked for


class Bucket:
    """Flat memory for tensors of the sizes of some others, such as gradients; of one dtype.

    views     for each tensor its place in `flat`, in its shape
    pending   the parameters whose gradients have not come in this pass
    """

    def __init__(self, tensors: Sequence[Tensor], backend: Backend) -> None:
        count, first = sum(tensor.numel() for tensor in tensors), tensors[0]
        self.flat = backend.empty(count, dtype=first.dtype, device=first.device)
        self.views: dict[Tensor, Tensor] = {}
        start = 0
        for tensor in tensors:
            stop = start + tensor.numel()
            self.views[tensor] = self.flat[start:stop].view(tensor.shape)
            start = stop
        self.pending = set(tensors)


def batches(tensors: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Cut a list of tensors into runs of one kind and at most `size` bytes (or one tensor)."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        batch: list[Tensor] = []
        filled = 0
        for tensor in same:
            if batch and filled + tensor.nbytes > size:
                yield batch
                batch, filled = [], 0
            batch.append(tensor)
            filled += tensor.nbytes
        yield batch


@torch.no_grad()
def broadcast_all_(
    tensors: Sequence[Tensor], backend: Backend, root: int, *, label: str = ""
) -> None:
    """Overwrite tensors with those of rank `root`, in place: their storage stays the same.

    label   says in errors what this is; the same on every rank
    """
    if backend.world_size == 1:
        return
    for batch in batches(tensors, MESSAGE):
        bucket = Bucket(batch, backend)
        torch.cat([tensor.detach().reshape(-1) for tensor in batch], out=bucket.flat)
        broadcast_(bucket.flat, backend, root, label=label)
        if backend.rank != root:
            for tensor, view in bucket.views.items():
                tensor.copy_(view)
