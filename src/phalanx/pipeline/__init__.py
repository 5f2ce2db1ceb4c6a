"""Pipeline parallelism: layers cut into stages, batches into micro-batches."""

from phalanx.pipeline.pipeline import Pipeline
from phalanx.pipeline.plan import PipelineParallelConfig, measure_layer_costs
from phalanx.pipeline.schedules import PipelineBubble
from phalanx.pipeline.split import PipelineStage, balance_stages, split_into_stages

__all__ = [
    "Pipeline",
    "PipelineBubble",
    "PipelineParallelConfig",
    "PipelineStage",
    "balance_stages",
    "measure_layer_costs",
    "split_into_stages",
]
