"""Pipeline parallelism: layers cut into stages, batches into micro-batches."""

from phalanx.pipeline.pipeline import Pipeline
from phalanx.pipeline.plan import (
    PipelineParallelConfig,
    PipelineStage,
    balance_stages,
    measure_layer_costs,
    split_into_stages,
)
from phalanx.pipeline.schedules import PipelineBubble

__all__ = [
    "Pipeline",
    "PipelineBubble",
    "PipelineParallelConfig",
    "PipelineStage",
    "balance_stages",
    "measure_layer_costs",
    "split_into_stages",
]
