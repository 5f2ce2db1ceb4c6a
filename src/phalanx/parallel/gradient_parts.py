"""Gradients that are parts, with the others on other ranks: torch's norm of them is refused.

`torch.nn.utils.clip_grad_norm_` knows one process. On each rank it would find another norm, and
scale by it, so that the ranks' parameters drift apart. No other error would follow.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import Any

from torch import Tensor

from phalanx.errors import MisuseError
from phalanx.torch_internals import as_plain_tensors


class GradientPart(Tensor):
    """A `.grad` that is a part. Results computed from it are plain tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; raise `MisuseError` for a norm that torch's clipping adds to a total."""
        if "norm" in getattr(func, "__name__", ""):
            caller = sys._getframe(1).f_globals.get("__name__")
            if caller == "torch.nn.utils.clip_grad":
                raise MisuseError(
                    "torch's norm of gradients is that of this rank's parts alone, another one on "
                    "each rank: call phalanx.clip_grad_norm_(model, max_norm) on every rank"
                )
        with as_plain_tensors():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def mark_part(parameter: Tensor) -> None:
    """Mark a parameter's gradient, if it has one, until an optimizer takes it. Also a hook."""
    if type(parameter.grad) is Tensor:
        parameter.grad.__class__ = GradientPart
