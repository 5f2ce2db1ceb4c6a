"""SequenceParallelNorm: a norm that each rank computes for its part of the sequence, or the heads.

    rank 0   x[0:3] --> norm --> y[0:3]        gradients of weight and bias: summed over the ranks,
    rank 1   x[3:5] --> norm --> y[3:5]        since each has seen other rows

(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from phalanx.backends.base import Backend
from phalanx.parallel.tensor.functions import copy_to_ranks
from phalanx.parallel.tensor.layer import ParallelLayer, Split, Style

Compute = Callable[
    ["tuple[int, ...]", Tensor, "Tensor | None", "Tensor | None", "float | None"], Tensor
]
_NORMS: MappingProxyType[type[nn.Module], Compute] = MappingProxyType(
    {
        nn.LayerNorm: lambda shape, x, weight, bias, eps: F.layer_norm(
            x, shape, weight, bias, cast(float, eps)
        ),
        nn.RMSNorm: lambda shape, x, weight, _, eps: F.rms_norm(x, shape, weight, eps),
    }
)


@dataclass(frozen=True, kw_only=True)
class SequenceNormStyle(Style):
    """A `SequenceParallelNorm` has no options."""

    takes = tuple(_NORMS)

    def splits(self, plain: nn.Module, ranks: int) -> dict[str, Split]:
        """Nothing is cut."""
        return {}

    def layer(self) -> ParallelLayer:
        """An empty one."""
        return SequenceParallelNorm.empty(self)


class SequenceParallelNorm(ParallelLayer):
    """A `LayerNorm` or `RMSNorm` of inputs of which each rank has a part.

    Of the sequence, between layers with `sequence_dim`; or of the heads, as norms of queries and
    keys have. Made by `from_norm`, or by `parallelize`. Weight and bias are whole on every rank,
    and so are their gradients: backward sums them, an all_reduce of their bytes. A plain norm there
    would learn on each rank from its own rows only, and the ranks would drift apart.
    """

    style: SequenceNormStyle
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    @classmethod
    def from_norm(cls, norm: nn.LayerNorm | nn.RMSNorm, backend: Backend) -> SequenceParallelNorm:
        """A plain norm's parameters, copied. Blocks for a message of 16 bytes."""
        layer = cls.empty(SequenceNormStyle())
        layer.hold_alike(norm, backend)
        return layer

    def hold(self, plain: nn.Module, *args: object, **options: object) -> None:
        """With what kind of norm it is."""
        super().hold(plain, *args, **options)  # type: ignore[arg-type]
        norm = cast("nn.LayerNorm | nn.RMSNorm", plain)
        self.kind = type(norm)
        self.normalized_shape = tuple(norm.normalized_shape)
        self.eps = norm.eps
        if "bias" not in self._parameters:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """The input, normalized. Sends nothing; backward does."""
        weight, bias = self.weight, self.bias
        if weight is not None and bias is not None:  # one message for both
            weight_, bias_ = self._copied(torch.stack([weight, bias])).unbind()
            return _NORMS[self.kind](self.normalized_shape, x, weight_, bias_, self.eps)
        whole = None if weight is None else self._copied(weight)
        return _NORMS[self.kind](self.normalized_shape, x, whole, None, self.eps)

    def _copied(self, values: Tensor) -> Tensor:
        return copy_to_ranks(values, self.backend, label=self.label)

    def extra_repr(self) -> str:
        """As of the plain norm."""
        return f"{self.kind.__name__}, {self.normalized_shape}, eps={self.eps}"
