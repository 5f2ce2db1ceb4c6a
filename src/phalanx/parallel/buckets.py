"""Many tensors as few messages: buckets of gradients, and flat copies of tensors to broadcast.

    bucket 0                     bucket 1
    [ head.bias | head.weight ]  [ body.bias | body.weight ]   flat memory, one dtype each

Each gradient is a view into its bucket, so that it is averaged where it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from phalanx.collectives import broadcast_
from phalanx.core.backend import Backend

MESSAGE = 25 << 20  # bytes that are sent as one message, if nothing else is asked for


class Bucket:
    """Flat memory for the gradients of some parameters of one dtype.

    views     where each gradient lies in `flat`
    pending   the parameters whose gradients have not come in this pass
    """

    def __init__(self, parameters: list[nn.Parameter], backend: Backend) -> None:
        self.parameters = parameters
        count, first = sum(p.numel() for p in parameters), parameters[0]
        self.flat = backend.empty(count, dtype=first.dtype, device=first.device)
        self.views: dict[nn.Parameter, Tensor] = {}
        self.pending = set(parameters)
        start = 0
        for parameter in parameters:
            stop = start + parameter.numel()
            self.views[parameter] = self.flat[start:stop].view(parameter.shape)
            start = stop


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
        if batch:
            yield batch


def broadcast_all_(
    tensors: Sequence[Tensor], backend: Backend, root: int, *, label: str = ""
) -> None:
    """Overwrite tensors with those of rank `root`, in place: their storage stays the same.

    label   says in errors what this is; the same on every rank
    """
    if backend.world_size == 1:
        return
    with torch.no_grad():
        for batch in batches(tensors, MESSAGE):
            count = sum(t.numel() for t in batch)
            flat = backend.empty(count, dtype=batch[0].dtype, device=batch[0].device)
            torch.cat([t.detach().reshape(-1) for t in batch], out=flat)
            broadcast_(flat, backend, root, label=label)
            if backend.rank != root:
                place = 0
                for tensor in batch:
                    stop = place + tensor.numel()
                    tensor.copy_(flat[place:stop].view(tensor.shape))
                    place = stop
