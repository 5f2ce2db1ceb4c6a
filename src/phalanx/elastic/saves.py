"""Checkpoints of an elastic job: the newest one begins it, and others are saved while it trains."""

from __future__ import annotations

from typing import Any

from phalanx.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from phalanx.checkpoint.async_saves import wait_for_latest
from phalanx.collectives import broadcast_object
from phalanx.core.replaceable import ReplaceableBackend
from phalanx.elastic.kept import Kept


class Checkpoints:
    """A folder of checkpoints, or none; every rank calls its methods alike.

    every   steps between two saves in the background; 0: none is saved there
    """

    def __init__(
        self, folder: str | None, every: int, kept: Kept, backend: ReplaceableBackend
    ) -> None:
        self.folder = folder
        self._every, self._kept, self._backend = every, kept, backend
        self._saved = -1  # the version that was loaded, or saved and waited for

    def load_newest(self) -> tuple[Any, int] | None:
        """Load the newest checkpoint that rank 0 finds; return the other values and the version."""
        if self.folder is None:
            return None
        found = broadcast_object(str(latest_checkpoint(self.folder) or ""), self._backend)
        if not found:
            return None
        kept = self._kept
        loaded = load_checkpoint(
            str(found), model=kept.model, optimizer=self._optimizer, backend=self._backend
        )
        self._saved = loaded.step
        return loaded.extra, loaded.step

    def save_if_due(self, version: int) -> None:
        """Save in the background after each `every`-th step; a lost rank may end that."""
        if self.folder is not None and self._every and version % self._every == 0:
            self._save(version, in_background=True)

    def save_now(self, version: int) -> None:
        """Save, and wait for it, unless rank 0 has loaded or saved this version."""
        if self.folder is None:
            return
        wait_for_latest(self._backend)
        if broadcast_object(self._saved != version, self._backend):
            self._save(version, in_background=False)

    def _save(self, version: int, *, in_background: bool) -> None:
        kept = self._kept
        assert self.folder is not None
        save_checkpoint(
            self.folder,
            model=kept.model,
            optimizer=self._optimizer,
            step=version,
            extra=kept.values(),
            backend=self._backend,
            async_save=in_background,
        )
        if not in_background:
            self._saved = version

    @property
    def _optimizer(self) -> Any:
        return next(iter(self._kept.optimizers), None)
