"""Whether the ranks are about to do the same, and what they say differently if they are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from phalanx.backends.base import Backend
from phalanx.backends.memory import readable_bytes
from phalanx.collectives import all_gather, all_gather_object
from phalanx.errors import DesyncError
from phalanx.parallel.replicas import RANKS_SHOWN, describe, minority


def check_agreement(lines: Sequence[str], backend: Backend, *, op: str, remedy: str) -> None:
    """Raise `DesyncError` on every rank unless all of them say the same, line by line.

    lines    what this rank is about to do, in words
    op       who asks, for the message
    remedy   what to do about it, a sentence without its full stop

    Blocks for one message of 8 bytes; the lines themselves are exchanged only when they differ.
    The error names the first line that does, and the ranks in the minority (if there is none, those
    that do not say what rank 0 says).
    """
    if backend.world_size == 1:
        return
    digest = xxh3_64_intdigest("\n".join(lines).encode()) >> 1  # 63 bits: torch has no full uint64
    digests = all_gather(torch.tensor([digest], dtype=torch.int64), backend)
    if bool((digests == digest).all()):
        return
    everyone = cast("list[list[str]]", all_gather_object(list(lines), backend))
    said = _first_difference(everyone)
    odd = minority(said)
    if len(odd) == len(said):  # nobody knows who is right: take rank 0 for it
        odd = [rank for rank, text in said.items() if text != said[0]]
    usual = next(rank for rank in said if rank not in odd)
    theirs = "; ".join(f"rank {rank} has {said[rank]}" for rank in odd[:RANKS_SHOWN])
    raise DesyncError(
        f"rank {backend.rank}: {op}: the ranks differ: {theirs}, rank {usual} has {said[usual]}. "
        f"{remedy}",
        rank=backend.rank,
        peer=odd[0],
        op=op,
    )


def describe_with_values(name: str, tensor: Tensor) -> str:
    """A parameter or buffer for `check_agreement`, with a hash of its values.

    On the meta device there are none. Costs reading it once.
    """
    if tensor.is_meta:
        return f"{describe(name, tensor)} without values"
    digest = xxh3_64_hexdigest(readable_bytes(tensor.detach().cpu()))
    return f"{describe(name, tensor)} with values of hash {digest}"


def _first_difference(everyone: list[list[str]]) -> dict[int, str]:
    """What each rank says in the first line in which not all say the same."""
    for place in range(max(map(len, everyone))):
        said = {
            rank: own[place] if place < len(own) else "nothing more"
            for rank, own in enumerate(everyone)
        }
        if len(set(said.values())) > 1:
            return said
    raise AssertionError("the hashes of equal lines differ")
