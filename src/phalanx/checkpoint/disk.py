"""What a checkpoint does with the file system, as few kinds of calls, whose errors name the file.

A file is safe when its bytes and its name are: `fsync` of the file and of the folder that it is in.
Each call here is one that a process may be killed at, before, in the middle or after.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


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
