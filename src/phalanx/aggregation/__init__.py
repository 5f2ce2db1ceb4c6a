"""Gradients in, their average out."""

from phalanx.aggregation.aggregators import (
    AllReduceAggregator,
    CompressedAggregator,
    GradientAggregator,
    LocalAggregator,
    ParameterServer,
)
from phalanx.aggregation.parameter_server import ParameterClient, ServerMode, ServiceRecord

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
