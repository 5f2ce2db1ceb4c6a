"""`SharedGroup`: the memory that members of a group share on one host, as collectives use it.

    slots            copies of small tensors: two used in turn, and more for those who run ahead
    staging memory   copies of large tensors, a part at a time; each part has room for results, too
    descriptors      the place of a member's own tensor, if the others can read it there
    epochs           barriers: the others read, behind one, a member's writes from before it

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
    """The places of this rank's input and result."""

    given: Location
    result: Location


class SharedGroup(Protocol):
    """One rank's view of the memory that members share.

    ranks            its members, as ranks of the job
    place            this rank's own
    size             number of members
    slot_size        bytes of a slot
    slots            number of a member's slots
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
        """Return whether more threads than cores of this host want to compute, at this moment."""
        ...

    # Epochs

    def barrier(self) -> Iterable[Step]:
        """Return the steps of a barrier of the members."""
        ...

    def epoch(
        self,
        *,
        first: bool = False,
        last: bool = False,
        shown: Descriptors | None = None,
        places: Places = None,
    ) -> Step:
        """Return the step that arrives at an epoch, and waits for the members at these places.

        first   whether a collective begins with it: members compare rolling hashes
        last    whether it ends one in which members' own tensors were read: a member that has given
                up, and may have written its tensors, then counts as absent
        shown   with `first`: places of this rank's tensors; None: it has copied its input
        """
        ...

    # Slots

    def wait_for_entry(self) -> Step | None:
        """Return the step, if any, after which this rank may begin its next collective."""
        ...

    def next_slot(self, *, ahead: bool) -> int:
        """Return the next collective's slot number; `ahead`: of one that runs ahead."""
        ...

    def slot_address(self, place: int, number: int) -> int:
        """Return the address of a slot of this rank, or of a member that has arrived before."""
        ...

    def slot(self, place: int, number: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return that slot as a tensor, which keeps its memory mapped."""
        ...

    # Staging memory

    def wait_for_part(self, *, ahead: bool) -> Step | None:
        """Return the step, if any, after which this rank may write in the next part."""
        ...

    def part(self, *, ahead: bool) -> int:
        """Return the next part's number: 0 or 1, in turn; of those who run ahead, of more."""
        ...

    def leave_part(self, *, ahead: bool, gave: bool) -> None:
        """Go to the next part. `gave`: this rank has staged in the last one, running ahead."""
        ...

    def leave_stage(self) -> None:
        """End a collective in which all have staged, and read each other's parts."""
        ...

    def stage_address(self, place: int) -> int:
        """Return the address of a member's staging memory; the member has staged before."""
        ...

    # Members' own tensors

    def find(self, address: int, size: int) -> Location | None:
        """Return the place, for others, of shared memory of this rank; None: it is ordinary."""
        ...

    def find_ordinary(self, address: int) -> Location | None:
        """Return the place of this rank's ordinary memory; None if the kernel does not copy it."""
        ...

    def shown(self, place: int) -> tuple[Region, Region] | None:
        """Return a member's input and result in the collective under way; None: it has staged."""
        ...

    def scratch(self, size: int) -> int:
        """Return the address of so many bytes of this rank's own, to read into."""
        ...

    def after(self, error: UnreadableError) -> Step:
        """Return the step that waits for the end of a member whose memory cannot be read.

        Raises `BackendUnavailableError` if it is still there: the kernel has taken back the right.
        """
        ...

    # The end

    def give_up(self) -> None:
        """Note a failure here: memory that this rank has shown may change from now on."""
        ...

    def close(self) -> None:
        """Leave the group with this rank."""
        ...
