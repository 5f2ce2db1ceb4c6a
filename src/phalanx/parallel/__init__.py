"""Ways to split a model and its training over ranks."""

from phalanx.parallel.convert_batch_norm import convert_sync_batchnorm
from phalanx.parallel.ddp import DDP
from phalanx.parallel.fsdp import FSDP, MixedPrecision, ShardingStrategy
from phalanx.parallel.grad_scaler import GradScaler
from phalanx.parallel.local import DiLoCo, LocalSGD
from phalanx.parallel.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DDP",
    "FSDP",
    "DiLoCo",
    "GradScaler",
    "LocalSGD",
    "MixedPrecision",
    "ShardingStrategy",
    "SyncBatchNorm",
    "convert_sync_batchnorm",
]
