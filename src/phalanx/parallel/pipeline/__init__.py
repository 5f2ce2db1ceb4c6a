"""Pipeline parallelism: layers cut into stages, batches into micro-batches."""

from .bubble import PipelineBubble
from .config import PipelineParallelConfig
from .costs import measure_layer_costs
from .pipeline import Pipeline
from .split import PipelineStage, balance_stages, split_into_stages

__all__ = [
    "Pipeline",
    "PipelineBubble",
    "PipelineParallelConfig",
    "PipelineStage",
    "balance_stages",
    "measure_layer_costs",
    "split_into_stages",
]
