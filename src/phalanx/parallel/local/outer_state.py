"""The outer optimizer's state, as part of a state dict: the same on every rank.

outer@all.parameter.<name>          a parameter as it was when the period began
outer@all.state.<key>.<name>        what the optimizer keeps for it: a tensor, or a number
outer@all.option.<group>.<key>      a number of a parameter group, such as the learning rate
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.backends.base import Backend
from phalanx.errors import SizeMismatchError, UnsupportedObjectError

_PREFIX = "outer@all."
_PARAMETER, _STATE, _OPTION = "parameter.", "state.", "option."


def outer_state(
    shown: Mapping[str, Tensor], copies: Mapping[str, nn.Parameter], optimizer: Optimizer
) -> dict[str, Tensor]:
    """What an outer optimizer needs to go on; `shown` are the copies that are to be in it.

    Raises `UnsupportedObjectError` if it keeps something that is no tensor and no number.
    """
    state: dict[str, Tensor] = {
        _PARAMETER + name: copy.detach().clone() for name, copy in shown.items()
    }
    for name, copy in copies.items():
        for key, value in optimizer.state.get(copy, {}).items():
            if value is not None:
                state[f"{_STATE}{key}.{name}"] = _as_tensor(value, f"{key} of {name}")
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params" and isinstance(value, (bool, int, float, Tensor)):
                state[f"{_OPTION}{number}.{key}"] = _as_tensor(value, key)
    return {_PREFIX + key: value for key, value in state.items()}


def _as_tensor(value: object, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (bool, int)):
        return torch.tensor(value)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    raise UnsupportedObjectError(
        f"DiLoCo's outer optimizer keeps {value!r} as {what}: a state dict takes tensors and "
        "numbers only"
    )


@torch.no_grad()
def load_outer(
    state: Mapping[str, Any],
    copies: Mapping[str, nn.Parameter],
    optimizer: Optimizer,
    backend: Backend,
) -> dict[str, nn.Parameter]:
    """Go on from there; returns the copies if they are in it. Without any state nothing is done.

    Raises `SizeMismatchError` for that of another model.
    """
    own = {k[len(_PREFIX) :]: value for k, value in state.items() if k.startswith(_PREFIX)}
    if not own:
        return {}
    _check(own, copies, backend)
    optimizer.state.clear()
    for key, value in own.items():
        if key.startswith(_PARAMETER):
            copies[key[len(_PARAMETER) :]].copy_(value)
        elif key.startswith(_STATE):
            kept, name = key[len(_STATE) :].split(".", 1)
            optimizer.state[copies[name]][kept] = value.clone()
        else:
            number, option = key[len(_OPTION) :].split(".", 1)
            _set(optimizer, int(number), option, value)
    return dict(copies) if any(key.startswith(_PARAMETER) for key in own) else {}


def _set(optimizer: Optimizer, number: int, option: str, value: Tensor) -> None:
    if number >= len(optimizer.param_groups):
        return
    group = optimizer.param_groups[number]
    if isinstance(group.get(option), Tensor):
        group[option].copy_(value)
    elif option in group:
        group[option] = value.item()


def _check(own: Mapping[str, Tensor], copies: Mapping[str, nn.Parameter], backend: Backend) -> None:
    for key, value in own.items():
        if key.startswith(_OPTION):
            continue
        is_parameter = key.startswith(_PARAMETER)
        name = key[len(_PARAMETER) :] if is_parameter else key[len(_STATE) :].split(".", 1)[1]
        fits = name in copies and (not is_parameter or value.shape == copies[name].shape)
        if not fits:
            has = f"has shape {list(copies[name].shape)}" if name in copies else "is not there"
            raise SizeMismatchError(
                f"rank {backend.rank}: DiLoCo: the state dict has an outer {name} of shape "
                f"{list(value.shape)}, and in this model it {has}: it is the state of another "
                "model",
                rank=backend.rank,
            )
