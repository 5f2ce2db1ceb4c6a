"""All members of an average, in one thread and without a rank: requests met by plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.compression import Compressor
from phalanx.compression.compressor import (
    AllGather,
    AllReduceMean,
    AllToAll,
    GradientBucket,
    Member,
    ReduceScatterMean,
    Request,
)


def average(
    compressors: Sequence[Compressor], buckets: Sequence[GradientBucket], *, shards: bool = False
) -> list[Tensor]:
    """Carry out one average of all members; what each has in the end: all of it, or its shard."""
    p = len(buckets)
    rounds = [
        (compressor.average_shard_ if shards else compressor.average_)(bucket, Member(number, p))
        for number, (compressor, bucket) in enumerate(zip(compressors, buckets, strict=True))
    ]
    requests = [next(one, None) for one in rounds]
    while requests[0] is not None:
        requests = [send(one, got) for one, got in zip(rounds, met(requests), strict=True)]
    assert requests == [None] * p
    if shards:
        return [bucket.shards(p)[number] for number, bucket in enumerate(buckets)]
    return [bucket.flat for bucket in buckets]


def send(one, got: Tensor):
    try:
        return one.send(got)
    except StopIteration:
        return None


def met(requests: list[Request]) -> list[Tensor]:
    """What every member gets."""
    kinds = {(type(request), request.tensor.shape, request.tensor.dtype) for request in requests}
    assert len(kinds) == 1, f"members want different things: {kinds}"
    given = torch.stack([request.tensor for request in requests])
    p = len(requests)
    if isinstance(requests[0], AllReduceMean):
        for request in requests:
            request.tensor.fill_(torch.nan)  # as it may be overwritten
        return [(given.double().sum(0) / p).to(given.dtype) for _ in range(p)]
    if isinstance(requests[0], ReduceScatterMean):
        return [(given.double().sum(0) / p).to(given.dtype)[number].clone() for number in range(p)]
    if isinstance(requests[0], AllGather):
        return [given.clone() for _ in range(p)]
    assert isinstance(requests[0], AllToAll)
    return [given[:, number].clone() for number in range(p)]


def buckets_of(per_member: Sequence[Sequence[Tensor]]) -> list[GradientBucket]:
    names = [f"g{number}" for number in range(len(per_member[0]))]
    return [GradientBucket.of(tensors, names) for tensors in per_member]


def padded(buckets: Sequence[GradientBucket]) -> list[GradientBucket]:
    """The same gradients in memory that can be cut into a shard for each."""
    p = len(buckets)
    return [
        GradientBucket(
            torch.nn.functional.pad(bucket.flat, (0, -len(bucket.flat) % p)),
            [piece.name for piece in bucket.pieces],
            [piece.shape for piece in bucket.pieces],
        )
        for bucket in buckets
    ]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
