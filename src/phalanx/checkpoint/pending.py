"""`PendingSave`: a save that may still be under way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from phalanx.core.backend import Backend
from phalanx.errors import CollectiveTimeoutError, DistributedError, MisuseError

log = logging.getLogger("phalanx")


class PendingSave:
    """What `save_checkpoint` returns: done already, or, with `async_save`, being written.

    folder   of the new checkpoint; it is one when `wait` has returned
    step     that it was given

    An error of a save in the background is in the log, is raised by `wait`, and, if nobody has
    called that, by the next save on the same backend.
    """

    def __init__(self, folder: Path, step: int, work: Callable[[], None]) -> None:
        self.folder = folder
        self.step = step
        self._work = work
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._seen = False

    def __repr__(self) -> str:
        state = "failed" if self.failed else "done" if self.done() else "being written"
        return f"PendingSave({str(self.folder)!r}, {state})"

    def run(self) -> PendingSave:
        """Do the work now; raise its error."""
        self._work()
        self._work = _nothing
        return self

    def run_in_background(self) -> PendingSave:
        """Do the work in a thread, which the end of the program waits for."""
        name = f"checkpoint of step {self.step}"
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            if isinstance(error, MisuseError):
                error.message += (
                    ": the backend was closed while the checkpoint was being written. Call wait() "
                    "on what save_checkpoint returned before that"
                )
            self._failure = error
            log.error(  # noqa: TRY400 - whoever waits gets the traceback
                "the checkpoint of step %d was not saved: %s", self.step, error
            )
        self._work = _nothing  # and with it the copies

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path:
        """Block until it is a checkpoint, and return its folder. Call it on every rank.

        timeout   seconds from now after which to raise `CollectiveTimeoutError`; the save goes on

        Raises what made the save fail, each time it is called; the checkpoints before it are as
        they were. Nothing is sent.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise CollectiveTimeoutError(
                    f"{self.folder} is still being written after {timeout:g} s",
                    op="save_checkpoint",
                    seconds=timeout,
                )
        if self._failure is not None:
            self._seen = True
            if isinstance(self._failure, DistributedError):
                raise self._failure.again() from self._failure
            raise self._failure
        return self.folder

    def join(self) -> None:
        """Wait for its end, whatever it is."""
        if self._thread is not None:
            self._thread.join()

    @property
    def failed(self) -> bool:
        """Whether it is over, and there is no checkpoint."""
        return self.done() and self._failure is not None

    def settle(self) -> None:
        """Wait for its end; raise its error unless somebody has seen that already."""
        seen = self._seen
        try:
            self.wait()
        except BaseException:
            if not seen:
                raise


def _nothing() -> None:
    """What is left to do when it is done."""


# ------------------------------------------------------------------------------
# Saves in the background: what a backend remembers of them, and the group that they talk over.


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
