"""Saves in the background: `PendingSave`, the latest of which a backend keeps."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from phalanx.core.backend import Backend
from phalanx.core.failure import forked_error
from phalanx.errors import CollectiveTimeoutError, DistributedError, MisuseError

log = logging.getLogger("phalanx")
_KEY = ("checkpoints", "the latest save in the background")


class PendingSave:
    """The result of `save_checkpoint`: done, or, with `async_save`, being written.

    folder   of the new checkpoint, which is complete when `wait` has returned
    step     of the save

    An error of a save in the background is in the log, and `wait` raises it. Without a call of
    `wait`, the next save on the same backend raises it.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder
        self.step = step
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._failure: BaseException | None = None
        self._raised = False
        self._group: Backend | None = None

    def __repr__(self) -> str:
        state = "failed" if self.failed else "done" if self.done() else "being written"
        return f"PendingSave({str(self.folder)!r}, {state})"

    def done(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Return whether it is over, without a checkpoint."""
        return self.done() and self._failure is not None

    def wait(self, timeout: float | None = None) -> Path:
        """Block until the checkpoint is complete; return its folder. Call it on every rank.

        timeout   seconds from now after which to raise `CollectiveTimeoutError`; the save goes on

        Raises the save's error at each call; earlier checkpoints stay as they were. Nothing is
        sent.
        """
        if self._thread is not None:
            self._thread.join(timeout)
        if self._thread is not None and self._process != os.getpid():
            raise forked_error(self._group.rank if self._group else 0, self._process)
        if not self.done():
            raise CollectiveTimeoutError(
                f"{self.folder} is still being written after {timeout:g} s",
                op="save_checkpoint",
                seconds=timeout,
            )
        if self._failure is not None:
            self._raised = True
            if isinstance(self._failure, DistributedError):
                raise self._failure.again() from self._failure
            raise self._failure
        return self.folder

    def _start(
        self, write: Callable[[], None], backend: Backend | None, group: Backend | None
    ) -> None:
        """Run `write` in a thread that the program waits for at its end; `group` is its own."""

        def run() -> None:
            try:
                write()
            except BaseException as error:
                if isinstance(error, MisuseError):
                    error.message += (
                        ": the backend was closed while the checkpoint was being written. Call "
                        "wait() on what save_checkpoint returned before that"
                    )
                self._failure = error
                log.error(  # noqa: TRY400 - `wait` raises it with the traceback
                    "the checkpoint of step %d was not saved: %s", self.step, error
                )

        self._group = group
        if backend is not None:
            backend.kept[_KEY] = self
        self._thread = threading.Thread(target=run, name=f"checkpoint of step {self.step}")
        self._thread.start()


def wait_for_latest(backend: Backend | None) -> PendingSave | None:
    """Wait for the latest save in the background on a backend; return it, even if it failed."""
    latest = backend.kept.get(_KEY) if backend is not None else None
    if not isinstance(latest, PendingSave):
        return None
    if latest._thread is not None:
        latest._thread.join()
    return latest


def finish_latest_save(backend: Backend | None) -> Backend | None:
    """Wait for the latest save; raise its error unless `wait` has raised it already.

    Returns the group of the same ranks for the messages of the next save, or None if it needs a new
    one. Training goes on meanwhile, with other collectives, in another order on each rank.
    """
    latest = wait_for_latest(backend)
    if backend is None or latest is None or not latest.failed:
        return latest._group if latest is not None else None
    backend.kept.pop(_KEY, None)  # its group may be broken
    if not latest._raised:
        try:
            latest.wait()
        except DistributedError as error:
            error.message = f"the save before this one failed: {error.message}"
            raise
    return None
