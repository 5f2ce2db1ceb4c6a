"""Mixed precision: one dtype to compute in, one to add gradients in, float32 in the shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class MixedPrecision:
    """In what dtypes a model computes and reduces, whose shards and optimizer state are wider.

    compute_dtype   of the full parameters that a forward and a backward pass use, and so of what
                    a gather moves
    reduce_dtype    in which gradients are added over the ranks, and moved
    cast_inputs     whether floating-point inputs of the model are converted to `compute_dtype`

    Shards keep the dtype in which the model was built. Only floating-point parameters are
    converted; buffers are not. Outputs are in `compute_dtype`.
    """

    compute_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    cast_inputs: bool = True

    def cast(self, inputs: Any) -> Any:
        """The inputs of the model, converted if that was asked for."""
        if not self.cast_inputs:
            return inputs
        return pytree.tree_map(self._cast, inputs)

    def _cast(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self.compute_dtype)
        return value


def precision_of(given: MixedPrecision | torch.dtype | None) -> MixedPrecision | None:
    """What was asked for; a dtype is that to compute in."""
    if given is None or isinstance(given, MixedPrecision):
        return given
    if isinstance(given, torch.dtype) and given.is_floating_point:
        return MixedPrecision(compute_dtype=given)
    raise TypeError(f"mixed_precision is a MixedPrecision or a floating-point dtype, not {given!r}")
