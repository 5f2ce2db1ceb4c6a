"""Every aggregator, for tests that all have to pass; and lists of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from phalanx import (
    AllReduceAggregator,
    Backend,
    CompressedAggregator,
    ErrorFeedback,
    GradientAggregator,
    LocalAggregator,
    ParameterServer,
    PowerSGD,
    Quantized,
    TopK,
)
from phalanx.compression import Compressor, Half, RandomK

EXACT: Mapping[str, Callable[[Backend], GradientAggregator]] = MappingProxyType(
    {
        "all-reduce": AllReduceAggregator,
        "all-reduce in rank order": lambda b: AllReduceAggregator(b, reproducible=True),
        "parameter server": ParameterServer,
        "top-k of all": lambda b: CompressedAggregator(b, TopK(1)),
        "random-k of all": lambda b: CompressedAggregator(b, RandomK(1)),
        "PowerSGD of full rank": lambda b: CompressedAggregator(b, PowerSGD(100)),
    }
)
COMPRESSORS: Mapping[str, Callable[[], Compressor]] = MappingProxyType(
    {
        "top-k": lambda: TopK(0.1),
        "random-k": lambda: RandomK(0.1),
        "float16": lambda: Half(torch.float16),
        "bfloat16": Half,
        "8 bits": Quantized,
        "4 bits": lambda: Quantized(4, block=8),
        "1 bit": lambda: Quantized(1, block=8),
        "PowerSGD": lambda: PowerSGD(1),
        "top-k, error feedback": lambda: ErrorFeedback(TopK(0.1)),
        "1 bit, error feedback": lambda: ErrorFeedback(Quantized(1, block=8)),
        "PowerSGD, error feedback": lambda: ErrorFeedback(PowerSGD(1)),
    }
)


def _compressed(make: Callable[[], Compressor]) -> Callable[[Backend], GradientAggregator]:
    return lambda backend: CompressedAggregator(backend, make())


ALL: Mapping[str, Callable[[Backend], GradientAggregator]] = MappingProxyType(
    {**EXACT, **{name: _compressed(make) for name, make in COMPRESSORS.items()}}
)
ALONE: Mapping[str, Callable[[Backend], GradientAggregator]] = MappingProxyType(
    {"local": lambda b: LocalAggregator(), **ALL}
)

SHAPES = [(6, 5), (), (33,), (0,), (3, 0, 2), (1, 1), (4, 3, 5)]


def gradients(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in SHAPES]


def mean_of(ranks: int, step: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    per_rank = [gradients(rank, step, dtype) for rank in range(ranks)]
    return [
        torch.stack([g.double() for g in one]).mean(0).to(dtype)
        for one in zip(*per_rank, strict=True)
    ]
