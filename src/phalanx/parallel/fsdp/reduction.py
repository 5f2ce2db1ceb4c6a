"""The reduction: gradients of units become means of shards, one unit at a time.

    backward    ... | compute 1 | reduce 1 .......... | wait
                                  compute 0 ......... | reduce 0 ....
                                                                 the end: wait, agree on what was
                                                                 used, and give

Full gradients take memory until they are reduced, so no more than one unit's are on their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from phalanx.backends.base import Backend
from phalanx.collectives import ReduceOp
from phalanx.collectives.run import start
from phalanx.collectives.task import in_place
from phalanx.compression import Compressor
from phalanx.parallel.fsdp.unit import Unit


class Reduction:
    """Of one FSDP on one rank.

    synchronize   whether backward passes reduce; if not, full gradients add up on this rank
    accumulated   whether there may be gradients, on some rank, that were not reduced

    What a compressor remembers counts when all means of a pass are finite, on all ranks.
    """

    def __init__(
        self, units: Sequence[Unit], backend: Backend, compressor: Compressor | None = None
    ) -> None:
        self.synchronize = True
        self.accumulated = False
        self._units = units
        self._backend = backend
        self._compressor = compressor
        self._under_way: Unit | None = None

    def begin(self, unit: Unit) -> None:
        """A unit has its gradients: reduce them, when those of the one before are on this rank."""
        if self._under_way is not None:
            self._under_way.finish_scattering()
        unit.reduce()
        self._under_way = unit

    @torch.no_grad()
    def finish(self, units: Iterable[Unit]) -> None:
        """Reduce what is left, of these units; then means of all become the gradients."""
        try:
            anywhere = self._averaged(units)
        except BaseException:
            if self._compressor is not None:
                self._compressor.rollback()
            raise
        if self._compressor is not None:
            infinite = anywhere.pop()
            (self._compressor.rollback if infinite else self._compressor.commit)()
        first = 0
        for unit in self._units:
            last = first + sum(len(flat.parameters) for flat in unit.flats)
            unit.give(anywhere[first:last])
            first = last
        self.accumulated = False

    def _averaged(self, units: Iterable[Unit]) -> list[bool]:
        """Wait for all means. Which parameters have one, on any rank, in the order of the units;
        with a compressor also whether some mean, of any rank's, is not finite.
        """
        for unit in dict.fromkeys(units):
            self.begin(unit)
        for unit in self._units:
            unit.finish()
        self._under_way = None
        mine = [came for unit in self._units for came in unit.came()]
        if self._compressor is not None:
            mine.append(not all(unit.finite for unit in self._units))
        flags = torch.tensor(mine, dtype=torch.uint8)
        if len(flags):
            task = in_place("all_reduce", flags, op=ReduceOp.MAX)
            start(task, self._backend, label="which parameters were used").wait()
        return [bool(flag) for flag in flags.tolist()]

    def finish_accumulated(self) -> None:
        """Reduce what was accumulated and not reduced since, if anything."""
        if self.accumulated:
            self.finish(self._units)

    def drop_accumulated(self) -> None:
        """Forget what was accumulated and not reduced."""
        self.accumulated = False
        for unit in self._units:
            unit.drop_accumulated()

    def forget(self) -> None:
        """The pass has failed: nothing of it counts."""
        self._under_way = None
        for unit in self._units:
            unit.forget()
        if self._compressor is not None:
            self._compressor.rollback()
