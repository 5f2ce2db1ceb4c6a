"""The folder of one launch, for what its ranks tell the launcher: gone when the launcher is.

    $TMPDIR/phalanx-k3j9x2/lock      held (flock) as long as its launcher lives
                           ...

A launcher removes its own folder, or its warden does. Where both were killed (the machine went
down, memory ran out) the next launcher does, which finds the lock free.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from phalanx.errors import BackendUnavailableError, RankStopped

_PREFIX = "phalanx-"
_LOCK = "lock"


@contextmanager
def scratch_folder() -> Iterator[str]:
    """Make a folder under TMPDIR, and remove it afterwards; those of dead launchers, too.

    `BackendUnavailableError` where none can be made.
    """
    _remove_stale(Path(_temporary()))
    try:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        lock = _lock(Path(folder))
    except OSError as error:
        raise _no_folder(error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except OSError as error:  # it has tried several, and written a file in each
        raise _no_folder(error) from error


def _no_folder(error: OSError) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"there is no room for the launcher's small files ({error}): set TMPDIR to a folder of "
        "yours that can be written to and is not full"
    )


def _lock(folder: Path) -> int | None:
    """Lock a new folder; the lock gets its name when it is held, so that nobody finds it free."""
    new = folder / f"{_LOCK}.new"
    descriptor = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
    if not _is_free(descriptor):
        os.close(descriptor)
        return None
    new.rename(folder / _LOCK)
    return descriptor


def _is_free(descriptor: int) -> bool:
    """Take the lock if nobody has it; False also where the file system knows no locks."""
    try:
        import fcntl  # noqa: PLC0415 -- not everywhere

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _remove_stale(parent: Path) -> None:
    """Remove the folders in `parent` whose launchers have ended without doing so."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # another user's, or another launcher removes it right now
            descriptor = os.open(lock, os.O_RDWR)
            try:
                if _is_free(descriptor):
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


# ------------------------------------------------------------------------------
# How a rank ends when it must: with its parent, or because another rank failed.

GRACE = 2.0
"""Seconds that a rank told to stop has, before it is killed."""

_PR_SET_PDEATHSIG = 1
_WATCH_INTERVAL = 0.5


def die_with_parent(parent: int) -> None:
    """End this process, at once and whatever it does, when its `parent` (a process id) ends.

    On Linux the kernel sees to it (when the thread ends that started this process, to be exact:
    the launchers' stay until their ranks have ended); elsewhere a thread looks twice a second. For
    what this process has started itself, and until this call, there is the `Warden`.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the kernel was asked
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(parent,), name="parent watch", daemon=True).start()


def _watch(parent: int) -> NoReturn:
    while os.getppid() == parent:
        time.sleep(_WATCH_INTERVAL)
    os._exit(1)


def raise_when_stopped() -> None:
    """Let SIGTERM raise `RankStopped` in the main thread, which must be the caller."""
    signal.signal(signal.SIGTERM, _stop)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: cleaning up goes on
    raise RankStopped("another rank failed, and this one was told to stop")
