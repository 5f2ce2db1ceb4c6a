"""Ways to split a model and its training over ranks."""

from phalanx.parallel.ddp import DDP
from phalanx.parallel.grad_scaler import GradScaler
from phalanx.parallel.local_sgd import DiLoCo, LocalSGD
from phalanx.parallel.mesh import DeviceMesh
from phalanx.parallel.norms import clip_grad_norm_
from phalanx.parallel.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

__all__ = [
    "DDP",
    "DeviceMesh",
    "DiLoCo",
    "GradScaler",
    "LocalSGD",
    "SyncBatchNorm",
    "clip_grad_norm_",
    "convert_sync_batchnorm",
]
