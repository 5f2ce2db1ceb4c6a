"""`FlatShards`: a wrapper that really splits parameters flat over ranks, and nothing more.

It stands for every strategy that does, so that resharding is proven without one: the elements of
each parameter are split over the ranks of a group of `shards`, in the same way in each group.
Gradients are for the test to set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from phalanx import Backend, chunk_ranges
from phalanx.parallel.wrapper import Slice, Wrapper


class FlatShards(Wrapper):
    """Rank r holds the flat shard r % shards of every parameter; `shards` is all ranks by default.

    joined   the parameters are concatenated first, and then split: a rank has all of some, part of
             others, and nothing of the rest
    """

    def __init__(
        self,
        module: nn.Module,
        backend: Backend,
        shards: int | None = None,
        *,
        joined: bool = False,
    ) -> None:
        super().__init__(module, backend)
        shards = shards or backend.world_size
        total = sum(parameter.numel() for parameter in module.parameters())
        first, last = chunk_ranges(total, shards)[backend.rank % shards]
        at = 0
        self._slices: dict[str, Slice] = {}
        self._parts: dict[str, nn.Parameter] = {}
        self._first: dict[int, str] = {}
        for name, whole in module.named_parameters():
            start, stop = chunk_ranges(whole.numel(), shards)[backend.rank % shards]
            if joined:
                start = min(max(first - at, 0), whole.numel())
                stop = min(max(last - at, start), whole.numel())
                at += whole.numel()
            self._slices[name] = Slice(tuple(whole.shape), start, stop)
            part = whole.detach().reshape(-1)[start:stop].clone()
            self._parts[name] = nn.Parameter(part, requires_grad=whole.requires_grad)
            self._first[id(whole)] = name

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, whole in self.module.named_parameters(*args, **kwargs):
            yield name, self._parts[self._first[id(whole)]]

    def slices(self) -> dict[str, Slice]:
        return self._slices


def shard_of(whole: Tensor, part: Slice) -> Tensor:
    """The elements of a whole tensor that are in this slice of it."""
    return whole.detach().reshape(-1)[part.start : part.stop]


def step_with(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """A step of the optimizer, with gradients that depend on the element and the seed alone."""
    slices = model.slices() if isinstance(model, Wrapper) else {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if not parameter.requires_grad or not parameter.is_floating_point():
            continue
        part = slices.get(name, Slice.whole(tuple(parameter.shape)))
        generator = torch.Generator().manual_seed(1000 * seed + number)
        whole = torch.randn(part.shape, generator=generator).to(parameter.dtype)
        parameter.grad = shard_of(whole, part).clone().view(parameter.shape)
    optimizer.step()
