"""Optimizers write parameters: whoever owns these is told before and after each step.

torch calls global hooks of all optimizers; the ones here hold nothing, but ask the parameters.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

log = logging.getLogger("phalanx")

NOT_ELEMENTWISE = frozenset(
    {"Adafactor", "LBFGS", "Muon", "LARS", "LAMB", "Lamb", "Shampoo", "SOAP", "KFAC"}
)
"""Optimizers whose step depends on a parameter's shape, or on all of its elements together."""

_ATTRIBUTE = "_phalanx_owner"


class Owner(Protocol):
    """Who is told."""

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to write some of its parameters."""

    def after_step(self, optimizer: Optimizer) -> None:
        """It has."""


class _Claim:
    """What a parameter carries; a copy of it, or one that is loaded from a file, has none."""

    def __init__(self, owner: Owner | None = None) -> None:
        self.owner = weakref.ref(owner) if owner is not None else lambda: None

    def __reduce__(self) -> Any:
        return (_Claim, ())


def claim(parameter: nn.Parameter, owner: Owner) -> None:
    """From now on tell this owner."""
    setattr(parameter, _ATTRIBUTE, _Claim(owner))


def release(parameter: nn.Parameter) -> None:
    """From now on tell nobody."""
    if hasattr(parameter, _ATTRIBUTE):
        delattr(parameter, _ATTRIBUTE)


def owner_of(parameter: nn.Parameter) -> Owner | None:
    """Who is told now."""
    found = getattr(parameter, _ATTRIBUTE, None)
    return found.owner() if isinstance(found, _Claim) else None


def _owners(optimizer: Optimizer) -> list[Owner]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    found = {id(owner): owner for p in parameters if (owner := owner_of(p)) is not None}
    return list(found.values())


def _before(optimizer: Optimizer, *_: object) -> None:
    for owner in _owners(optimizer):
        owner.before_step(optimizer)


def _after(optimizer: Optimizer, *_: object) -> None:
    for owner in _owners(optimizer):
        owner.after_step(optimizer)


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)
