"""LocalSGD and DiLoCo in a state dict: their state between two syncs.

    local@2/4.count                   rank 2 of 4: steps, steps since the last sync, syncs; and, if
                                      they had weights, the sum of those since
    local@2/4.value.<name>            its parameter or buffer, while ranks have different ones
    local@2/4.value..<name>           the parameter as it was when weights began (`OuterStep.began`)
    outer@all.parameter.<name>        the parameter after the last sync, while ranks differ
    outer@all.state.<key>.<name>      the outer optimizer's state for it: a tensor, or a number
    outer@all.option.<group>.<key>    a number of a parameter group, such as the learning rate

As many ranks as before get their own back; of another number each begins from the mean. Entries
under `outer@all` are the same on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.core.backend import Backend
from phalanx.errors import SizeMismatchError, UnsupportedObjectError
from phalanx.parallel.averaging import weigh_

_LOCAL = re.compile(r"local@(\d+)/(\d+)\.(?:count|value\.(.*))", re.DOTALL)
_OUTER = "outer@all."


def _prefix(backend: Backend) -> str:
    return f"local@{backend.rank}/{backend.world_size}."


def local_state(
    counts: Sequence[float], values: Mapping[str, Tensor], backend: Backend
) -> dict[str, Tensor]:
    """Return this rank's counts, and its values that other ranks lack, under keys that name it."""
    prefix = _prefix(backend)
    state = {f"{prefix}count": torch.tensor(counts, dtype=torch.float64 if counts[3:] else None)}
    return state | {f"{prefix}value.{name}": value.detach() for name, value in values.items()}


def without_values_of_others(keys: Iterable[str], backend: Backend) -> list[str]:
    """Return the keys without those of other ranks' values."""
    mine = _prefix(backend)
    matches = ((key, _LOCAL.fullmatch(key)) for key in keys)
    return [key for key, at in matches if at is None or at[3] is None or key.startswith(mine)]


def saved_local(
    state: Mapping[str, Any], own: Mapping[str, Tensor], backend: Backend, who: str
) -> tuple[list[float] | None, Mapping[str, Tensor]]:
    """Return the counts, and values by name for its `own` tensors, with which this rank goes on.

    These are its own. With another number of ranks: the first one's counts, and the mean of all
    values if those of all ranks are there. Raises `SizeMismatchError` if they are another model's.
    """
    counts: dict[tuple[int, int], list[float]] = {}
    values: dict[tuple[int, int], dict[str, Tensor]] = {}
    for key, value in state.items():
        if match := _LOCAL.fullmatch(key):
            saved_by = int(match[2]), int(match[1])
            if match[3] is None:
                counts[saved_by] = value.tolist()
            else:
                values.setdefault(saved_by, {})[match[3]] = value
    here = backend.world_size, backend.rank
    count = counts.get(here, counts[min(counts)]) if counts else None
    seen = {saved_by: sum(each[3:]) for saved_by, each in counts.items()}
    total = sum(seen.values())
    if count and total and here not in counts:
        count = [*count[:3], total / backend.world_size]
    found: Mapping[str, Tensor] = values.get(here, {})
    size = next(iter(values))[0] if values else 0
    if size != backend.world_size and 0 < size <= len(values):
        shares = {k: each * size / total if total else 1.0 for k, each in seen.items()}
        found = {
            name: torch.stack([_weighted(v, name, shares[k]) for k, v in values.items()]).mean(0)
            if value.is_floating_point()
            else value
            for name, value in values[min(values)].items()
            if not name.startswith(".")
        }
    for name, value in found.items():
        if name not in own or own[name].shape != value.shape:
            has = f"{list(own[name].shape)}" if name in own else "none"
            raise SizeMismatchError(
                f"rank {backend.rank}: {who}: the state dict has {name} of shape "
                f"{list(value.shape)} for one rank, and this model has {has}: it is the state of "
                "another model",
                rank=backend.rank,
            )
    return count, found


def _weighted(values: Mapping[str, Tensor], name: str, share: float) -> Tensor:
    value = weigh_(values[name].to(torch.float64, copy=True), share)
    return value + (1 - share) * values.get(f".{name}", 0.0)


# ------------------------------------------------------------------------------
# The outer optimizer's.


def outer_state(
    optimizer: Optimizer, copies: Mapping[str, nn.Parameter], *, apart: bool
) -> dict[str, Tensor]:
    """Return the outer optimizer's state; and the copies of parameters if ranks are `apart`.

    Raises `UnsupportedObjectError` for a state that is no tensor and no number.
    """
    state: dict[str, Tensor] = {}
    for name, copy in copies.items() if apart else ():
        state[f"{_OUTER}parameter.{name}"] = copy.detach().clone()
    for name, copy in copies.items():
        for key, value in optimizer.state.get(copy, {}).items():
            if value is not None:
                state[f"{_OUTER}state.{key}.{name}"] = _as_tensor(value, f"{key} of {name}")
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params" and isinstance(value, (bool, int, float, Tensor)):
                state[f"{_OUTER}option.{number}.{key}"] = _as_tensor(value, key)
    return state


def _as_tensor(value: object, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if not isinstance(value, (bool, int, float)):
        raise UnsupportedObjectError(
            f"DiLoCo's outer optimizer keeps {value!r} as {what}: a state dict takes tensors and "
            "numbers only"
        )
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


@torch.no_grad()
def load_outer_state(
    state: Mapping[str, Any], optimizer: Optimizer, copies: Mapping[str, nn.Parameter], rank: int
) -> Mapping[str, Tensor]:
    """Load the outer optimizer's state; return the copies, if they are in it. Do nothing without
    any state. Raise `SizeMismatchError`, with nothing changed, for another model's.
    """
    entries = []
    for key, value in state.items():
        if not key.startswith(_OUTER):
            continue
        kind, _, rest = key[len(_OUTER) :].partition(".")
        first, name = ("", rest) if kind == "parameter" else rest.split(".", 1)
        entries.append((kind, first, name, value))
        copy = copies.get(name)
        fits = copy is not None and (kind != "parameter" or value.shape == copy.shape)
        if kind != "option" and not fits:
            has = f"has shape {list(copy.shape)}" if copy is not None else "is not there"
            raise SizeMismatchError(
                f"rank {rank}: DiLoCo: the state dict has an outer {name} of shape "
                f"{list(value.shape)}, and in this model it {has}: it is the state of another "
                "model",
                rank=rank,
            )
    if entries:
        optimizer.state.clear()
    groups = dict(enumerate(optimizer.param_groups))
    for kind, first, name, value in entries:
        if kind == "parameter":
            copies[name].copy_(value)
        elif kind == "state":
            optimizer.state[copies[name]][first] = value.clone()
        elif name in (group := groups.get(int(first), {})):
            if isinstance(group[name], Tensor):
                group[name].copy_(value)
            else:
                group[name] = value.item()
    return copies if any(kind == "parameter" for kind, *_ in entries) else {}
