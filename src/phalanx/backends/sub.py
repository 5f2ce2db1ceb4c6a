"""`SubBackend`: some of a backend's ranks, as a group of their own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.errors import InvalidRankError, InvalidWorldSizeError


class SubBackend(Backend):
    """Some ranks of `parent`, renumbered from 0 in the order of their ranks there.

    parent    the backend that it is part of; may itself be a `SubBackend`
    members   sorted and without repeats, as ranks of `parent`

    Every member makes it, in the same order among groups of the same members; nothing is sent.
    It moves bytes over its parent's connections, but neither waits for the parent's operations
    nor mixes with them. Closing it leaves the parent open.

    Raises `InvalidWorldSizeError` for no members; `InvalidRankError` if one is not a rank of the
    parent, or the caller is not among them.
    """

    def __init__(self, parent: Backend, members: Iterable[int]) -> None:
        self.parent = parent
        self.members = tuple(sorted(set(members)))
        if not self.members:
            raise InvalidWorldSizeError(
                f"rank {parent.rank}: a group needs at least one member", rank=parent.rank
            )
        for member in self.members:
            parent.check_rank(member, "member")
        if parent.rank not in self.members:
            raise InvalidRankError(
                f"rank {parent.rank} makes a group of ranks {list(self.members)} without being one "
                "of them: only members make a group",
                rank=parent.rank,
            )
        whole = tuple(parent.group.ranks[member] for member in self.members)
        engine = parent.engine
        with engine.lock:
            group = parent.group.child(whole)
        super().__init__(engine, group, timeout=parent.timeout)
        self.devices = parent.devices
        self.links = parent.links
        self.topology = tuple(parent.topology[member] for member in self.members)

    def to_global(self, local: int) -> int:
        """The parent's number for rank `local` of this group."""
        self.check_rank(local)
        return self.members[local]

    def to_local(self, global_: int) -> int | None:
        """This group's number for rank `global_` of the parent; None if it is no member."""
        return self.members.index(global_) if global_ in self.members else None

    def _waited(self, seconds: float) -> None:
        super()._waited(seconds)
        self.parent._waited(seconds)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """As the parent's: memory is one, whichever group it is sent in."""
        return self.parent.empty(*shape, dtype=dtype)
