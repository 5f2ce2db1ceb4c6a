"""A comparison of lines of text over all ranks, and the first difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple, cast

import msgspec
import torch
from xxhash import xxh3_64_intdigest

from phalanx.collectives.movement import all_gather
from phalanx.collectives.objects import all_gather_object
from phalanx.core.backend import Backend

RANKS_SHOWN = 4


class Difference(NamedTuple):
    """The first line in which ranks differ.

    place   its number
    odd     the ranks in the minority; if none is, those that differ from rank 0
    text    the text of these, and of one of the others, for a message
    """

    place: int
    odd: list[int]
    text: str


def difference(
    mine: Sequence[str], backend: Backend, *, end: str, timeout: float | None = None
) -> Difference | None:
    """Compare lines of text over the ranks; None if all have the same. Blocks.

    end       the text, in messages, for a rank that has no more lines
    timeout   seconds that a message waits at most; by default the backend's

    Costs one message of 8 bytes; the lines themselves are exchanged only when they differ.
    """
    digest = xxh3_64_intdigest(msgspec.json.encode(list(mine))) >> 1  # torch has no full uint64
    digests = all_gather(torch.tensor([digest]), backend, timeout=timeout)
    if bool((digests == digest).all()):
        return None
    everyone = cast("list[list[str]]", all_gather_object(list(mine), backend, timeout=timeout))
    place, texts = next(
        (place, texts)
        for place, texts in enumerate(zip_longest(*everyone, fillvalue=end))
        if len(set(texts)) > 1
    )
    said = dict(enumerate(texts))
    odd = minority(said)
    if len(odd) == len(said):  # there is no majority: rank 0 counts as right
        odd = [rank for rank, text in said.items() if text != said[0]]
    usual = next(rank for rank in said if rank not in odd)
    theirs = "; ".join(f"rank {rank} has {said[rank]}" for rank in odd[:RANKS_SHOWN])
    return Difference(place, odd, f"{theirs}, rank {usual} has {said[usual]}")


def minority(votes: Mapping[int, Hashable]) -> list[int]:
    """Return the ranks in the minority; all of them if two texts have equally many ranks."""
    (winner, most), *others = Counter(votes.values()).most_common()
    if others and others[0][1] == most:
        return list(votes)
    return [rank for rank, vote in votes.items() if vote != winner]
