"""What a checkpoint does with the file system, as few kinds of calls, whose errors name the file.

A file is safe when its bytes and its name are: `fsync` of the file and of the folder that it is in.
Each call here is one that a process may be killed at, before, in the middle or after.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from phalanx.checkpoint.manifest import FILE_NAME
from phalanx.errors import CheckpointError


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Let an OSError say which file it is about: those of read, write and fsync do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


@contextmanager
def opened(path: str, flags: int, mode: int = 0o666) -> Iterator[int]:
    """A descriptor, closed afterwards."""
    descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), mode)
    try:
        with naming(path):
            yield descriptor
    except BaseException:
        with suppress(OSError):  # the first error is the one to hear of
            os.close(descriptor)
        raise
    with naming(path):
        os.close(descriptor)  # where a network file system may say that it had no room


def write_all(descriptor: int, content: memoryview) -> None:
    """Write all of it: the system may take less than it is given."""
    while content:
        content = content[os.write(descriptor, content) :]


def write_file(path: str, content: bytes) -> None:
    """A new file, safe but for its name in its folder."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        write_all(descriptor, memoryview(content))
        os.fsync(descriptor)


def read_file(path: str) -> bytes:
    """All of a file."""
    content = bytearray()
    with opened(path, os.O_RDONLY) as descriptor:
        while more := os.read(descriptor, 1 << 20):
            content += more
    return bytes(content)


def sync_folder(path: str) -> None:
    """Make the names in a folder safe."""
    with opened(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that does this by itself, or never
                raise


def size_of(path: str) -> int:
    """In bytes; by opening it, which a network file system answers truly."""
    with opened(path, os.O_RDONLY) as descriptor:
        return os.fstat(descriptor).st_size


# ------------------------------------------------------------------------------
# The numbered folders of a run, and what makes one of them a checkpoint.
#
#     runs/a/.phalanx-lock                     held (flock) by rank 0 of a save, while it lasts
#     runs/a/000007-step-120/                  the seventh save, after step 120
#         begun                                a random word: do all ranks see this folder?
#         model-00000-of-00002.safetensors     one of each for each rank that has something to write
#         state-00000-of-00002.safetensors
#         manifest.json                        what is where, and the checksums of all files
#         commit.json                          the checksum of the manifest: with it, it counts
#
# A folder without commit.json is what a save left that did not come to its end, or a removal. The
# next save removes it: only files that saves make, so what others put there stays.

BEGUN = "begun"
MANIFEST = "manifest.json"
COMMIT = "commit.json"
UNFINISHED = "commit.json.unfinished"
_FOLDER = re.compile(r"(\d{6,})-step-(\d+)", re.ASCII)


class Numbered(NamedTuple):
    """A numbered folder; the greater the number, the later it was begun."""

    number: int
    step: int
    path: str

    @property
    def is_committed(self) -> bool:
        """Whether it is a checkpoint."""
        return os.path.lexists(os.path.join(self.path, COMMIT))


def numbered(folder: str) -> list[Numbered]:
    """All numbered folders in a folder, checkpoints or not, in the order of their numbers."""
    found = []
    for name in os.listdir(folder):
        parsed = parse(os.path.join(folder, name))
        if parsed is not None and os.path.isdir(parsed.path):
            found.append(parsed)
    return sorted(found)


def parse(path: str) -> Numbered | None:
    """What the name of a folder says; None if it is not numbered."""
    match = _FOLDER.fullmatch(os.path.basename(path))
    return Numbered(int(match[1]), int(match[2]), path) if match else None


def committed(folder: str) -> list[Numbered]:
    """The checkpoints in a folder, in the order of their numbers."""
    return [each for each in numbered(folder) if each.is_committed]


def make_next(folder: str, step: int) -> Numbered:
    """A new folder with a number above all others, whose name is safe."""
    number = max((each.number for each in numbered(folder)), default=0)
    while True:
        number += 1
        path = os.path.join(folder, f"{number:06}-step-{step}")
        with suppress(FileExistsError):
            os.mkdir(path)
            break
    sync_folder(folder)
    return Numbered(number, step, path)


def make_parents(folder: str) -> None:
    """Make a folder and those around it, as far as they are missing, with names that are safe."""
    missing = []
    path = os.path.abspath(folder)
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(path)
        sync_folder(os.path.dirname(path))


def remove(folder: Numbered) -> None:
    """Remove a checkpoint, or what is left of one.

    First, and safely, what makes it a checkpoint: killed at any point, it is whole or it is none.
    Files that no save makes stay, and the folder with them; so does what a link leads to.
    """
    if os.path.islink(folder.path):
        return
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(folder.path, COMMIT))
    sync_folder(folder.path)  # in any case: whoever was killed may have unlinked it and no more
    for name in os.listdir(folder.path):
        if name in {BEGUN, MANIFEST, UNFINISHED} or FILE_NAME.fullmatch(name):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(folder.path, name))
    with suppress(OSError):  # not empty: somebody keeps something in it
        os.rmdir(folder.path)
    sync_folder(os.path.dirname(folder.path))


# ------------------------------------------------------------------------------
# One save at a time in a folder: what another one is writing must not look like a leftover.
#
# The lock is the system's (flock): it is free again when its holder's process has ended, however.

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
