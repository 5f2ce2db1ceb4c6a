"""What goes back to a block's start if its step does not count: buffers, extra state, and
parameters that the block changes before its optimizer does, such as moving averages of others.

All else does not: once an optimizer has stepped, another version is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from operator import attrgetter

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_intdigest

from phalanx.wire.memory import copy_bits, plain, tensor_bytes

_SMALL = 1 << 16  # bytes
_SAMPLE = 1024  # elements: the first of a parameter, of which a hash is taken


class Buffer:
    """A module's buffer: as the generation began, and as the block did.

    counts   whether it is part of the state, and not only put back

    What writes a buffer may not count that in its version: batch norm's kernels, and `.data`. So
    small ones, all of such layers, and those of which a look has shown it, are copied in each step.
    Looks are in the blocks 1, 2, 4, 8 ... of a generation.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.counts = name not in module._non_persistent_buffers_set
        self._of, self._name = module._buffers, name
        tensor = self._now()
        self._uncounted = tensor.nbytes <= _SMALL or hasattr(module, "track_running_stats")
        self._first = tensor, tensor._version, tensor.detach().clone() if self._uncounted else None
        self._noted: tuple[Tensor, int, Tensor] | None = None
        self._blocks = 0

    def note(self) -> None:
        """Note it as it is, and copy it if it may have changed since the last time."""
        self._blocks += 1
        now, noted = self._now(), self._noted
        copied = noted is not None and now is noted[0] and now._version == noted[1]
        if self._uncounted or not copied or _looks(self._blocks):
            self._noted = now, now._version, now.detach().clone()

    def put_back(self) -> None:
        """Let it be as it was noted."""
        if self._noted is not None:
            tensor, _, copy = self._noted
            self._of[self._name] = tensor
            with torch.no_grad():
                copy_bits(tensor, copy)

    def end_block(self) -> None:
        """Look whether the block has changed it without counting that."""
        if self._noted is not None and not self._uncounted and _looks(self._blocks):
            tensor, version, copy = self._noted
            same = self._now() is tensor and tensor._version == version
            self._uncounted = same and not torch.equal(tensor, copy)

    def has_moved(self) -> bool:
        """Return whether it has changed since the generation began, or may have."""
        tensor, version, copy = self._first
        now = self._now()
        if now is not tensor or now._version != version:
            return True
        return self._uncounted if copy is None else not torch.equal(now, copy)

    def changed_shape(self) -> str:
        """Return its name if it is saved, and has another shape than when the generation began."""
        now, (first, *_) = self._now(), self._first
        fits = now is first or now.shape == first.shape or not self.counts
        return "" if fits else self._name

    def _now(self) -> Tensor:
        tensor = self._of[self._name]  # another tensor may have taken its place
        assert tensor is not None
        return tensor


class Parameters:
    """The parameters, which in most models nobody changes but optimizers.

    A block may change some of them before: a moving average of others, or weights that are to have
    a norm. Once it has, these are copied at the start of each block, and can be put back.

    Looks are in the blocks 1, 2, 4, 8 ... of a process. Versions and addresses show most changes,
    and hashes of the first elements those by `.data`, which no version counts.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.all = [*parameters]
        self._early: set[int] = set()  # the places of those that change before an optimizer's step
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # their memory, and their values
        self._hashes: list[int] = []  # at the block's start; none in most blocks
        self._blocks = 0
        self._seen = self._marks()

    def note(self) -> None:
        """Note them as they are."""
        self._seen = self._marks()

    def have_changed(self) -> bool:
        """Return whether one has changed since the last note, as far as that is counted."""
        return self._seen != self._marks()

    def begin_block(self) -> None:
        """Copy those that may have to be put back."""
        its = ((at, self.all[at].data) for at in self._early)
        self._copies = {at: (memory, memory.clone()) for at, memory in its}
        self._blocks += 1
        self._hashes = [*map(_hash, self.all)] if _looks(self._blocks) else []

    def before_step(self) -> None:
        """Look which ones have changed before an optimizer's first step in the block."""
        if _looks(self._blocks):
            self._early |= self._changed()

    def end_block(self) -> None:
        """Take the block as over, and note them as they are."""
        self._hashes, self._copies, self._seen = [], {}, self._marks()

    def put_back(self) -> bool:
        """Let all be as at the block's start; return False, and do nothing, if that cannot be."""
        if not self._changed() <= self._copies.keys():
            return False
        for at, (memory, values) in self._copies.items():
            with torch.no_grad():
                self.all[at].data = memory
                copy_bits(memory, values)
        return True

    def _changed(self) -> set[int]:
        now, then = [*self._marks()], [*self._seen]
        if self._hashes:
            now.append([*map(_hash, self.all)])
            then.append(self._hashes)
        if now == then:
            return set()
        return {
            at
            for ours, theirs in zip(now, then, strict=True)
            for at, (mine, other) in enumerate(zip(ours, theirs, strict=True))
            if mine != other
        }

    def _marks(self) -> tuple[list[int], list[int]]:
        """Return what shows most changes: versions and addresses."""
        return [*map(attrgetter("_version"), self.all)], [*map(Tensor.data_ptr, self.all)]


def _looks(block: int) -> bool:
    return block & (block - 1) == 0


def _hash(tensor: Tensor) -> int:
    return xxh3_64_intdigest(tensor_bytes(plain(tensor.detach()).view(-1)[:_SAMPLE].cpu()))


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

    def end_block(self) -> None:
        """It changes as it likes."""

    def has_moved(self) -> bool:
        """Return whether it may have changed."""
        return True

    def changed_shape(self) -> str:
        """Return "": it has no shape of its own."""
        return ""
