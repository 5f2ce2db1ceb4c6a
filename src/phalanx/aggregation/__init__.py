"""Gradients in, their average out."""

from phalanx.aggregation.aggregator import GradientAggregator, LocalAggregator
from phalanx.aggregation.all_reduce import AllReduceAggregator
from phalanx.aggregation.compressed import CompressedAggregator
from phalanx.aggregation.parameter_server import ParameterServer
from phalanx.aggregation.service import ParameterClient, ServerMode, ServiceRecord

__all__ = [
    "AllReduceAggregator",
    "CompressedAggregator",
    "GradientAggregator",
    "LocalAggregator",
    "ParameterClient",
    "ParameterServer",
    "ServerMode",
    "ServiceRecord",
]
