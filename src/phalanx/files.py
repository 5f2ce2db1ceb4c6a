"""Files: everything in the package opens, makes, replaces and removes them here.

Anyone who can write into a folder, or has packed its archive, may have put anything under a name in
it: a link to another user's file, a second name of one, a pipe without a writer, a file of any
size. So only regular files are opened, without waiting, reads are bounded, and written files are
new: an old file is replaced, never written into.

A name is not followed if it is a link, nor are files made in a folder that is one. A user's own
path may be a link, or lie behind one: its caller passes `follow`, or resolves it. Every OSError
names the file.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_CHUNK = 1 << 20  # bytes that are read or copied at a time


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Put the whole path into an OSError: those of read, write and fsync have none."""
    try:
        yield
    except OSError as error:
        if not isinstance(error.filename, str) or not os.path.isabs(error.filename):
            error.filename = path
        raise


@contextmanager
def folder(path: str) -> Iterator[int]:
    """Yield a descriptor of a folder that is no link: it is the folder for calls on it."""
    with _closing(_open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW), path) as descriptor:
        yield descriptor


@contextmanager
def reading(path: str, most: int | None = None, *, follow: bool = False) -> Iterator[int]:
    """Yield a descriptor of a regular file of `most` bytes or fewer.

    follow   whether it may be a link
    """
    flags = os.O_RDONLY if follow else os.O_RDONLY | os.O_NOFOLLOW
    with _closing(_open_regular(path, flags), path) as descriptor:
        if most is not None and os.fstat(descriptor).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes, the most that is read")
        yield descriptor


def read(path: str, most: int, *, follow: bool = False) -> bytes:
    """Return the content of a regular file of `most` bytes or fewer."""
    content = bytearray()
    with reading(path, most, follow=follow) as descriptor:
        while len(content) <= most and (more := os.read(descriptor, _CHUNK)):
            content += more
    return bytes(content)


@contextmanager
def new_file(path: str, mode: int = 0o666) -> Iterator[int]:
    """Yield a descriptor of a new file, which stays if the block raises."""
    with folder(os.path.dirname(path) or ".") as at:
        descriptor = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode, at)
    with _closing(descriptor, path):
        yield descriptor


@contextmanager
def replacing(path: str, mode: int = 0o666) -> Iterator[int]:
    """Yield a descriptor of a new file, which is at `path` if the block ends; else remove it.

    An old file stays as it is under its other names, as does a link's target. Only regular files
    and links are replaced.
    """
    parent, name = os.path.split(path)
    parent = os.path.realpath(parent)
    part = os.path.join(parent, f".{name}.{secrets.token_hex(4)}.part")
    with naming(path):
        with suppress(FileNotFoundError):
            kind = os.lstat(path).st_mode
            if not stat.S_ISREG(kind) and not stat.S_ISLNK(kind):
                raise _no_regular(kind, path)
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


def write(path: str, content: bytes, mode: int = 0o666) -> None:
    """Write a new file in place of an old one; whole or not at all."""
    with replacing(path, mode) as descriptor:
        write_all(descriptor, content)


def own_file(path: str) -> int:
    """Open a file of this user's to read and write, or make it; return the descriptor.

    A file of another user (in a folder that a group shares), or with several names, is replaced by
    a copy. If that is not allowed, the error names its owner.
    """
    with suppress(FileExistsError), new_file(path) as descriptor:
        return os.dup(descriptor)
    with reading(path) as found:
        status = os.fstat(found)
        if status.st_uid == os.geteuid() and status.st_nlink == 1:
            descriptor = _open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
            if os.path.samestat(os.fstat(descriptor), status):
                return descriptor
            os.close(descriptor)
        with replacing(path) as copy:
            while os.sendfile(copy, found, None, _CHUNK):
                pass
            return os.dup(copy)


def open_lock(path: str, mode: int = 0o666) -> int:
    """Open a regular file that stays empty, or make it; return the descriptor."""
    try:
        return _open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, mode)
    except PermissionError:  # another user's: to lock it, it is enough to read it
        return _open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)


def write_all(descriptor: int, content: memoryview | bytes) -> None:
    """Write all bytes: one call of the system may write fewer."""
    content = memoryview(content)
    while content:
        content = content[os.write(descriptor, content) :]


def remove_in(at: int, ours: Callable[[str], object]) -> list[str]:
    """Remove a folder's (a descriptor's) files whose names are ours; return the other names."""
    names = sorted(os.listdir(at))
    for name in filter(ours, names):
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=at)
    return [name for name in names if not ours(name)]


def _open(path: str, flags: int, mode: int = 0o666, at: int | None = None) -> int:
    """Open `path`; in the folder `at`, by the last part of it."""
    try:
        name = path if at is None else os.path.basename(path)
        return os.open(name, flags | _FLAGS, mode, dir_fd=at)
    except OSError as error:
        raise _explained(error, path) from None
    except ValueError as error:  # a NUL, or half a character
        raise OSError(errno.EINVAL, f"no file has such a name ({error})", path) from None


def _open_regular(path: str, flags: int, mode: int = 0o666) -> int:
    descriptor = _open(path, flags, mode)
    try:
        with naming(path):
            kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            raise _no_regular(kind, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _no_regular(kind: int, path: str) -> OSError:
    number = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
    why = "it is no regular file, but a folder, a pipe, a socket or a device"
    return OSError(number, why, path)


def _explained(error: OSError, path: str) -> OSError:
    """Return the same error with the whole path, and with the kind of a problematic entry."""
    why = error.strerror
    with suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode) and error.errno in (errno.ELOOP, errno.ENOTDIR):
            why = "it is a link, which is not followed here: remove it, or put a copy in its place"
        elif status.st_uid != os.geteuid() and error.errno in (errno.EACCES, errno.EPERM):
            why = f"{why}: it belongs to user {status.st_uid}"
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
        os.close(descriptor)  # a network file system may report only here that it had no room
