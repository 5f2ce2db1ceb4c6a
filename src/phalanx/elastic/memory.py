"""What one rank has of the state, in its place and kept, and what it gives to a new generation.

    as it was made          before the first step; rank 0 of the first generation gives it
    as a generation ended   what is in its place, until the next step's block begins
    kept versions           its own, and those of the lost ranks of its host

Those of the generations before stay until all ranks of the next have written their new versions: a
second one may be lost before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.collectives import ReduceOp, all_reduce_
from phalanx.core.replaceable import ReplaceableBackend
from phalanx.elastic.kept import Kept
from phalanx.elastic.membership import Decision, HeldPart
from phalanx.elastic.moves import Holding
from phalanx.elastic.site import Site
from phalanx.elastic.versions import Versions


class Memory:
    """One rank's memory of the state.

    copied   the newest version of which this rank has kept its part
    """

    def __init__(self, kept: Kept, backend: ReplaceableBackend, site: Site) -> None:
        self.copied, self._is_needed = 0, True
        self._kept, self._backend, self._site = kept, backend, site
        self._in_place: list[tuple[HeldPart, Holding]] = []
        self._entered: tuple[int, int] | None = None  # the same, by version and generation
        self._versions: list[Versions] = []  # of the last generation, and those before

    @property
    def copies(self) -> bool:
        """Whether versions are kept: other ranks may need this one's part. All ranks agree."""
        return self._is_needed and self._backend.world_size > 1

    def begin(self) -> None:
        """Take the state as it was made."""
        self._in_place = [(HeldPart(0, 0, 0, 1), self._kept.holding())]

    def begin_block(self) -> None:
        """Give nothing in its place from now on, since the step changes it."""
        self._in_place.clear()
        self._entered = None

    def end_block(self, version: int, *, due: bool) -> None:
        """Keep this rank's part of the version after a step, if it is due and needed."""
        if self.copies and due:
            self.write(version)

    def needs_copies(self, *, followed: bool) -> bool:
        """Return whether this rank has seen that versions are needed; others may have not.

        followed   whether a collective has followed an optimizer's step
        """
        return followed or not self._kept.is_whole()

    def agree(self, version: int, *, needed: bool, due: bool) -> None:
        """Keep versions from this one on, or no more, as any rank needs them."""
        begins, self._is_needed = needed and not self.copies, needed
        if begins:
            self.end_block(version, due=due)

    def write(self, version: int) -> None:
        """Keep this rank's part of a version."""
        self._versions[0].write(version, self._kept.part())
        self.copied = version

    def complete(self) -> None:
        """Forget the generations before: all ranks have the state of this one, and have kept it."""
        self._in_place.clear()
        here = 1 if self._backend.world_size > 1 else 0
        self._close(self._versions[here:])
        del self._versions[here:]

    def held(self, generation: int) -> list[HeldPart]:
        """Return the parts that this rank can give, as a step of this generation has left it."""
        if self._entered is not None:
            self._add_in_place(*self._entered)
            self._entered = None
        elif not self._in_place:
            self._kept.undo_block()
            if self._kept.version is not None:
                self._add_in_place(self._kept.version, generation)
        parts = [part for part, _ in self._in_place]
        return parts + [part for versions in self._versions for part in versions.held()]

    def give(self, decision: Decision) -> list[Holding]:
        """Return what this rank gives of the decision's version; if that has none, the state as it
        was made, if this rank has it still.
        """
        key = decision.version or 0, decision.layout
        given = [it for part, it in self._in_place if (part.version, part.layout) == key][:1]
        for versions in self._versions:
            if versions.generation == decision.layout:
                own = {each.rank for each in given}
                more = versions.give(key[0], decision.members)
                given += [each for each in more if each.rank not in own]
        return given

    def enter(self, version: int, generation: int, members: Sequence[str]) -> None:
        """Take a generation's state, which is in its place now; every rank calls it."""
        self._kept.begin_generation(version)
        # What a rank that was alone has is nowhere else. Another version is overwritten by now.
        self._in_place = [each for each in self._in_place if each[0].version == version]
        self._entered = version, generation
        if len(members) > 1:
            made = Versions(generation, self._backend, members, self._site.pause)
            self._versions.insert(0, made)
        # Who has joined knows nothing of the steps before, and who was lost not the last one's end.
        needed = self.needs_copies(followed=self._is_needed)
        told = torch.tensor([needed], dtype=torch.int64)
        label = f"generation {generation} keeps versions"
        self._is_needed = bool(all_reduce_(told, self._backend, ReduceOp.MAX, label=label))
        if self.copies:
            self.write(version)

    def forget(self, *, first: bool) -> None:
        """Forget what this rank had in a generation that went on without it."""
        made = [each for each in self._in_place if first and not each[0].layout]
        self._in_place, self._is_needed, self._kept.version = made, first, None
        self._entered = None
        self.close()

    def close(self) -> None:
        """Free the memory of all kept versions."""
        self._close(self._versions)
        self._versions.clear()

    def _add_in_place(self, version: int, generation: int) -> None:
        kept, rank = self._kept, self._backend.rank
        part = (0, 1) if kept.is_whole(rank) else (rank, self._backend.world_size)
        self._in_place.append((HeldPart(version, generation, *part), kept.holding()))

    @staticmethod
    def _close(several: Sequence[Versions]) -> None:
        for versions in several:
            versions.close()
