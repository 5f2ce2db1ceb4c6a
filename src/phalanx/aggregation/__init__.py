"""Gradients in, their average out."""

from phalanx.aggregation.aggregator import GradientAggregator, LocalAggregator
from phalanx.aggregation.all_reduce import AllReduceAggregator
from phalanx.aggregation.compressed import CompressedAggregator
from phalanx.aggregation.parameter_server import ParameterServer

__all__ = [
    "AllReduceAggregator",
    "CompressedAggregator",
    "GradientAggregator",
    "LocalAggregator",
    "ParameterServer",
]
