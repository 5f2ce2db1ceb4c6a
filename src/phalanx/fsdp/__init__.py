"""FSDP: parameters, gradients and optimizer state cut into shards over ranks."""

from phalanx.fsdp.api import FSDP
from phalanx.fsdp.strategy import MixedPrecision, ShardingStrategy

__all__ = ["FSDP", "MixedPrecision", "ShardingStrategy"]
