"""The smallest training loop, what describes one rank of it, and a notice to leave."""

from phalanx.training.config import CompressionConfig, DataParallelConfig, DistributedConfig
from phalanx.training.loop import distributed_train_step, train_epoch
from phalanx.training.notice import Notice

__all__ = [
    "CompressionConfig",
    "DataParallelConfig",
    "DistributedConfig",
    "Notice",
    "distributed_train_step",
    "train_epoch",
]
