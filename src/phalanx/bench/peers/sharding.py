"""Models whose parameters, gradients and optimizer state are shared out over the ranks.

Sharded      phalanx.FSDP, strategy FULL_SHARD, a unit a layer
FullyShard   torch's `fully_shard` over Gloo, as its documentation recommends: called on each
             layer, then on the whole
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.backends.base import Backend
from phalanx.bench.peers.learner import Learner
from phalanx.parallel import FSDP, ShardingStrategy

__all__ = ["FullyShard", "Sharded"]


class Sharded(Learner):
    """Phalanx's."""

    def __init__(self, module: nn.Module, backend: Backend) -> None:
        self.model: FSDP = FSDP(
            module, backend, strategy=ShardingStrategy.FULL_SHARD, unit=nn.Linear
        )
        self._first: dict[str, Tensor] = {}

    def remember(self) -> None:
        """Gathers all parameters."""
        self._first = self.whole()

    def rewind(self) -> None:
        """Loads them."""
        self.model.load_state_dict(self._first)

    def whole(self) -> dict[str, Tensor]:
        """Gathers them."""
        return self.model.full_state_dict()


class FullyShard(Learner):
    """Torch's, on its default group."""

    def __init__(self, module: nn.Module, ranks: int) -> None:
        # Half a second, which only this measurement should wait for.
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        mesh = init_device_mesh("cpu", (ranks,))
        for layer in module.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        self.model = module
        self._first: list[Tensor] = []

    def remember(self) -> None:
        """Copies this rank's shards."""
        self._first = [shard.clone() for shard in self._shards()]

    def rewind(self) -> None:
        """Copies them back."""
        with torch.no_grad():
            for shard, value in zip(self._shards(), self._first, strict=True):
                shard.copy_(value)

    def whole(self) -> dict[str, Tensor]:
        """Gathers them."""
        named: Any = self.model.named_parameters()
        return {name: value.detach().full_tensor() for name, value in named}

    def _shards(self) -> list[Tensor]:
        parameters: Any = self.model.parameters()
        return [parameter.to_local().detach() for parameter in parameters]
