"""ColumnParallelLinear: each rank computes some of the outputs.

                    A = [ A_0 | A_1 ]              (a Linear's weight is A transposed: its rows)

    rank 0   x -- f --> x A_0 + b_0 = y_0          gather_output: y = [ y_0 | y_1 ] everywhere
    rank 1   x -- f --> x A_1 + b_1 = y_1

(Shoeybi et al. 2019, "Megatron-LM", section 3.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from phalanx.backends.base import Backend
from phalanx.parallel.tensor.functions import copy_to_ranks, gather_from_ranks, gather_sequence
from phalanx.parallel.tensor.layer import ParallelLayer, Split, Style, check_units
from phalanx.parallel.tensor.shards import Cut


@dataclass(frozen=True, kw_only=True)
class ColumnStyle(Style):
    """The options of a `ColumnParallelLinear`, which explains them."""

    gather_output: bool = False
    sequence_dim: int | None = None
    parts: tuple[int, ...] | None = None
    unit: int = 1

    takes = (nn.Linear,)

    def __post_init__(self) -> None:
        if self.parts is not None:
            object.__setattr__(self, "parts", tuple(self.parts))  # of a list, too

    def splits(self, plain: nn.Module, ranks: int) -> dict[str, Split]:
        """The weight's rows, and the bias."""
        out_features = cast(nn.Linear, plain).out_features
        parts = (out_features,) if self.parts is None else self.parts
        if sum(parts) != out_features:
            raise ValueError(
                f"parts={parts} are {sum(parts)} outputs, and the layer has {out_features}"
            )
        for part in parts:
            check_units(part, self.unit, ranks, "out_features" if len(parts) == 1 else "a part of")
        split = Split(0, Cut.of(out_features, ranks, parts=parts, unit=self.unit))
        return {"weight": split, "bias": split}

    def layer(self) -> ParallelLayer:
        """An empty one."""
        return ColumnParallelLinear.empty(self)


class ColumnParallelLinear(ParallelLayer):
    """A linear layer of which each rank computes some of the outputs.

    in_features, out_features, bias, device, dtype   as `nn.Linear` has them, of the whole layer
    backend         the ranks that share it
    gather_output   give every rank all outputs, [..., out_features]; else its own part of them,
        which is what a `RowParallelLinear` takes, and what works element by element
    sequence_dim    the input is this rank's part of a sequence, cut along this dimension (sequence
        parallelism): it is gathered, and its gradient reduced and scattered
    parts           the sizes of several layers in one, such as (width, width, width) for queries,
        keys and values: each is cut by itself, so a rank's outputs are its part of each, in order.
        (Three layers do as well, and cost three messages in backward)
    unit            how many outputs stay together: a head's width, so that no head is torn

    The input, [..., in_features], is the same on every rank. Outputs and gradients are those of the
    plain layer, or this rank's part of them. What does not divide gives the earlier ranks more.

    Initial values are a plain layer's with the same seed, cut: the random state moves as if there
    were one, and for a moment the whole weight is there. `from_linear` takes them from a layer.
    Parameters are this rank's, under the names `weight` and `bias`; for whole ones see
    `full_state_dict`.

    Forward sends nothing, but to gather; backward sums the gradient of the input, an all_reduce of
    its bytes, if it needs one. With `sequence_dim` these are an all_gather (and a message of 8
    bytes) and a reduce_scatter, together the same bytes. Construction blocks for a message of 16
    bytes: `DesyncError` if the ranks' options or values differ. Raises `ValueError` if there are
    fewer units than ranks; in forward, `SizeMismatchError` for an input of another width.
    """

    style: ColumnStyle
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        backend: Backend,
        *,
        bias: bool = True,
        gather_output: bool = False,
        sequence_dim: int | None = None,
        parts: tuple[int, ...] | None = None,
        unit: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.style = ColumnStyle(
            gather_output=gather_output, sequence_dim=sequence_dim, parts=parts, unit=unit
        )
        plain = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.hold_alike(plain, backend)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, backend: Backend, **options: Any
    ) -> ColumnParallelLinear:
        """This rank's part of a plain layer, which is not changed.

        options   gather_output, sequence_dim, parts, unit

        Raises `UnsupportedOperationError` for subclasses of `nn.Linear`, and for one with hooks.
        """
        layer = cls.empty(ColumnStyle(**options))
        layer.hold_alike(linear, backend)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """This rank's outputs, or all; see the class. Blocks where that says that it sends."""
        self.check_width(x, self.in_features, "It takes all features: see gather_output")
        backend, label, style = self.backend, self.label, self.style
        if style.sequence_dim is None:
            x = copy_to_ranks(x, backend, label=label)
        else:
            self.check_sequence_dim(x, style.sequence_dim)
            x = gather_sequence(x, backend, style.sequence_dim, label=label)
        y = F.linear(x, self.weight, self.bias)
        if style.gather_output:
            y = gather_from_ranks(y, backend, -1, cut=self.splits["weight"].cut, label=label)
        return y

    @property
    def in_features(self) -> int:
        """How many features an input has."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """How many outputs all ranks have together."""
        return self.splits["weight"].cut.total

    def extra_repr(self) -> str:
        """The whole layer's sizes, and this rank's part."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {self.part_of('weight')}"
        )
