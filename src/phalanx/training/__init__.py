"""For training scripts: a loop, configurations, batches, means, notices to leave, scalars."""

from phalanx.training.config import CompressionConfig, DataParallelConfig, DistributedConfig
from phalanx.training.loop import distributed_train_step, train_epoch
from phalanx.training.mean import mean
from phalanx.training.notice import Notice
from phalanx.training.sampler import BatchSampler
from phalanx.training.scalars import Scalars

__all__ = [
    "BatchSampler",
    "CompressionConfig",
    "DataParallelConfig",
    "DistributedConfig",
    "Notice",
    "Scalars",
    "distributed_train_step",
    "mean",
    "train_epoch",
]
