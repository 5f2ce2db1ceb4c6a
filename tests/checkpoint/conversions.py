"""What the tests of conversions share: checkpoints to convert, and what is allocated meanwhile."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from checkpoint_runs import adamw
from flat_shards import FlatShards, step_with
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import phalanx
from phalanx import Backend, save_checkpoint
from phalanx.checkpoint.stored import Advance


class Tied(nn.Module):
    """Layers whose names sort otherwise than they follow, two names for one, and a buffer."""

    def __init__(self, seed: int = 0, layers: int = 11) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.head = nn.Linear(4, 7)
        self.register_buffer("mask", torch.ones(5, dtype=torch.uint8))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


def trained(seed: int = 0, steps: int = 2) -> tuple[Tied, torch.optim.Optimizer]:
    """The plain model and its optimizer, as they are after these steps."""
    model = Tied(seed)
    optimizer = adamw(model)
    for step in range(steps):
        step_with(model, optimizer, step)
    return model, optimizer


def save(folder: Path, ranks: int, *, steps: int = 2, **options: Any) -> None:
    """Save that, of a model that is split over so many ranks."""

    def run(backend: Backend) -> None:
        model = FlatShards(Tied(), backend)
        optimizer = adamw(model)
        for step in range(steps):
            step_with(model, optimizer, step)
        save_checkpoint(folder, model=model, optimizer=optimizer, step=steps, **options)

    phalanx.simulate(run, ranks)


def silent(_: int) -> Advance:
    """For progress that nobody looks at."""
    return lambda _: None


class Allocated:
    """The most bytes that tensors and Python's objects had at a time."""

    tensors = 0
    python = 0


class _Watch(TorchDispatchMode):
    """Notes the memory of each tensor that is made, as long as it lives."""

    def __init__(self, allocated: Allocated) -> None:
        super().__init__()
        self._allocated = allocated
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta:
            storage = result.untyped_storage()
            self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        for address, (reference, _) in list(self._alive.items()):
            if reference.expired():
                del self._alive[address]
        now = sum(nbytes for _, nbytes in self._alive.values())
        self._allocated.tensors = max(self._allocated.tensors, now)
        return result


@contextmanager
def allocations() -> Iterator[Allocated]:
    """Count, until the end of the block, what is allocated."""
    allocated = Allocated()
    with _Watch(Allocated()):  # what torch imports when it first does so is not to be counted
        torch.zeros(2)[:1] = torch.ones(1)
    tracemalloc.start()
    try:
        with _Watch(allocated):
            yield allocated
        allocated.python = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
