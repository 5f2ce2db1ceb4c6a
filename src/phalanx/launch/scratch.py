"""The folder of one launch, for what its ranks tell the launcher: gone when the launcher is.

    $TMPDIR/phalanx-k3j9x2/lock      held (flock) as long as its launcher lives
                           ...

A launcher removes its own folder, or its warden does. Where both were killed (the machine went
down, memory ran out) the next launcher does, which finds the lock free.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.errors import BackendUnavailableError

__all__ = ["scratch_folder"]

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
