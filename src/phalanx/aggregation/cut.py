"""Gradients that are cut over ranks before a compressor averages them: whose state is of what.

2 x 4 ranks     rank 0    1    2    3      the shards of one copy
                rank 4    5    6    7      those of another one; 0 and 4 average theirs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.compression.memory import under
from phalanx.compression.residuals import RESIDUAL, joined, read_owned_key, shares, short_of
from phalanx.errors import SizeMismatchError


class Cut(NamedTuple):
    """What of gradients a compressor averages on a rank, if that is not all of them.

    shards   over how many consecutive ranks they are cut
    pieces   what this rank has of them, by elements and name (`owned_key`)
    """

    shards: int
    pieces: frozenset[str]

    def fits(self, names: Iterable[str]) -> bool:
        """Whether all of these are of what this rank has."""
        return self.shards == 1 or self.pieces.issuperset(names)

    def whose(self, backend: Backend) -> str:
        """This rank, in keys: `2/4`, or `2/2x4` of 2 copies with 4 shards each."""
        copies = f"{backend.world_size // self.shards}x" if self.shards > 1 else ""
        return f"{backend.rank}/{copies}{self.shards if copies else backend.world_size}"


WHOLE = Cut(1, frozenset())


def shared_out(
    states: Mapping[int, Mapping[str, Tensor]],
    parts: int,
    shards: int,
    sizes_of: Mapping[str, int] | None,
    backend: Backend,
    cut: Cut,
) -> dict[str, Tensor]:
    """This rank's share of what averages were short of, where gradients are cut otherwise now.

    states    of the ranks that there were, `parts` copies of `shards` each
    sizes_of  of each gradient, by name, if they are known: `SizeMismatchError` if what was left
              over is of another model
    """
    dtype = torch.float32
    short: dict[str, Tensor] = {}
    for place in range(shards):
        group = [state for rank, state in states.items() if rank % shards == place]
        short.update(short_of(group, parts))
        kept = [left.dtype for state in group for left in under(RESIDUAL, state).values()]
        dtype = torch.float64 if torch.float64 in kept else dtype
    whole = short if shards == 1 else joined(short, sizes_of or {})
    if sizes_of is not None:
        _check_sizes(whole, sizes_of, backend)
    copies, copy = backend.world_size // cut.shards, backend.rank // cut.shards
    if cut.shards == 1:
        mine = whole
    else:
        places = {key: read_owned_key(key) for key in cut.pieces}
        mine = {k: whole[n][start:stop] for k, (n, start, stop) in places.items() if n in whole}
    return {RESIDUAL + key: shares(left, copies, dtype)[copy] for key, left in mine.items()}


def _check_sizes(left: Mapping[str, Tensor], sizes: Mapping[str, int], backend: Backend) -> None:
    for name, values in left.items():
        if sizes.get(name) != values.numel():
            has = f"{sizes[name]} values" if name in sizes else "no such gradient"
            raise SizeMismatchError(
                f"rank {backend.rank}: the state dict has {values.numel()} values that were left "
                f"over of {name}, and this model has {has}: it is the state of another model",
                rank=backend.rank,
            )
