"""`SharedGroup`: the memory that members of a group share on one host, as collectives use it.

    slots            copies of small tensors: two used in turn, and more for those who run ahead
    staging memory   copies of large tensors, a part at a time; each part has room for results, too
    descriptors      where a member's own tensor lies, if the others can read it there
    epochs           barriers: what a member has written before one, the others read behind it

A member writes in its own memory only, and is known by its *place*, its number among the members.
Addresses are those of this process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from phalanx.core.steps import Step

Places: TypeAlias = "tuple[int, ...] | None"
"""Some members, by their places; None: all but this rank."""

Location: TypeAlias = "tuple[int, int]"
"""Where memory of this rank lies, for the other members to find it there."""


class RemoteMemory(Protocol):
    """Another process, whose ordinary memory can be read."""

    def read(self, into: int, address: int, length: int) -> None:
        """Copy its bytes to an address of this process. Blocks. Raises `UnreadableError`."""
        ...


class UnreadableError(Exception):
    """The ordinary memory of a member cannot be read.

    rank      the member's, in the job
    is_gone   whether its process has ended
    """

    def __init__(self, rank: int, error: OSError) -> None:
        super().__init__(error.strerror)
        self.rank = rank
        self.is_gone = isinstance(error, ProcessLookupError)


Region: TypeAlias = "tuple[int, RemoteMemory | None]"
"""An address, and the process that has it as ordinary memory; None: it can be read here."""


class Descriptors(NamedTuple):
    """Where this rank's input and result lie."""

    given: Location
    result: Location


class SharedGroup(Protocol):
    """One rank's view of it.

    ranks            its members, as ranks of the job
    place            this rank's own
    size             how many members there are
    slot_size        bytes of a slot
    slots            how many slots a member has
    part_size        bytes of a part of the staging memory
    is_readable      whether each member can read the ordinary memory of the others, and gains by it
    share_of_cores   the host's cores for each of its ranks; 0 if there are more ranks than cores
    """

    ranks: tuple[int, ...]
    place: int
    size: int
    slot_size: int
    slots: int
    part_size: int
    is_readable: bool
    share_of_cores: int

    def is_crowded(self) -> bool:
        """Whether more threads than this host has cores want to compute, at this moment."""
        ...

    # Epochs

    def barrier(self) -> Iterable[Step]:
        """The steps of a barrier of the members."""
        ...

    def epoch(
        self,
        *,
        first: bool = False,
        last: bool = False,
        shown: Descriptors | None = None,
        places: Places = None,
    ) -> Step:
        """The step that arrives at an epoch, and waits for the members at these places.

        first   whether a collective begins with it: members compare rolling hashes
        last    whether it ends one in which members' own tensors were read: a member that has given
                up, and may have written its tensors, then counts as absent
        shown   with `first`: where this rank's tensors lie; None: it has copied its input
        """
        ...

    # Slots

    def wait_for_entry(self) -> Step | None:
        """The step, if it takes one, after which this rank may begin its next collective."""
        ...

    def next_slot(self, *, ahead: bool) -> int:
        """The number of the slot for the next collective; `ahead`: of one that runs ahead."""
        ...

    def slot_address(self, place: int, number: int) -> int:
        """Where a member's slot is. The member has arrived at an epoch before, or is this rank."""
        ...

    def slot(self, place: int, number: int, count: int, dtype: torch.dtype) -> Tensor:
        """That slot as a tensor, which keeps its memory mapped."""
        ...

    # Staging memory

    def wait_for_part(self, *, ahead: bool) -> Step | None:
        """The step, if it takes one, after which this rank may write in the next part."""
        ...

    def part(self, *, ahead: bool) -> int:
        """The number of the next part: 0 or 1, used in turn; of those who run ahead, of more."""
        ...

    def leave_part(self, *, ahead: bool, gave: bool) -> None:
        """The next part is another one. `gave`: this rank has staged in it, running ahead."""
        ...

    def leave_stage(self) -> None:
        """A collective is over in which all have staged, and read each other's parts."""
        ...

    def stage_address(self, place: int) -> int:
        """Where a member's staging memory begins; the member has staged before."""
        ...

    # Members' own tensors

    def find(self, address: int, size: int) -> Location | None:
        """Where the others find memory of this rank that is shared; None: it is ordinary."""
        ...

    def find_ordinary(self, address: int) -> Location | None:
        """Where they find ordinary memory of this rank; None if the kernel does not copy it."""
        ...

    def given(self, place: int) -> Region | None:
        """The input of a member in the collective under way; None: it was staged."""
        ...

    def result(self, place: int) -> Region:
        """The result of a member that has shown its tensors."""
        ...

    def scratch(self, size: int) -> int:
        """The address of so many bytes of this rank's own, for what it reads."""
        ...

    def after(self, error: UnreadableError) -> Step:
        """The step that waits for the end of a member whose memory cannot be read.

        Raises `BackendUnavailableError` if it is still there: the kernel has taken back the right.
        """
        ...

    # The end

    def give_up(self) -> None:
        """A collective has failed here: memory that this rank has shown may change from now on."""
        ...

    def close(self) -> None:
        """This rank leaves the group."""
        ...
