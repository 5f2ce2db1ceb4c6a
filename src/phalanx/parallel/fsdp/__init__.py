"""FSDP: parameters, gradients and optimizer state cut into shards over ranks."""

from phalanx.parallel.fsdp.fsdp import FSDP
from phalanx.parallel.fsdp.precision import MixedPrecision
from phalanx.parallel.fsdp.strategy import ShardingStrategy

__all__ = ["FSDP", "MixedPrecision", "ShardingStrategy"]
