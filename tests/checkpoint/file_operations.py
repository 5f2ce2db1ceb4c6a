"""What a program does to the files under one folder: watched call by call, stopped, played again.

`watched(folder, hook)` stands between Python and the system: every call of the os module that is
about something under `folder` is told to `hook` first, which may raise, or end the process. The
calls themselves are real.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

from processes import fork_server

T = TypeVar("T")


class Operation(NamedTuple):
    """A call: `path` is relative to the folder; `data` what is written, or the new name."""

    name: str
    path: str
    data: bytes | str = b""
    offset: int = 0
    creates: bool = False


Hook = Callable[[Operation], None]


@contextmanager
def watched(folder: str, hook: Hook) -> Iterator[None]:
    """Tell `hook` of each call about a file or folder under `folder`, before it is made."""
    watch = _Watch(os.path.abspath(folder), hook)
    with patch.multiple(os, **{name: getattr(watch, name) for name in _WATCHED}):
        yield


@contextmanager
def recorded(folder: str) -> Iterator[list[Operation]]:
    """The calls made meanwhile, in their order."""
    operations: list[Operation] = []
    with watched(folder, operations.append):
        yield operations


def failing(number: int, error: int, folder: str) -> Hook:
    """Has the call of this number fail; like the system, it names the file if it was given one."""
    calls = itertools.count()

    def hook(operation: Operation) -> None:
        if next(calls) == number:
            named = operation.name in ("open", "mkdir", "rmdir", "rename", "unlink", "listdir")
            path = os.path.join(folder, operation.path)
            raise OSError(error, os.strerror(error), *([path] if named else []))

    return hook


def killing(
    number: int, folder: str, counts: Callable[[Operation], bool] = lambda operation: True
) -> Hook:
    """Kills this process in the call of this number, of those that count: a write half way."""
    calls = itertools.count()

    def hook(operation: Operation) -> None:
        if counts(operation) and next(calls) == number:
            if operation.name == "write":
                with open(os.path.join(folder, operation.path), "ab") as file:
                    file.write(bytes(operation.data)[: len(operation.data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def in_a_fork(act: Callable[[], object]) -> int:
    """How a fork of this process ends that does this, as `os.waitpid` says it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def in_a_process_that_may_fork(act: Callable[..., T], *args: object) -> T:
    """What `act(*args)` returns in a process without threads; `act` is a module's own function."""
    with ProcessPoolExecutor(1, mp_context=fork_server()) as pool:
        return pool.submit(act, *args).result()


_WATCHED = (
    *("open", "close", "read", "preadv", "write", "pwrite", "ftruncate", "fsync", "fstat"),
    *("mkdir", "rmdir", "rename", "unlink", "listdir"),
)
_REAL = {name: getattr(os, name) for name in _WATCHED}


class _Watch:
    """The os functions, each of which tells first; what is elsewhere goes through untold."""

    def __init__(self, folder: str, hook: Hook) -> None:
        self._folder = folder
        self._hook = hook
        self._paths: dict[int, str] = {}  # of descriptors
        self._at: dict[int, int] = {}

    def _tell(self, name: str, path: Any, *args: Any) -> bool:
        if isinstance(path, int):
            path = self._paths.get(path, "")
        path = os.path.abspath(os.fspath(path)) if path else ""
        inside = path == self._folder or path.startswith(self._folder + os.sep)
        if inside:
            self._hook(Operation(name, os.path.relpath(path, self._folder), *args))
        return inside

    def _whole(self, path: Any, dir_fd: int | None) -> Any:
        """The whole path of one that may be relative to a folder's descriptor."""
        return path if dir_fd is None else os.path.join(self._paths.get(dir_fd, "/"), path)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        whole = self._whole(path, dir_fd)
        creates = bool(flags & os.O_CREAT) and not os.path.lexists(whole)
        inside = self._tell("open", whole, b"", 0, creates)
        descriptor: int = _REAL["open"](path, flags, mode, dir_fd=dir_fd)
        if inside:
            self._paths[descriptor] = os.path.abspath(whole)
            self._at[descriptor] = 0
        return descriptor

    def close(self, descriptor: int) -> None:
        try:
            self._tell("close", descriptor)
        finally:  # a close that fails has closed all the same
            self._paths.pop(descriptor, None)
            _REAL["close"](descriptor)

    def write(self, descriptor: int, data: Any) -> int:
        at = self._at.get(descriptor, 0)
        self._tell("write", descriptor, bytes(data), at)
        count: int = _REAL["write"](descriptor, data)
        self._at[descriptor] = at + count
        return count

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        self._tell("write", descriptor, bytes(data), offset)
        count: int = _REAL["pwrite"](descriptor, data, offset)
        return count

    def rename(self, old: Any, new: Any, *, src_dir_fd: Any = None, dst_dir_fd: Any = None) -> None:
        self._tell("rename", self._whole(old, src_dir_fd), os.path.basename(new))
        _REAL["rename"](old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def __getattr__(self, name: str) -> Any:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            self._tell(name, self._whole(first, kwargs.get("dir_fd")))
            return _REAL[name](first, *args, **kwargs)

        return call


class Disk:
    """Folders and files as these operations leave them: as programs see them, and what is safe.

    A file's bytes are safe as they were when it was last fsynced, a name as it was when the folder
    that it is in was. Of everything else a crash may keep any part.
    """

    def __init__(self) -> None:
        self.content: dict[int, bytes] = {}  # of files, by a number of their own
        self.safe_content: dict[int, bytes] = {}
        self.names: dict[str, int] = {".": 0}  # of all that there is; 0: a folder
        self.safe_names: dict[str, int] = {".": 0}
        self.unsafe: list[tuple[str, Operation, int]] = []  # folder, change of its names, file
        self._next = 1

    def do(self, operation: Operation) -> None:
        """One more operation."""
        path = os.path.normpath(operation.path)
        folder = os.path.dirname(path) or "."
        match operation.name:
            case "open" if operation.creates:
                self.content[self._next] = self.safe_content[self._next] = b""
                self._change(folder, operation, self._next)
                self._next += 1
            case "write":
                number = self.names[path]
                old, data = self.content[number], operation.data
                assert isinstance(data, bytes)
                old = old.ljust(operation.offset, b"\0")
                end = operation.offset + len(data)
                self.content[number] = old[: operation.offset] + data + old[end:]
            case "fsync":
                self._fsync(path)
            case "mkdir" | "rmdir" | "unlink" | "rename":
                self._change(folder, operation, self.names.get(path, 0))

    def _change(self, folder: str, operation: Operation, number: int) -> None:
        _apply(self.names, operation, number)
        self.unsafe.append((folder, operation, number))

    def _fsync(self, path: str) -> None:
        if number := self.names[path]:
            self.safe_content[number] = self.content[number]
            return
        for folder, operation, number in self.unsafe:
            if folder == path:
                _apply(self.safe_names, operation, number)
        self.unsafe = [change for change in self.unsafe if change[0] != path]

    def now(self) -> dict[str, bytes | None]:
        """What is found after a kill: files with their bytes, folders with None."""
        return {path: self.content[n] if n else None for path, n in sorted(self.names.items())}

    def crash(self, choose: Callable[[], float]) -> dict[str, bytes | None]:
        """What may be found after a crash of the machine.

        Each time something is not safe, `choose` says how much of it made it, from 0 to 1.
        """
        names = dict(self.safe_names)
        for _, operation, number in self.unsafe:
            if choose() >= 0.5:
                _apply(names, operation, number)
        found: dict[str, bytes | None] = {}
        for path, number in sorted(names.items()):
            folder = os.path.dirname(path) or "."
            if path != "." and folder not in found:
                continue  # what is in a folder is lost with it
            found[path] = self._left_of(number, choose) if number else None
        return found

    def _left_of(self, number: int, choose: Callable[[], float]) -> bytes:
        now, safe = self.content[number], self.safe_content[number]
        if now == safe:
            return now
        kept = int(len(now) * choose())
        return now[:kept] + safe[kept:]


def _apply(names: dict[str, int], operation: Operation, number: int) -> None:
    path = os.path.normpath(operation.path)
    match operation.name:
        case "open" | "mkdir":
            names[path] = number
        case "unlink" | "rmdir":
            names.pop(path, None)
        case "rename":
            names.pop(path, None)
            names[os.path.normpath(os.path.join(os.path.dirname(path), str(operation.data)))] = (
                number
            )


def write_tree(found: dict[str, bytes | None], folder: str) -> None:
    """Make these files and folders, for real."""
    for path, content in found.items():
        target = os.path.join(folder, path)
        if content is None:
            os.makedirs(target, exist_ok=True)
        else:
            with open(target, "wb") as file:
                file.write(content)
