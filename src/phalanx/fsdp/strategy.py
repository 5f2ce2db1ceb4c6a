"""Strategies: the ranks over which parameters are cut, and the time that they stay unsharded.

                    shards are cut over    parameters are unsharded     as in
    FULL_SHARD      all ranks              while their group computes   ZeRO-3
    hybrid(k)       k consecutive ranks    while their group computes   ZeRO-3, with replicas
    SHARD_GRAD_OP   all ranks              always                       ZeRO-2
    NO_SHARD        one rank               always                       data parallel

Gradients and optimizer state are cut like the parameters. Ranks that hold the same shard average
its gradients (Rajbhandari et al. 2020, "ZeRO"; Zhao et al. 2023, "PyTorch FSDP").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx.errors import InvalidWorldSizeError
from phalanx.torch_internals import pytree


@dataclass(frozen=True)
class ShardingStrategy:
    """A row of the table: `FULL_SHARD`, `SHARD_GRAD_OP`, `NO_SHARD`, `hybrid(intra_node_size=k)`.

    name          as it is written on a command line
    group_size    number of consecutive ranks over which shards are cut; None: all
    keeps_whole   whether parameters stay unsharded between the uses of their group
    """

    name: str
    group_size: int | None
    keeps_whole: bool

    FULL_SHARD: ClassVar[ShardingStrategy]
    SHARD_GRAD_OP: ClassVar[ShardingStrategy]
    NO_SHARD: ClassVar[ShardingStrategy]

    @staticmethod
    def hybrid(intra_node_size: int) -> ShardingStrategy:
        """Shard over each `intra_node_size` consecutive ranks, and average between these groups."""
        if intra_node_size < 1:
            raise InvalidWorldSizeError(
                f"hybrid(intra_node_size={intra_node_size}): shards are cut over at least one rank"
            )
        return ShardingStrategy("hybrid", intra_node_size, keeps_whole=False)

    def ranks_per_copy(self, world_size: int) -> int:
        """Return the number of ranks over which shards are cut; `InvalidWorldSizeError` if
        `world_size` is no multiple of it.
        """
        size = self.group_size if self.group_size is not None else world_size
        if world_size % size:
            raise InvalidWorldSizeError(
                f"FSDP: {self} needs a world size that is a multiple of {size}, and there are "
                f"{world_size} ranks"
            )
        return size

    def __str__(self) -> str:
        if self.name == "hybrid":
            return f"hybrid(intra_node_size={self.group_size})"
        return self.name.upper()

    __repr__ = __str__


ShardingStrategy.FULL_SHARD = ShardingStrategy("full_shard", None, keeps_whole=False)
ShardingStrategy.SHARD_GRAD_OP = ShardingStrategy("shard_grad_op", None, keeps_whole=True)
ShardingStrategy.NO_SHARD = ShardingStrategy("no_shard", 1, keeps_whole=True)
_NAMED = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD


# Mixed precision --------------------------------------------------------------------------------


_COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes in which a model computes and reduces; shards and optimizer state are wider.

    compute_dtype   of the unsharded parameters, and so of an all-gather's bytes
    reduce_dtype    in which gradients are added over the ranks, and moved
    cast_inputs     whether floating-point inputs of the model are converted to `compute_dtype`

    Shards keep the dtype in which the model was built. Only floating-point parameters are
    converted; buffers are not, nor are the parameters of BatchNorm layers, which compute in the
    dtype of their running statistics. Outputs are in `compute_dtype`.
    """

    compute_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "reduce_dtype"):
            if (dtype := getattr(self, name)) not in _COMPUTED:
                raise TypeError(f"{name} is float16, bfloat16, float32 or float64, not {dtype!r}")

    def cast(self, inputs: Any) -> Any:
        """Return the inputs of the model, converted if that was asked for."""
        if not self.cast_inputs:
            return inputs
        dtype = self.compute_dtype
        return pytree.tree_map_only(
            Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, inputs
        )


def strategy_of(given: ShardingStrategy | str) -> ShardingStrategy:
    """Return the strategy of `strategy=`; one without a number may be given by its name."""
    if isinstance(given, ShardingStrategy):
        return given
    names = [strategy.name for strategy in _NAMED]
    if isinstance(given, str) and given.lower() in names:
        return _NAMED[names.index(given.lower())]
    raise TypeError(
        f"strategy is a ShardingStrategy, such as ShardingStrategy.FULL_SHARD or hybrid(2), or one "
        f"of the names {', '.join(names)}, not {given!r}"
    )


def precision_of(given: MixedPrecision | torch.dtype | None) -> MixedPrecision | None:
    """Return the precision of `mixed_precision=`; a dtype stands for the one to compute in."""
    if given is None or isinstance(given, MixedPrecision):
        return given
    if isinstance(given, torch.dtype):
        return MixedPrecision(compute_dtype=given)
    raise TypeError(f"mixed_precision is a MixedPrecision or a dtype, not {given!r}")
