r"""Linear layers cut by their outputs (columns) or their inputs (rows).

ColumnParallelLinear: each rank computes some of the outputs.

                    A = [ A_0 | A_1 ]              (a Linear's weight is A transposed: its rows)

    rank 0   x -- f --> x A_0 + b_0 = y_0          gather_output: y = [ y_0 | y_1 ] everywhere
    rank 1   x -- f --> x A_1 + b_1 = y_1

RowParallelLinear: each rank computes with some of the inputs, and the results are summed.

                        [ A_0 ]
                    A = [ --- ]                    (a Linear's weight is A transposed: its columns)
                        [ A_1 ]

    rank 0   x_0 --> x_0 A_0 --\
                                g --> y + b
    rank 1   x_1 --> x_1 A_1 --/

f is `copy_to_ranks`, g `reduce_from_ranks` (Shoeybi et al. 2019, "Megatron-LM", section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from phalanx.core.backend import Backend
from phalanx.tensor.functions import (
    copy_to_ranks,
    gather_from_ranks,
    gather_sequence,
    scatter_to_ranks,
)
from phalanx.tensor.layer import ParallelLayer, Split, Style, check_units
from phalanx.tensor.shards import ShardSpec


class _ParallelLinear(ParallelLayer):
    weight: nn.Parameter
    bias: nn.Parameter | None

    @property
    def in_features(self) -> int:
        """Number of features of the whole layer's inputs."""
        return self.whole_size(1)

    @property
    def out_features(self) -> int:
        """Number of the whole layer's outputs."""
        return self.whole_size(0)

    def extra_repr(self) -> str:
        """Return the whole layer's sizes, and this rank's part."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {self.describe_part()}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer of which each rank computes some of the outputs.

        up, down = ColumnParallelLinear(64, 256, backend), RowParallelLinear(256, 64, backend)
        y = down(torch.relu(up(x)))     # each of 4 ranks computes 64 of the 256 features between

    The input, [..., in_features], is the same on every rank. Outputs and gradients are those of the
    plain layer, or this rank's part of them. If outputs do not divide, the earlier ranks have more.

    in_features, out_features, bias, device, dtype   as `nn.Linear` has them, of the whole layer
    backend         the ranks that share it
    gather_output   give every rank all outputs, [..., out_features]; else its own part of them,
        as input for a `RowParallelLinear`, or for functions that work element by element
    sequence_dim    the input is this rank's part of a sequence, cut along this dimension (sequence
        parallelism): it is gathered, and its gradient reduced and scattered
    parts           the sizes of several layers in one, such as (width, width, width) for queries,
        keys and values: each is cut by itself, so a rank's outputs are its part of each, in order.
        (Three layers do as well, and cost three messages in backward)
    unit            number of outputs that stay together: a head's width, so that no head is torn

    # Notes
    Initial values are those of a plain layer with the same seed, cut: a plain layer is built first,
    so the random state advances in the same way, and the whole weight is in memory for a moment.
    `from_linear` takes the values from a layer. Parameters are this rank's, under the names
    `weight` and `bias`; for whole ones see `full_state_dict`.

    Forward sends nothing, except to gather; backward sums the gradient of the input, an all_reduce
    of its bytes, if it needs one. With `sequence_dim` these are an all_gather (and a message of 8
    bytes) and a reduce_scatter, together the same bytes. Construction blocks for a message of 16
    bytes: `DesyncError` if the ranks' options or values differ. Raises `ValueError` if there are
    fewer units than ranks; in forward, `SizeMismatchError` for an input of another width.
    """

    style: ColumnStyle

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
        plain = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        style = ColumnStyle(
            gather_output=gather_output, sequence_dim=sequence_dim, parts=parts, unit=unit
        )
        super().__init__(plain, backend, style)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, backend: Backend, **options: Any
    ) -> ColumnParallelLinear:
        """This rank's part of a plain layer, which is not changed.

        options   gather_output, sequence_dim, parts, unit

        Raises `UnsupportedOperationError` for subclasses of `nn.Linear`, and for one with hooks.
        """
        return cls.from_plain(linear, backend, ColumnStyle(**options))

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs, or all. Blocks if it sends, as the class explains."""
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


@dataclass(frozen=True, kw_only=True)
class ColumnStyle(Style):
    """The options of a `ColumnParallelLinear`, which explains them."""

    gather_output: bool = False
    sequence_dim: int | None = None
    parts: tuple[int, ...] | None = None
    unit: int = 1

    takes = (nn.Linear,)
    makes = ColumnParallelLinear

    def __post_init__(self) -> None:
        if isinstance(self.parts, int):
            raise TypeError(
                f"parts={self.parts}: give the outputs of each part, as in (width, width, width)"
            )
        if self.parts is not None:
            object.__setattr__(self, "parts", tuple(self.parts))  # of a list, too

    def splits(self, plain: nn.Module, ranks: int) -> dict[str, Split]:
        """Return cuts of the weight's rows, and of the bias."""
        out_features = cast(nn.Linear, plain).out_features
        parts = (out_features,) if self.parts is None else self.parts
        if sum(parts) != out_features:
            raise ValueError(
                f"parts={parts} are {sum(parts)} outputs, and the layer has {out_features}"
            )
        for part in parts:
            check_units(part, self.unit, ranks, "out_features" if len(parts) == 1 else "a part of")
        split = Split(0, ShardSpec.of(out_features, ranks, parts=parts, unit=self.unit))
        return {"weight": split, "bias": split}


class RowParallelLinear(_ParallelLinear):
    """A linear layer of which each rank computes with some of the inputs.

    The output, [..., out_features], is the plain layer's, and the same bits on every rank. The bias
    is added once, after the sum; it is whole on every rank, and so is its gradient.

    in_features, out_features, bias, device, dtype   as `nn.Linear` has them, of the whole layer
    backend            the ranks that share it
    input_is_parallel  the input is this rank's part of the features, as a `ColumnParallelLinear`
        with as many outputs gives; else it is the same on every rank, and cut here
    sequence_dim       give every rank its part of the sequence, which is cut along this dimension
        (sequence parallelism); else every rank gets the whole
    unit               number of inputs that stay together, as for the layer before

    # Notes
    An example, initial values, `from_linear`, the names of parameters, the wait of construction,
    and errors are as for `ColumnParallelLinear`.

    Forward sums the output, an all_reduce of its bytes; backward sends nothing if the input is
    parallel, else an all_gather of the input's gradient. With `sequence_dim`, forward is a
    reduce_scatter and backward an all_gather, together the same bytes, and an all_reduce of the
    bias.
    """

    style: RowStyle

    def __init__(
        self,
        in_features: int,
        out_features: int,
        backend: Backend,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence_dim: int | None = None,
        unit: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        plain = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        style = RowStyle(input_is_parallel=input_is_parallel, sequence_dim=sequence_dim, unit=unit)
        super().__init__(plain, backend, style)

    @classmethod
    def from_linear(cls, linear: nn.Linear, backend: Backend, **options: Any) -> RowParallelLinear:
        """This rank's part of a plain layer, which is not changed.

        options   input_is_parallel, sequence_dim, unit

        Raises `UnsupportedOperationError` for subclasses of `nn.Linear`, and for one with hooks.
        """
        return cls.from_plain(linear, backend, RowStyle(**options))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, or its sequence's part here. Blocks until all ranks call it."""
        backend, label, style = self.backend, self.label, self.style
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if style.input_is_parallel:
            remedy = (
                f"That is its part of {self.in_features}: put a ColumnParallelLinear before it "
                "(with the same unit), or say input_is_parallel=False"
            )
            self.check_width(x, weight.shape[1], remedy)
        else:
            self.check_width(x, self.in_features, "It takes all features: see input_is_parallel")
            x = scatter_to_ranks(x, backend, -1, cut=self.splits["weight"].cut, label=label)
        y = self.sum_over_ranks(F.linear(x, weight), style.sequence_dim)
        if bias is None:
            return y
        if style.sequence_dim is not None:  # each rank adds it to other rows: gradients are summed
            bias = copy_to_ranks(bias, backend, label=f"{label}'s bias")
        return y + bias.to(y.dtype)


@dataclass(frozen=True, kw_only=True)
class RowStyle(Style):
    """The options of a `RowParallelLinear`, which explains them."""

    input_is_parallel: bool = True
    sequence_dim: int | None = None
    unit: int = 1

    takes = (nn.Linear,)
    makes = RowParallelLinear

    def splits(self, plain: nn.Module, ranks: int) -> dict[str, Split]:
        in_features = cast(nn.Linear, plain).in_features
        check_units(in_features, self.unit, ranks, "in_features")
        return {"weight": Split(1, ShardSpec.of(in_features, ranks, unit=self.unit))}
