"""What a rank has of its own between two meetings, as part of a state dict.

    local@2/4.count            rank 2 of 4: steps, steps since the ranks last met, meetings
    local@2/4.value.<name>     its parameter or buffer, while ranks have different ones

As many ranks as before get their own back; of another number each begins from the mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.errors import SizeMismatchError
from phalanx.parallel.local.counter import Counts

_KEY = re.compile(r"local@(\d+)/(\d+)\.(count$|value\..*)", re.DOTALL)
_VALUE = "value."


def is_value_of_another(key: str, backend: Backend) -> bool:
    """Whether it is a parameter or buffer that another rank has had."""
    match = _KEY.fullmatch(key)
    return (
        match is not None
        and match[3].startswith(_VALUE)
        and (int(match[1]), int(match[2])) != (backend.rank, backend.world_size)
    )


def local_state(
    counts: Counts, values: Mapping[str, Tensor], backend: Backend
) -> dict[str, Tensor]:
    """This rank's state; `values` are empty where all ranks have the same."""
    prefix = f"local@{backend.rank}/{backend.world_size}."
    state = {prefix + "count": torch.tensor(counts, dtype=torch.int64)}
    return state | {f"{prefix}{_VALUE}{name}": value.detach() for name, value in values.items()}


def saved_counts(state: Mapping[str, Any], backend: Backend) -> Counts | None:
    """This rank's, or with another number of ranks the first one's; None if there is none."""
    found: dict[tuple[int, int], Counts] = {}
    for key, value in state.items():
        match = _KEY.fullmatch(key)
        if match is not None and match[3] == "count":
            found[int(match[2]), int(match[1])] = Counts(*map(int, value.tolist()))
    mine = (backend.world_size, backend.rank)
    return found.get(mine, found[min(found)] if found else None)


def saved_values(state: Mapping[str, Any], backend: Backend) -> dict[str, Tensor]:
    """By name what this rank is to have: its own; or the mean of all ranks', if all are there and
    they were another number; else nothing.
    """
    by_rank: dict[int, dict[str, Tensor]] = {}
    size = 0
    for key, value in state.items():
        match = _KEY.fullmatch(key)
        if match is not None and match[3].startswith(_VALUE):
            size = int(match[2])
            by_rank.setdefault(int(match[1]), {})[match[3][len(_VALUE) :]] = value
    if size == backend.world_size:
        return by_rank.get(backend.rank, {})
    if len(by_rank) < size or not by_rank:
        return {}
    first = by_rank[min(by_rank)]
    return {
        name: torch.stack([each[name].double() for each in by_rank.values()]).mean(0)
        if value.is_floating_point()
        else value
        for name, value in first.items()
    }


@torch.no_grad()
def put_values(
    values: Mapping[str, Tensor], tensors: Mapping[str, Tensor], backend: Backend, who: str
) -> None:
    """Overwrite tensors of these names. Raises `SizeMismatchError` for those of another model."""
    for name, value in values.items():
        if name not in tensors or tensors[name].shape != value.shape:
            has = f"{list(tensors[name].shape)}" if name in tensors else "none"
            raise SizeMismatchError(
                f"rank {backend.rank}: {who}: the state dict has {name} of shape "
                f"{list(value.shape)} for one rank, and this model has {has}: it is the state of "
                "another model",
                rank=backend.rank,
            )
    for name, value in values.items():
        tensors[name].copy_(value)
