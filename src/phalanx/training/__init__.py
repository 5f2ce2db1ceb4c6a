"""The smallest training loop, configurations of its ranks, notices to leave, and scalars."""

from phalanx.training.config import CompressionConfig, DataParallelConfig, DistributedConfig
from phalanx.training.loop import distributed_train_step, train_epoch
from phalanx.training.notice import Notice
from phalanx.training.scalars import Scalars

__all__ = [
    "CompressionConfig",
    "DataParallelConfig",
    "DistributedConfig",
    "Notice",
    "Scalars",
    "distributed_train_step",
    "train_epoch",
]
