"""The smallest training loop, and what describes one rank of it."""

from phalanx.training.config import CompressionConfig, DataParallelConfig, DistributedConfig
from phalanx.training.loop import distributed_train_step, train_epoch

__all__ = [
    "CompressionConfig",
    "DataParallelConfig",
    "DistributedConfig",
    "distributed_train_step",
    "train_epoch",
]
