"""One save at a time in a folder: what another one is writing must not look like a leftover.

The lock is the system's (flock): it is free again when its holder's process has ended, however.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from contextlib import suppress

from phalanx.checkpoint.disk import naming
from phalanx.errors import CheckpointError

log = logging.getLogger("phalanx")

NAME = ".phalanx-lock"  # a name that nobody else gives a file: it is written to
_PAUSE = 0.02  # seconds between two looks
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


class FolderLock:
    """Held from its making until `release`.

    Waits `patience` seconds for another save in the folder, then raises `CheckpointError`, which
    says whose it is. Where the file system knows no locks, a warning in the log says so.
    """

    def __init__(self, folder: str, patience: float) -> None:
        self._path = os.path.join(folder, NAME)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with naming(self._path):
                self._take(time.monotonic() + patience)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _take(self, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise self._taken() from None
                time.sleep(_PAUSE)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                log.warning("%s: no locks here: let only one job save in it", self._path)
                return
            else:
                holder = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, holder, 0)
                return

    def _taken(self) -> CheckpointError:
        holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
        return CheckpointError(
            f"{os.path.dirname(self._path)} is being saved into by {holder or 'somebody else'}: "
            "wait for that save, or give each job a folder of its own"
        )

    def release(self) -> None:
        """Let the next one in."""
        # Not by closing alone: a process that was forked meanwhile has it open, too. And what was
        # saved is saved, whatever comes of this.
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        with suppress(OSError):
            os.close(self._descriptor)
