"""Whether the ranks hold the same model, and which parameter differs if they do not."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor, nn
from xxhash import xxh3_64_intdigest

from phalanx.backends.base import Backend
from phalanx.collectives import all_gather
from phalanx.errors import DesyncError


def describe(name: str, tensor: Tensor) -> str:
    """A parameter or buffer for a message: its name, dtype, shape, and whether it is frozen."""
    frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return f"{name} ({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{frozen})"


def check_same_model(module: nn.Module, backend: Backend) -> None:
    """Raise `DesyncError` on every rank unless all have parameters alike, in the same order.

    Names, shapes, dtypes and `requires_grad` are compared, not values. Costs one message of 8
    bytes; the descriptions themselves are exchanged only when they differ.
    """
    mine = [describe(name, parameter) for name, parameter in module.named_parameters()]
    mine += [f"buffer {describe(name, buffer)}" for name, buffer in module.named_buffers()]
    encoded = msgspec.json.encode(mine)
    digest = xxh3_64_intdigest(encoded) >> 1  # 63 bits: torch has no full uint64
    summary = torch.tensor([[digest, len(encoded)]], dtype=torch.int64)
    summaries = all_gather(summary, backend)
    if bool((summaries[:, 0] == digest).all()):
        return
    longest = int(summaries[:, 1].max())
    padded = torch.zeros(1, longest, dtype=torch.uint8)
    padded[0, : len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    everyone = [
        msgspec.json.decode(bytes(row[: int(length)].tolist()), type=list[str])
        for row, length in zip(all_gather(padded, backend), summaries[:, 1], strict=True)
    ]
    odd, ours, theirs = _first_difference(everyone)
    raise DesyncError(
        f"rank {backend.rank}: the ranks' models differ: rank {odd} has {theirs}, rank 0 has {ours}"
        ". Build the same model on every rank, in the same order",
        rank=backend.rank,
        peer=odd,
        op="DDP",
    )


def _first_difference(everyone: list[list[str]]) -> tuple[int, str, str]:
    """(the rank that differs from rank 0, rank 0's parameter, that rank's)."""
    for rank, theirs in enumerate(everyone):
        ours = everyone[0]
        for place in range(max(len(ours), len(theirs))):
            here = ours[place] if place < len(ours) else "no more parameters"
            there = theirs[place] if place < len(theirs) else "no more parameters"
            if here != there:
                return rank, here, there
    raise AssertionError("the hashes of equal descriptions differ")
