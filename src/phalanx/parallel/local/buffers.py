"""Buffers at a meeting: those that a state dict has.

floating   the mean, as of parameters: statistics of batch norm
others     rank 0's: counters, masks

What a state dict leaves out is made anew from something else, and stays each rank's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.backends.base import Backend
from phalanx.parallel.averaging import AllReduced
from phalanx.parallel.local.flats import averaged
from phalanx.parallel.tensors import broadcast_all_


def kept_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of the state dict, by their first name."""
    found: dict[str, Tensor] = {}
    for prefix, each in module.named_modules():
        for key, buffer in each._buffers.items():
            if buffer is not None and key not in each._non_persistent_buffers_set:
                found[f"{prefix}.{key}" if prefix else key] = buffer
    return found


def floating(module: nn.Module) -> dict[str, Tensor]:
    """Those of which there is a mean."""
    return {name: b for name, b in kept_buffers(module).items() if b.is_floating_point()}


class Buffers:
    """Of a module, made alike over the ranks of a backend."""

    def __init__(self, module: nn.Module, backend: Backend) -> None:
        self._module = module
        self._backend = backend
        self._averaging = AllReduced(backend)

    @property
    def bytes_sent(self) -> int:
        """For means."""
        return self._averaging.bytes_sent

    @torch.no_grad()
    def meet(self, label: str) -> None:
        """Make them alike, in place; one all-reduce and one broadcast, of what there is."""
        if self._backend.world_size == 1:
            return
        means, others = floating(self._module), kept_buffers(self._module)
        for flat in averaged(
            means.values(), self._averaging, self._backend, label=f"{label}, buffers"
        ):
            for buffer, mean in flat.views():
                buffer.copy_(mean)
        rest = [buffer for name, buffer in others.items() if name not in means]
        broadcast_all_(rest, self._backend, 0, label=f"{label}, buffers of rank 0")
