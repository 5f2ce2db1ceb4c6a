"""Whether the ranks hold the same model, and which parameter differs if they do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

import msgspec
import torch
from torch import Tensor, nn
from xxhash import xxh3_64_intdigest

from phalanx.backends.base import Backend
from phalanx.collectives import all_gather
from phalanx.errors import DesyncError

RANKS_SHOWN = 4


def describe(name: str, tensor: Tensor) -> str:
    """A parameter or buffer for a message: its name, dtype, shape, and whether it is frozen."""
    frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return f"{name} ({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{frozen})"


def check_same_model(
    module: nn.Module, backend: Backend, options: Mapping[str, object], *, who: str = "DDP"
) -> None:
    """Raise `DesyncError` on every rank unless all have parameters alike, in the same order.

    Names, shapes, dtypes and `requires_grad` are compared, not values; and `options`, which every
    rank has to give alike, too. Costs one message of 16 bytes; the descriptions themselves are
    exchanged only when they differ.
    """
    mine = [f"{name}={value!r}" for name, value in options.items()]
    mine += [describe(name, parameter) for name, parameter in module.named_parameters()]
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
    place, said = _first_difference(everyone)
    what, remedy = (
        (f"options of {who}", "Pass the same ones on every rank")
        if place < len(options)
        else ("models", "Build the same model on every rank, in the same order")
    )
    odd = minority(said)
    if len(odd) == len(said):  # nobody knows who is right: take rank 0 for it
        odd = [rank for rank, text in said.items() if text != said[0]]
    usual = next(rank for rank in said if rank not in odd)
    theirs = "; ".join(f"rank {rank} has {said[rank]}" for rank in odd[:RANKS_SHOWN])
    raise DesyncError(
        f"rank {backend.rank}: the ranks' {what} differ: {theirs}, rank {usual} has {said[usual]}. "
        f"{remedy}",
        rank=backend.rank,
        peer=odd[0],
        op=who,
    )


def _first_difference(everyone: list[list[str]]) -> tuple[int, dict[int, str]]:
    """The first place in which not all say the same, and what each rank says there."""
    for place in range(max(map(len, everyone))):
        said = {
            rank: own[place] if place < len(own) else "no more parameters"
            for rank, own in enumerate(everyone)
        }
        if len(set(said.values())) > 1:
            return place, said
    raise AssertionError("the hashes of equal descriptions differ")


def minority(votes: Mapping[int, Hashable]) -> list[int]:
    """The ranks that do not vote as most do; all of them if two opinions have most votes."""
    (winner, most), *others = Counter(votes.values()).most_common()
    if others and others[0][1] == most:
        return list(votes)
    return [rank for rank, vote in votes.items() if vote != winner]
