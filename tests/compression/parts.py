"""All parts of an average, in one thread and without a rank: requests met by plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.compression import Compressor
from phalanx.compression.compressor import Gather, Mean, MeanShard, Part, Request, Swap
from phalanx.compression.memory import Bundle


def average(
    compressors: Sequence[Compressor], bundles: Sequence[Bundle], *, shards: bool = False
) -> list[Tensor]:
    """Carry out one average of all parts; what each has in the end: all of it, or its shard."""
    p = len(bundles)
    rounds = [
        (compressor.average_shard_ if shards else compressor.average_)(bundle, Part(number, p))
        for number, (compressor, bundle) in enumerate(zip(compressors, bundles, strict=True))
    ]
    requests = [next(one, None) for one in rounds]
    while requests[0] is not None:
        requests = [send(one, got) for one, got in zip(rounds, met(requests), strict=True)]
    assert requests == [None] * p
    if shards:
        return [bundle.shards(p)[number] for number, bundle in enumerate(bundles)]
    return [bundle.flat for bundle in bundles]


def send(one, got: Tensor):
    try:
        return one.send(got)
    except StopIteration:
        return None


def met(requests: list[Request]) -> list[Tensor]:
    """What every part gets."""
    kinds = {(type(request), request.tensor.shape, request.tensor.dtype) for request in requests}
    assert len(kinds) == 1, f"parts want different things: {kinds}"
    given = torch.stack([request.tensor for request in requests])
    p = len(requests)
    if isinstance(requests[0], Mean):
        for request in requests:
            request.tensor.fill_(torch.nan)  # as it may be overwritten
        return [(given.double().sum(0) / p).to(given.dtype) for _ in range(p)]
    if isinstance(requests[0], MeanShard):
        return [(given.double().sum(0) / p).to(given.dtype)[number].clone() for number in range(p)]
    if isinstance(requests[0], Gather):
        return [given.clone() for _ in range(p)]
    assert isinstance(requests[0], Swap)
    return [given[:, number].clone() for number in range(p)]


def bundles_of(per_part: Sequence[Sequence[Tensor]]) -> list[Bundle]:
    names = [f"g{number}" for number in range(len(per_part[0]))]
    return [Bundle.of(tensors, names) for tensors in per_part]


def padded(bundles: Sequence[Bundle]) -> list[Bundle]:
    """The same gradients in memory that can be cut into a shard for each."""
    p = len(bundles)
    return [
        Bundle(
            torch.nn.functional.pad(bundle.flat, (0, -len(bundle.flat) % p)),
            [piece.name for piece in bundle.pieces],
            [piece.shape for piece in bundle.pieces],
        )
        for bundle in bundles
    ]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
