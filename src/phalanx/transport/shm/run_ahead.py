"""Running ahead: which entry, slot and part of its staging memory a member uses next, and when.

Most collectives hold up all members, so nobody is more than one epoch ahead: two slots and two
parts of staging memory, used in turn, are enough. A collective with a root does not hold up a
member that only gives. It may be `AHEAD - 1` collectives ahead of those who have not taken what it
gave, and so has an entry, and a slot, for each; and `PARTS` parts of large tensors.

A member's entries when it has begun collective #19; of one epoch each:

    entry        0    1    2    3    4    5    6   ...   14   15
    collective  #16  #17  #18  #19   #4   #5   #6  ...  #14  #15
    flag         17   18   19   20    5    6    7  ...   15   16     at its first epoch
                                ^     ^    ^
                             turn     |    needed: who has arrived here has read what #4 showed
                                      #20 is next, and may use this entry once all others have

A member that finds no entry free waits until half of them are: else it would be woken up for one
collective at a time.
"""

from __future__ import annotations

AHEAD = 16  # entries
PARTS = 4  # of the staging memory


class RunAhead:
    """One member's use of its own memory.

    turn     the entry of the last collective
    starts   by entry: the member's flag at the first epoch of the collective that used it last
    needed   the flag that all others have to have, before the next collective may begin
    """

    __slots__ = ("_half", "_part", "_read", "_side", "_staged", "needed", "starts", "turn")

    def __init__(self) -> None:
        self.turn = self.needed = 0
        self.starts = [0] * AHEAD
        self._side = 0  # the slot of the last collective that held up all
        self._half = 0  # the next part of such a collective
        self._part = 0  # the next part of a root that runs ahead
        # The flags that others have when they have read a root's part: by part, and the last.
        self._read = [0] * PARTS
        self._staged = 0

    def begin(self, flag: int) -> int:
        """Begin a collective whose first epoch this flag is. Return its entry."""
        starts = self.starts
        self.turn = turn = (self.turn + 1) % AHEAD
        starts[turn] = flag
        self.needed = starts[(turn + 2) % AHEAD]
        return turn

    @property
    def half_free(self) -> int:
        """Return the flag that others have when half of the entries are free."""
        return self.starts[(self.turn + 2 + AHEAD // 2) % AHEAD]

    def next_slot(self, *, ahead: bool) -> int:
        """Return the slot of the next collective: one of two, or the one of its entry."""
        if ahead:
            return 2 + (self.turn + 1) % AHEAD
        self._side = side = 1 - self._side
        return side

    def part(self, *, ahead: bool) -> int:
        """Return the part of the staging memory that is used next."""
        return self._part if ahead else self._half

    def part_free(self, *, ahead: bool) -> int:
        """Return the flag that others have when they have read that part; or, if this member does
        not run ahead, all that it has staged as a root.
        """
        return self._read[self._part] if ahead else self._staged

    def leave_part(self, flag: int, *, ahead: bool, gave: bool) -> None:
        """Go to the next part.

        A root has staged in this one for the epoch of `flag`. All others have read it when they
        come to the one after.
        """
        if not ahead:
            self._half = 1 - self._half
            return
        if gave:
            self._read[self._part] = self._staged = flag + 1
        self._part = (self._part + 1) % PARTS

    def leave_stage(self, flag: int) -> None:
        """End a collective with the epoch of `flag`, in which all have staged and read."""
        self._read = [flag + 1] * PARTS
