"""Gradients in, their average out."""

from phalanx.aggregation.aggregators import (
    AllReduceAggregator,
    CompressedAggregator,
    GradientAggregator,
    LocalAggregator,
)
from phalanx.aggregation.parameter_server import ParameterClient, ServerMode, ServiceRecord
from phalanx.aggregation.parameter_server.aggregator import ParameterServer

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
