"""Phalanx: train PyTorch models across ranks.

At the top level are the names that a training script uses: starting, backends, collectives, errors,
and the ways to split a model. The rest is in packages such as `phalanx.tensor`.
Names are imported when they are first used, so that `phalanx --help` need not wait for torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.aggregation import AllReduceAggregator as AllReduceAggregator
    from phalanx.aggregation import CompressedAggregator as CompressedAggregator
    from phalanx.aggregation import GradientAggregator as GradientAggregator
    from phalanx.aggregation import LocalAggregator as LocalAggregator
    from phalanx.aggregation import ParameterServer as ParameterServer
    from phalanx.backends import *
    from phalanx.checkpoint import latest_checkpoint as latest_checkpoint
    from phalanx.checkpoint import load_checkpoint as load_checkpoint
    from phalanx.checkpoint import load_pretrained as load_pretrained
    from phalanx.checkpoint import save_checkpoint as save_checkpoint
    from phalanx.collectives import *
    from phalanx.compression import CompressedGradient as CompressedGradient
    from phalanx.compression import ErrorFeedback as ErrorFeedback
    from phalanx.compression import PowerSGD as PowerSGD
    from phalanx.compression import Quantized as Quantized
    from phalanx.compression import TopK as TopK
    from phalanx.compression import TopKCompressor as TopKCompressor
    from phalanx.compression import compress_gradients as compress_gradients
    from phalanx.compression import decompress_gradients as decompress_gradients
    from phalanx.elastic import Elastic as Elastic
    from phalanx.errors import *
    from phalanx.fsdp import *
    from phalanx.launch.init import init as init
    from phalanx.launch.simulate import Simulation as Simulation
    from phalanx.launch.simulate import simulate as simulate
    from phalanx.launch.spawn import spawn as spawn
    from phalanx.optim import ShardedOptimizer as ShardedOptimizer
    from phalanx.parallel import *
    from phalanx.pipeline import Pipeline as Pipeline
    from phalanx.pipeline import PipelineParallelConfig as PipelineParallelConfig
    from phalanx.pipeline import balance_stages as balance_stages
    from phalanx.pipeline import split_into_stages as split_into_stages
    from phalanx.tensor import ColumnParallelLinear as ColumnParallelLinear
    from phalanx.tensor import ParallelEmbedding as ParallelEmbedding
    from phalanx.tensor import RowParallelLinear as RowParallelLinear
    from phalanx.tensor import gather_shards as gather_shards
    from phalanx.tensor import parallelize as parallelize
    from phalanx.tensor import shard_tensor as shard_tensor
    from phalanx.training import BatchSampler as BatchSampler
    from phalanx.training import Notice as Notice
    from phalanx.training import Scalars as Scalars
    from phalanx.training import distributed_train_step as distributed_train_step
    from phalanx.training import mean as mean
    from phalanx.training import train_epoch as train_epoch

__version__ = "0.1.0"

_WHERE = {
    "phalanx.aggregation": """
        AllReduceAggregator CompressedAggregator GradientAggregator LocalAggregator ParameterServer
    """,
    "phalanx.backends": """
        DEFAULT_TIMEOUT Backend GlooBackend HybridBackend MpiBackend NcclBackend SharedMemoryBackend
        SimulatedBackend SubBackend TcpBackend TorchBackend UccBackend
    """,
    "phalanx.checkpoint": "latest_checkpoint load_checkpoint load_pretrained save_checkpoint",
    "phalanx.collectives": """
        PendingCollective ReduceOp all_gather all_gather_object all_reduce all_reduce_
        all_reduce_coalesced all_reduce_coalesced_ all_to_all all_to_all_uneven async_all_gather
        async_all_gather_object async_all_reduce async_all_reduce_ async_all_reduce_coalesced
        async_all_reduce_coalesced_ async_all_to_all async_all_to_all_uneven async_barrier
        async_broadcast async_broadcast_ async_broadcast_object async_gather async_reduce
        async_reduce_ async_reduce_scatter async_scatter barrier broadcast broadcast_
        broadcast_object chunk_ranges gather irecv isend recv recv_object reduce reduce_
        reduce_scatter scatter send send_object sendrecv wait_any
    """,
    "phalanx.compression": """
        CompressedGradient ErrorFeedback PowerSGD Quantized TopK TopKCompressor compress_gradients
        decompress_gradients
    """,
    "phalanx.elastic": "Elastic",
    "phalanx.errors": """
        AuthenticationError BackendUnavailableError CheckpointDamagedError CheckpointError
        CheckpointIOError CheckpointMismatchError CheckpointNotFoundError CollectiveTimeoutError
        DeadlockError DesyncError DistributedError InvalidRankError InvalidWorldSizeError
        MalformedObjectError MembershipError MisuseError PeerLostError RankStopped SelfSendError
        SizeMismatchError UnsupportedObjectError UnsupportedOperationError
    """,
    "phalanx.fsdp": "FSDP MixedPrecision ShardingStrategy",
    "phalanx.launch.init": "init",
    "phalanx.launch.simulate": "Simulation simulate",
    "phalanx.launch.spawn": "spawn",
    "phalanx.optim": "ShardedOptimizer",
    "phalanx.parallel": """
        DDP DeviceMesh DiLoCo GradScaler LocalSGD SyncBatchNorm clip_grad_norm_
        convert_sync_batchnorm
    """,
    "phalanx.pipeline": "Pipeline PipelineParallelConfig balance_stages split_into_stages",
    "phalanx.tensor": """
        ColumnParallelLinear ParallelEmbedding RowParallelLinear gather_shards parallelize
        shard_tensor
    """,
    "phalanx.training": "BatchSampler Notice Scalars distributed_train_step mean train_epoch",
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names.split()}
_PACKAGES = frozenset(module.split(".")[1] for module in _WHERE)

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 - each is spelled out above


if not TYPE_CHECKING:  # or a type checker would let any name pass

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:  # phalanx.tensor, ...
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Return the public names, the packages that have them and more, and Python's own."""
    return sorted({*__all__, *_PACKAGES, *(name for name in globals() if name.startswith("__"))})


def _register_with_torch() -> None:
    """Tell torch how process groups named "phalanx" are made. Any number of times.

    torch calls this at the end of `import torch`, in every program of the environment. So it is in
    this module, which imports nothing, and does not raise, which would break `import torch`: the
    log says what goes wrong. A backend of that name that someone else has registered stays.
    """
    try:
        from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

        known = c10d.Backend._plugins.get("PHALANX")
        if known is None:
            c10d.Backend.register_backend(
                "phalanx", _create_torch_group, extended_api=True, devices=["cpu"]
            )
        elif known.creator_fn is not _create_torch_group:
            raise RuntimeError(f"another backend has the name 'phalanx': {known.creator_fn}")
        if os.environ.get("PHALANX_INSTEAD_OF_GLOO", "") == "1":
            from phalanx.torch_backend.instead_of_gloo import take_place  # noqa: PLC0415

            take_place(c10d, "phalanx")
    except Exception:
        import logging  # noqa: PLC0415

        logging.getLogger("phalanx").warning(
            "torch does not take the backend 'phalanx'", exc_info=True
        )


def _create_torch_group(options: Any, backend_options: object = None) -> Any:
    """Make a process group, as torch asks for one."""
    from phalanx.torch_backend.creation import create_group  # noqa: PLC0415

    return create_group(options, backend_options)
