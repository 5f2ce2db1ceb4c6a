"""Files and folders of checkpoints: durable writes, numbered folders, and the lock.

A file is durable when its bytes and its name are: after `fsync` of the file and of its folder. A
process may be killed before, within or after any of these calls. Every OSError names the file. The
user's folder may be a link. In it no link is followed (files.py).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from phalanx import files
from phalanx.errors import CheckpointError, CheckpointIOError, MisuseError, plain

log = logging.getLogger("phalanx")


def write_file(path: str, content: bytes) -> None:
    """Write a new file; its bytes are durable, its name is not yet."""
    with files.new_file(path) as descriptor:
        files.write_all(descriptor, content)
        os.fsync(descriptor)


def sync(folder: int) -> None:
    """Make the names in a folder durable; `descriptor` is the folder's."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # else this file system needs none, or has none
            raise


def sync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    with files.folder(os.path.realpath(path)) as descriptor, files.naming(path):
        sync(descriptor)


def size_of(path: str) -> int:
    """Return the size of the opened file: a network file system may cache that of a name."""
    with files.reading(path) as descriptor:
        return os.fstat(descriptor).st_size


# ------------------------------------------------------------------------------
# The folders of a run
#
#     runs/a/.phalanx-lock                     locked (flock) by rank 0 during a save
#     runs/a/000007-step-120/                  the seventh save, after step 120
#         begun                                who saves, and a nonce: do all ranks see this folder?
#         model-00000-of-00002.safetensors     at most one of each kind for each rank
#         state-00000-of-00002.safetensors
#         manifest.json                        where each tensor is, and the checksums of all files
#         commit.json                          the checksum of the manifest: the commit record
#
# A folder without commit.json is left over from a save or a removal that was interrupted. The next
# save removes it. Only files with these names are ever removed.

BEGUN = "begun"
MANIFEST = "manifest.json"
COMMIT = "commit.json"
UNFINISHED = "commit.json.unfinished"
MOST_BEGUN = 1000  # bytes
LOCK = ".phalanx-lock"
TENSOR_FILE = re.compile(r"(model|state)-\d{5,9}-of-\d{5,9}\.safetensors", re.ASCII)
_FOLDER = re.compile(r"(\d{6,})-step-(\d+)", re.ASCII)


class CheckpointFolder(NamedTuple):
    """A numbered folder, committed or not; a later save has a greater number."""

    number: int
    step: int
    path: str

    @property
    def is_committed(self) -> bool:
        """Return whether the folder is a checkpoint."""
        return os.path.lexists(os.path.join(self.path, COMMIT))


def parse(path: str) -> CheckpointFolder | None:
    """Return number and step from the name of a folder; None if the name has another form."""
    match = _FOLDER.fullmatch(os.path.basename(path))
    return CheckpointFolder(int(match[1]), int(match[2]), path) if match else None


def numbered(folder: str, *, links: bool = False) -> list[CheckpointFolder]:
    """Return all numbered folders in a folder, by number, with or without links to such."""
    found = filter(None, (parse(os.path.join(folder, name)) for name in os.listdir(folder)))
    folders = (each for each in found if os.path.isdir(each.path))
    return sorted(each for each in folders if links or not os.path.islink(each.path))


def committed(folder: str, *, links: bool = False) -> list[CheckpointFolder]:
    """Return the checkpoints in a folder, by number, with or without links to such."""
    return [each for each in numbered(folder, links=links) if each.is_committed]


def make_next(folder: str, step: int) -> CheckpointFolder:
    """Make a folder with a number above all others; its name is durable."""
    number = max((each.number for each in numbered(folder)), default=0)
    while True:
        number += 1
        path = os.path.join(folder, f"{number:06}-step-{step}")
        with suppress(FileExistsError):
            os.mkdir(path)
            break
    sync_folder(folder)
    return CheckpointFolder(number, step, path)


def make_parents(folder: str) -> None:
    """Make a folder, of an absolute path, and its missing parents; their names are durable."""
    if not os.path.isdir(folder):
        make_parents(os.path.dirname(folder))
        with suppress(FileExistsError):
            os.mkdir(folder)
        sync_folder(os.path.dirname(folder))


def remove(folder: CheckpointFolder) -> None:
    """Remove a checkpoint, or an uncommitted folder.

    The commit record goes first, durably: a removal that is killed leaves a whole checkpoint or
    none. Files of other names stay, and the folder with them; links are not followed.
    """
    with files.folder(folder.path) as at, files.naming(folder.path):
        files.remove_in(at, COMMIT.__eq__)
        sync(at)  # always: an earlier removal may have been killed after the unlink
        records = {BEGUN, MANIFEST, UNFINISHED}
        files.remove_in(at, lambda name: name in records or TENSOR_FILE.fullmatch(name))
    with suppress(OSError):  # not empty
        os.rmdir(folder.path)
    sync_folder(os.path.dirname(folder.path))


# ------------------------------------------------------------------------------
# The lock: one save at a time in a folder
#
# An uncommitted folder of a save under way must not be taken for a left-over one. The operating
# system releases the lock (flock) when the process ends, however it ends.

_PAUSE = 0.02  # seconds between two attempts
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


@contextmanager
def locked(folder: str, timeout: float) -> Iterator[None]:
    """Hold the lock of a folder.

    Waits at most `timeout` seconds for another save in the folder, then raises `CheckpointError`
    with its process and host. On a file system without locks it logs a warning.
    """
    path = os.path.join(folder, LOCK)
    deadline = time.monotonic() + timeout
    descriptor = files.open_lock(path)
    try:
        with files.naming(path):
            while not _acquired(descriptor, path):
                if time.monotonic() >= deadline:
                    raise CheckpointError(
                        f"{folder} is being saved into by {_holder(folder)}: wait for that save, "
                        "or give each job a folder of its own"
                    )
                time.sleep(_PAUSE)
        yield
    finally:  # an error here would not undo the save, and is ignored
        # Closing alone would not release it while a forked process has the descriptor open, too.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        with suppress(OSError):
            os.close(descriptor)


def _acquired(descriptor: int, path: str) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        log.warning("%s: no locks here: let only one job save in it", path)
    return True


def _holder(folder: str) -> str:
    """Return the process that saves into a folder, as far as the new checkpoint names it."""
    for each in reversed(numbered(folder)):
        if not each.is_committed:
            with suppress(OSError):
                begun = files.read(os.path.join(each.path, BEGUN), MOST_BEGUN)
                return plain(begun.decode(errors="replace").partition(":")[0])
    return "somebody else"


# ------------------------------------------------------------------------------
# A folder that is there whole, or not at all
#
#     out                  what was asked for; it may be there already if it is empty
#     .out.unfinished      beside it, locked (flock) while it is written, then renamed to `out`
#
# The rest of a killed process is removed: only from a folder of this user, in which there are only
# exported files.

_EXPORTED = re.compile(
    r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json"
    r"|\.metadata(\.tmp)?|__\d+_\d+_\d+\.distcp",
    re.ASCII,
)
_NO_FOLDER_LOCKS = _NO_LOCKS | {errno.EBADF}  # of NFS, which locks only files open for writing


@contextmanager
def new_folder(path: str, nbytes: int, names: Collection[str] = ()) -> Iterator[str]:
    """Give a folder to write into, which becomes `path` at the end of the block.

    nbytes   bytes to be written; raises `CheckpointIOError` if there is no room for them
    names    of the files copied into it, beside the model

    Files in it have to be durable by then. If the block raises, the folder is removed. A kill
    leaves it beside `path`, and the next attempt empties it. Raises `MisuseError` if `path` exists
    and is no empty folder; `CheckpointError` while another process writes it, and if the entry
    beside it was not left by an export of this user's.
    """
    path = os.path.realpath(path)
    if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        raise MisuseError(f"{path} is there already: name a folder that is new, or empty")
    parent, name = os.path.split(path)
    make_parents(parent)
    unfinished = os.path.join(parent, f".{name}.unfinished")
    with files.naming(unfinished), _held(unfinished) as at:

        def remove_ours() -> list[str]:
            return files.remove_in(at, lambda name: name in names or _EXPORTED.fullmatch(name))

        if others := remove_ours():  # left over: by the lock, no process writes them
            raise CheckpointError(
                f"{unfinished} has {plain(others[0])}, which no export has left there: move it away"
            )
        try:
            check_room(parent, nbytes)
            yield unfinished
            sync(at)
            os.rename(unfinished, path)
        except BaseException:
            with suppress(OSError):  # the first error is the one to report
                remove_ours()
                os.rmdir(unfinished)
            raise
        sync_folder(parent)


@contextmanager
def _held(folder: str) -> Iterator[int]:
    """Make a folder, if it is not there, and hold a lock on it; yield its descriptor."""
    while True:
        made = False
        with suppress(FileExistsError):
            os.mkdir(folder)
            made = True
        with ExitStack() as stack:
            try:
                descriptor = stack.enter_context(files.folder(folder))
            except FileNotFoundError:  # another process has finished, and renamed it
                continue
            status = os.fstat(descriptor)
            if not made and status.st_uid != os.geteuid():
                raise CheckpointError(
                    f"{folder} is there, and belongs to user {status.st_uid}: have it removed, or "
                    "name another folder"
                )
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"{folder} is being written by another process: wait for its end, or name "
                    "another folder"
                ) from None
            except OSError as error:
                if error.errno not in _NO_FOLDER_LOCKS:
                    raise
                log.warning("%s: no locks here: let only one process write it", folder)
            same = False
            with suppress(FileNotFoundError):
                same = os.path.samestat(status, os.lstat(folder))
            if same:
                yield descriptor
                return


def check_room(folder: str, nbytes: int) -> None:
    """Raise `CheckpointIOError` if a folder's disk has no room for `nbytes` bytes."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if nbytes > free:
        error = CheckpointIOError(
            f"{folder} has room for {free:,} bytes, and {nbytes:,} would be written: make room, or "
            "name a folder on another disk"
        )
        error.errno = errno.ENOSPC
        raise error
