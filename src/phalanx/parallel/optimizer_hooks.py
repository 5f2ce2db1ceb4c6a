"""Optimizers write parameters: the owner of a parameter is told before and after each step.

torch calls global hooks of all optimizers. Those here keep no state: a parameter names its owner.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
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
    """A wrapper that is told of optimizers' steps."""

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to write some of its parameters."""

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has written some of its parameters."""


class _Claim:
    """Names a parameter's owner; a copy of the parameter, or one loaded from a file, has none."""

    def __init__(self, owner: Owner | None = None) -> None:
        self.owner = weakref.ref(owner) if owner is not None else lambda: None

    def __reduce__(self) -> Any:
        return (_Claim, ())


def claim(parameter: nn.Parameter, owner: Owner) -> None:
    """From now on tell this owner of steps that write the parameter."""
    setattr(parameter, _ATTRIBUTE, _Claim(owner))


def release(parameter: nn.Parameter) -> None:
    """From now on tell no owner."""
    if hasattr(parameter, _ATTRIBUTE):
        delattr(parameter, _ATTRIBUTE)


def owner_of(parameter: nn.Parameter) -> Owner | None:
    """The owner that is told now, if there is one."""
    found = getattr(parameter, _ATTRIBUTE, None)
    return found.owner() if isinstance(found, _Claim) else None


def _tell(step: Callable[[Owner, Optimizer], None], optimizer: Optimizer, *_: object) -> None:
    owners: dict[int, Owner] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Most parameters carry no claim: this runs at each step of every optimizer.
            if hasattr(parameter, _ATTRIBUTE) and (owner := owner_of(parameter)) is not None:
                owners[id(owner)] = owner
    for owner in owners.values():
        step(owner, optimizer)


register_optimizer_step_pre_hook(partial(_tell, lambda owner, opt: owner.before_step(opt)))
register_optimizer_step_post_hook(partial(_tell, lambda owner, opt: owner.after_step(opt)))
