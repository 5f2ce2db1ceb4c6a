"""Tensors that are averaged together: flat copies of them, one dtype and bounded in size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives import all_gather
from phalanx.collectives.task import memory_for
from phalanx.compression.finite import is_finite
from phalanx.parallel.averaging import Averaging
from phalanx.parallel.tensors import MESSAGE, batches


class Flat:
    """What goes into one message.

    parameters  the tensors that it is about
    flat        1-D memory, one dtype
    """

    def __init__(self, tensors: Sequence[Tensor], backend: Backend) -> None:
        self.parameters: list[Any] = list(tensors)
        count, first = sum(tensor.numel() for tensor in tensors), tensors[0]
        self.flat = memory_for(backend, (count,), first.dtype, first.device)

    def views(self) -> list[tuple[Tensor, Tensor]]:
        """Each tensor, and its place in here, in its shape."""
        pieces = torch.split(self.flat, [tensor.numel() for tensor in self.parameters])
        return [
            (tensor, piece.view(tensor.shape))
            for tensor, piece in zip(self.parameters, pieces, strict=True)
        ]


Put = Callable[[Tensor, Tensor], object]


def copy_into(place: Tensor, tensor: Tensor) -> None:
    """Of a tensor its values are averaged."""
    place.copy_(tensor)


@torch.no_grad()
def averaged(
    tensors: Iterable[Tensor],
    averaging: Averaging,
    backend: Backend,
    *,
    label: str,
    put: Put = copy_into,
) -> list[Flat]:
    """The means of tensors over the ranks, in new memory; blocks until they are there.

    put    `put(place, tensor)` writes what is to be averaged of a tensor into its place
    label  says in errors what this is; ranks whose labels differ do not mean the same

    All messages are under way together, and of the same bits on every rank when they are in.
    """
    flats, begun = [], []
    for number, batch in enumerate(batches(tensors, MESSAGE)):
        flat = Flat(batch, backend)
        for tensor, place in flat.views():
            put(place, tensor)
        flats.append(flat)
        begun.append(averaging.begin(flat, f"{label}, part {number}"))
    averaging.finish(begun)
    averaging.settle(flats, skipped=False)
    return flats


def all_finite(flats: Iterable[Flat]) -> bool:
    """Whether all values are: the same answer on every rank, of averages."""
    return all(is_finite(flat.flat) for flat in flats)


def not_finite_on(values: Mapping[str, Tensor], backend: Backend) -> dict[int, str]:
    """For each rank that has a value that is infinite or NaN, the first name that has one.

    Blocks for one message of 8 bytes.
    """
    names = list(values)
    mine = next((at for at, name in enumerate(names) if not is_finite(values[name])), len(names))
    found = all_gather(torch.tensor([mine], dtype=torch.int64), backend).tolist()
    return {rank: names[at] for rank, at in enumerate(found) if at < len(names)}
