"""What goes back to a block's start if its step does not count: buffers and extra state.

Parameters and optimizers' state do not: once an optimizer has stepped, another version is taken.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from phalanx.wire.memory import copy_bits

_SMALL = 1 << 16  # bytes


class Buffer:
    """A module's buffer: as the generation began, and as the block did.

    counts   whether it is part of the state, and not only put back

    A kernel may write a buffer without counting that in its version: those of batch norm do. So
    small ones, and all of such layers, are copied and compared in each step.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.counts = name not in module._non_persistent_buffers_set
        self._of, self._name = module._buffers, name
        tensor = self._now()
        self._uncounted = tensor.nbytes <= _SMALL or hasattr(module, "track_running_stats")
        self._first = tensor, tensor._version, tensor.detach().clone() if self._uncounted else None
        self._noted: tuple[Tensor, int, Tensor] | None = None

    def note(self) -> None:
        """Note it as it is, and copy it if it may have changed since the last time."""
        now, noted = self._now(), self._noted
        if noted is None or self._uncounted or now is not noted[0] or now._version != noted[1]:
            self._noted = now, now._version, now.detach().clone()

    def put_back(self) -> None:
        """Let it be as it was noted."""
        if self._noted is not None:
            tensor, _, copy = self._noted
            self._of[self._name] = tensor
            with torch.no_grad():
                copy_bits(tensor, copy)

    def has_moved(self) -> bool:
        """Return whether it has changed since the generation began."""
        tensor, version, copy = self._first
        now = self._now()
        if now is not tensor or now._version != version:
            return True
        return copy is not None and not torch.equal(now, copy)

    def _now(self) -> Tensor:
        tensor = self._of[self._name]  # another tensor may have taken its place
        assert tensor is not None
        return tensor


class ExtraState:
    """A module's `get_extra_state`, which a checkpoint has, as a `Buffer`.

    Whether it has changed cannot be seen, so it counts as changed.
    """

    counts = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def note(self) -> None:
        """Note it as it is, in a copy."""
        self._noted = deepcopy(self._module.get_extra_state())

    def put_back(self) -> None:
        """Let it be as it was noted."""
        self._module.set_extra_state(deepcopy(self._noted))

    def has_moved(self) -> bool:
        """Return whether it may have changed."""
        return True
