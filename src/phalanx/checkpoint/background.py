"""Saves in the background: what a backend remembers of them, and the group that they talk over."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.backends.base import Backend
from phalanx.checkpoint.pending import PendingSave
from phalanx.errors import DistributedError


class _Key(NamedTuple):
    """Of what a backend remembers (`Backend.plans`)."""

    what: str


_LATEST = _Key("the latest save in the background")
_GROUP = _Key("the group of all ranks that it talks over")


class Background:
    """The saves in the background on one backend. Without one nothing is remembered.

    Training goes on meanwhile, with collectives of its own, in another order on each rank; so the
    save has a group to itself, of the same ranks.
    """

    def __init__(self, backend: Backend | None) -> None:
        self._backend = backend

    @property
    def impossible(self) -> bool:
        """Whether only the rank's own thread may wait."""
        return self._backend is not None and self._backend.engine.one_thread

    def settle(self) -> None:
        """Wait for the latest save; raise its error unless somebody has seen that already."""
        if self._backend is None:
            return
        latest = self._backend.plans.pop(_LATEST, None)
        if not isinstance(latest, PendingSave):
            return
        try:
            latest.settle()
        except DistributedError as error:
            error.message = f"the save before this one failed: {error.message}"
            raise
        finally:
            if latest.failed:
                self._backend.plans.pop(_GROUP, None)  # it may be broken

    def wait(self) -> None:
        """Wait for the end of the latest save, whatever it is."""
        latest = self._backend.plans.get(_LATEST) if self._backend is not None else None
        if isinstance(latest, PendingSave):
            latest.join()

    @property
    def needs_group(self) -> bool:
        """Whether there is none yet, or the one there was may be broken."""
        return self._backend is not None and _GROUP not in self._backend.plans

    def group(self, *, fresh: bool) -> Backend | None:
        """The group; a new one if `fresh`, which has to be the same on every rank."""
        if self._backend is None:
            return None
        if fresh or self.needs_group:
            self._backend.plans[_GROUP] = self._backend.subgroup(range(self._backend.world_size))
        group = self._backend.plans[_GROUP]
        assert isinstance(group, Backend)
        return group

    def start(self, pending: PendingSave) -> PendingSave:
        """Let it be written in the background."""
        if self._backend is not None:
            self._backend.plans[_LATEST] = pending
        return pending.run_in_background()
