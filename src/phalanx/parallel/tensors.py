"""Many tensors as few messages: flat copies of them, one dtype and bounded in size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.run import start
from phalanx.collectives.task import in_place, memory_for

MESSAGE = 25 << 20  # bytes


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
            flat = memory_for(backend, (count,), batch[0].dtype, batch[0].device)
            torch.cat([t.detach().reshape(-1) for t in batch], out=flat)
            start(in_place("broadcast", flat, root=root), backend, label=label).wait()
            if backend.rank != root:
                place = 0
                for tensor in batch:
                    stop = place + tensor.numel()
                    tensor.copy_(flat[place:stop].view(tensor.shape))
                    place = stop
