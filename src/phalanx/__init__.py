"""Phalanx: train PyTorch models across ranks.

Names are imported when they are first used, so that `phalanx --help` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.aggregation import *
    from phalanx.backends import *
    from phalanx.checkpoint import *
    from phalanx.collectives import *
    from phalanx.compression import *
    from phalanx.errors import *
    from phalanx.fsdp import *
    from phalanx.launch.init import init as init
    from phalanx.launch.simulate import Simulation as Simulation
    from phalanx.launch.simulate import simulate as simulate
    from phalanx.launch.spawn import spawn as spawn
    from phalanx.parallel import *
    from phalanx.pipeline import *
    from phalanx.tensor import *
    from phalanx.training import *

__version__ = "0.1.0"

_WHERE = {
    "phalanx.aggregation": (
        "AllReduceAggregator",
        "CompressedAggregator",
        "GradientAggregator",
        "LocalAggregator",
        "ParameterClient",
        "ParameterServer",
        "ServerMode",
        "ServiceRecord",
    ),
    "phalanx.backends": (
        "Backend",
        "GlooBackend",
        "HybridBackend",
        "MpiBackend",
        "NcclBackend",
        "SharedMemoryBackend",
        "SimulatedBackend",
        "SubBackend",
        "TcpBackend",
        "TorchBackend",
        "UccBackend",
    ),
    "phalanx.checkpoint": (
        "Checkpoint",
        "PendingSave",
        "latest_checkpoint",
        "load_checkpoint",
        "save_checkpoint",
    ),
    "phalanx.collectives": (
        "PendingCollective",
        "ReduceOp",
        "all_gather",
        "all_gather_object",
        "all_reduce",
        "all_reduce_",
        "all_reduce_coalesced",
        "all_reduce_coalesced_",
        "all_to_all",
        "all_to_all_uneven",
        "async_all_gather",
        "async_all_gather_object",
        "async_all_reduce",
        "async_all_reduce_",
        "async_all_reduce_coalesced",
        "async_all_reduce_coalesced_",
        "async_all_to_all",
        "async_all_to_all_uneven",
        "async_barrier",
        "async_broadcast",
        "async_broadcast_",
        "async_broadcast_object",
        "async_gather",
        "async_reduce",
        "async_reduce_",
        "async_reduce_scatter",
        "async_scatter",
        "barrier",
        "broadcast",
        "broadcast_",
        "broadcast_object",
        "chunk_ranges",
        "gather",
        "irecv",
        "isend",
        "recv",
        "reduce",
        "reduce_",
        "reduce_scatter",
        "scatter",
        "send",
        "sendrecv",
        "wait_any",
    ),
    "phalanx.compression": (
        "CompressedGradient",
        "Compressor",
        "ErrorFeedback",
        "Half",
        "PowerSGD",
        "Quantized",
        "RandomK",
        "TopK",
        "TopKCompressor",
        "compress_gradients",
        "decompress_gradients",
    ),
    "phalanx.errors": (
        "AuthenticationError",
        "BackendUnavailableError",
        "CheckpointDamagedError",
        "CheckpointError",
        "CheckpointIOError",
        "CheckpointMismatchError",
        "CheckpointNotFoundError",
        "CollectiveTimeoutError",
        "DeadlockError",
        "DesyncError",
        "DistributedError",
        "InvalidRankError",
        "InvalidWorldSizeError",
        "MalformedObjectError",
        "MisuseError",
        "PeerLostError",
        "RankStopped",
        "SelfSendError",
        "SizeMismatchError",
        "UnsupportedObjectError",
        "UnsupportedOperationError",
    ),
    "phalanx.fsdp": ("FSDP", "MixedPrecision", "ShardingStrategy"),
    "phalanx.launch.init": ("init",),
    "phalanx.launch.simulate": ("Simulation", "simulate"),
    "phalanx.launch.spawn": ("spawn",),
    "phalanx.parallel": (
        "DDP",
        "DeviceMesh",
        "DiLoCo",
        "GradScaler",
        "LocalSGD",
        "SyncBatchNorm",
        "convert_sync_batchnorm",
    ),
    "phalanx.pipeline": (
        "Pipeline",
        "PipelineBubble",
        "PipelineParallelConfig",
        "PipelineStage",
        "balance_stages",
        "measure_layer_costs",
        "split_into_stages",
    ),
    "phalanx.tensor": (
        "ColumnParallelLinear",
        "ColumnStyle",
        "EmbeddingStyle",
        "ParallelEmbedding",
        "RowParallelLinear",
        "RowStyle",
        "SequenceNormStyle",
        "SequenceParallelNorm",
        "check_whole_parameters",
        "clip_grad_norm_",
        "copy_to_ranks",
        "full_state_dict",
        "gather_from_ranks",
        "gather_sequence",
        "gather_shards",
        "load_full_state_dict",
        "parallel_cross_entropy",
        "parallelize",
        "reduce_from_ranks",
        "scatter_sum",
        "scatter_to_ranks",
        "shard_tensor",
    ),
    "phalanx.training": (
        "CompressionConfig",
        "DataParallelConfig",
        "DistributedConfig",
        "distributed_train_step",
        "train_epoch",
    ),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 - each is spelled out above


if not TYPE_CHECKING:  # or a type checker would let any name pass

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
