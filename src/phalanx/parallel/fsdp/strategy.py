"""Strategies: what of a model each rank keeps, and when. Rows of one table.

                    shards are cut over    full parameters            as in
    FULL_SHARD      all ranks              while a unit needs them    ZeRO-3
    hybrid(k)       k consecutive ranks    while a unit needs them    ZeRO-3, and replicas
    SHARD_GRAD_OP   all ranks              always                     ZeRO-2
    NO_SHARD        one rank               always                     data parallel

Gradients and optimizer state are cut like the shards. Between the groups of a strategy that cuts
over fewer than all ranks, gradients are averaged (Rajbhandari et al. 2020, "ZeRO"; Zhao et al.
2023, "PyTorch FSDP").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phalanx.errors import InvalidWorldSizeError


@dataclass(frozen=True)
class ShardingStrategy:
    """A row: `FULL_SHARD`, `SHARD_GRAD_OP`, `NO_SHARD`, or `hybrid(intra_node_size=k)`.

    name          as it is written on a command line
    group_size    over how many consecutive ranks shards are cut; None: over all
    keeps_whole   whether full parameters stay between the uses of a unit
    """

    name: str
    group_size: int | None
    keeps_whole: bool

    FULL_SHARD: ClassVar[ShardingStrategy]
    SHARD_GRAD_OP: ClassVar[ShardingStrategy]
    NO_SHARD: ClassVar[ShardingStrategy]

    @staticmethod
    def hybrid(intra_node_size: int) -> ShardingStrategy:
        """Shards over each `intra_node_size` consecutive ranks, averages between these groups."""
        if intra_node_size < 1:
            raise InvalidWorldSizeError(
                f"hybrid(intra_node_size={intra_node_size}): shards are cut over at least one rank"
            )
        return ShardingStrategy("hybrid", intra_node_size, keeps_whole=False)

    def ranks_per_copy(self, world_size: int) -> int:
        """Over how many of so many ranks shards are cut; `InvalidWorldSizeError` if none fits."""
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
