"""Files: everything in the package opens, makes, replaces and removes them here.

Who can write into a folder, or has packed the archive that it came in, may have put anything under
a name in it: a link to a file of somebody else's, a second name of one, a pipe to which nobody
writes, a file of any size. Therefore:

    reading      a regular file of bounded size, or an error; nothing is waited for
    new_file     only where nothing was
    replacing    a new file beside, then renamed: what was there is not written into
    own_file     to write into a file that is there: of this user, with one name
    remove_in    only what has a name of ours; of a link the link

A name is not followed if it is a link, nor are files made in a folder that is one. The path that a
user gives may be a link, or lie behind one: whoever takes it says so (`follow`), or resolves it.
Every OSError names the file.
"""

from __future__ import annotations

import errno
import os
import pwd
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_CHUNK = 1 << 20  # bytes that are read or copied at a time
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (lambda mode: True, "a device"),
)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Put the file's name into an OSError: those of read, write and fsync have none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


@contextmanager
def folder(path: str) -> Iterator[int]:
    """Give a descriptor of a folder that is no link: what is done by it is done there."""
    descriptor = _open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    with _closing(descriptor, path):
        yield descriptor


@contextmanager
def reading(path: str, most: int | None = None, *, follow: bool = False) -> Iterator[int]:
    """Give a descriptor of a regular file of `most` bytes or fewer.

    follow   whether it may be a link
    """
    flags = os.O_RDONLY if follow else os.O_RDONLY | os.O_NOFOLLOW
    with _closing(_open(path, flags), path) as descriptor:
        size = _regular(descriptor, path).st_size
        if most is not None and size > most:
            raise _too_large(path, most)
        yield descriptor


def read(path: str, most: int, *, follow: bool = False) -> bytes:
    """Return the content of a regular file of `most` bytes or fewer."""
    content = bytearray()
    with reading(path, most, follow=follow) as descriptor:
        while more := os.read(descriptor, _CHUNK):
            content += more
            if len(content) > most:  # it grows, or does not say how long it is
                raise _too_large(path, most)
    return bytes(content)


@contextmanager
def new_file(path: str, mode: int = 0o666) -> Iterator[int]:
    """Give a descriptor of a new file, to write; it stays where the block raises."""
    with folder(os.path.dirname(path) or ".") as at:
        descriptor = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode, at)
    with _closing(descriptor, path):
        yield descriptor


@contextmanager
def replacing(path: str, mode: int = 0o666) -> Iterator[int]:
    """Give a descriptor of a new file, which is at `path` if the block ends; else it is removed.

    What was there stays as it is under its other names; of a link, what it leads to.
    """
    parent, name = os.path.split(path)
    parent = os.path.realpath(parent)
    part = os.path.join(parent, f".{name}.{secrets.token_hex(4)}.part")
    with naming(path):
        try:
            with new_file(part, mode) as descriptor:
                yield descriptor
            try:
                os.rename(part, os.path.join(parent, name))
            except OSError as error:
                raise _explained(error, path) from None
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise


def own_file(path: str) -> int:
    """Open a file of this user's to read and write, or make it; return the descriptor.

    One of another user (in a folder that a group shares), or with several names, is replaced by a
    copy. The error where that is not allowed names its owner.
    """
    with suppress(FileExistsError), new_file(path) as descriptor:
        return os.dup(descriptor)
    with reading(path) as found:
        status = os.fstat(found)
        if status.st_uid == os.geteuid() and status.st_nlink == 1:
            descriptor = _open(path, os.O_RDWR | os.O_NOFOLLOW)
            if os.path.samestat(os.fstat(descriptor), status):
                return descriptor
            os.close(descriptor)
        with replacing(path) as copy:
            while os.sendfile(copy, found, None, _CHUNK):
                pass
            return os.dup(copy)


def open_lock(path: str, mode: int = 0o666) -> int:
    """Open a regular file in which nothing is written, or make it; return the descriptor."""
    try:
        descriptor = _open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, mode)
    except PermissionError:  # another user's: to lock it, it is enough to read it
        descriptor = _open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        _regular(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_all(descriptor: int, content: memoryview | bytes) -> None:
    """Write all of it: one call may write less than it is given."""
    content = memoryview(content)
    while content:
        content = content[os.write(descriptor, content) :]


def remove_in(at: int, ours: Callable[[str], object]) -> list[str]:
    """Remove the files of a folder (a descriptor) whose names are ours; return the other names."""
    others = []
    for name in sorted(os.listdir(at)):
        if ours(name):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=at)
        else:
            others.append(name)
    return others


def owner(status: os.stat_result) -> str:
    """Return whose a file is, in words."""
    with suppress(KeyError):
        return f"user {pwd.getpwuid(status.st_uid).pw_name}"
    return f"user {status.st_uid}"


def _open(path: str, flags: int, mode: int = 0o666, at: int | None = None) -> int:
    """Open `path`; in the folder `at`, by the last part of it."""
    try:
        name = path if at is None else os.path.basename(path)
        return os.open(name, flags | _FLAGS, mode, dir_fd=at)
    except OSError as error:
        raise _explained(error, path) from None
    except ValueError as error:  # a NUL, or half a character
        raise OSError(errno.EINVAL, f"no file has such a name ({error})", path) from None


def _explained(error: OSError, path: str) -> OSError:
    """The same error with the whole path, and with what is there if that is the problem."""
    why = error.strerror
    with suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode) and error.errno in (errno.ELOOP, errno.ENOTDIR):
            why = "it is a link, which is not followed here: remove it, or put a copy in its place"
        elif status.st_uid != os.geteuid() and error.errno in (errno.EACCES, errno.EPERM):
            why = f"{why}: it belongs to {owner(status)}"
    return OSError(error.errno, why, path)


@contextmanager
def _closing(descriptor: int, path: str) -> Iterator[int]:
    with naming(path):
        try:
            yield descriptor
        except BaseException:
            with suppress(OSError):  # the first error is the one to report
                os.close(descriptor)
            raise
        os.close(descriptor)  # where a network file system may report that it had no room


def _regular(descriptor: int, path: str) -> os.stat_result:
    with naming(path):
        status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        kind = next(name for is_kind, name in _KINDS if is_kind(status.st_mode))
        number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
        raise OSError(number, f"it is {kind}, and no regular file", path)
    return status


def _too_large(path: str, most: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than {most:,} bytes, the most that is read", path)
