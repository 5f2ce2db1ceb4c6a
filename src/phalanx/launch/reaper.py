"""The warden: a small process that cleans up after a launcher that was killed.

    launcher --- pipe: "+812\n" process 812 is there, "-812\n" it has ended --->  warden
        `- rank (process 812, a session of its own) - its data loader's workers, and so on

A launcher that is killed closes the pipe, whatever killed it. Then the warden kills the processes
that were there, with all of their sessions, removes the launcher's folder, and ends. Processes
may also be in the folder: each file of the name `pid` holds the number of one.

The kernel kills ranks with their parent, too (`stopping.die_with_parent`), but not before they
have asked for it, and not what they have started themselves. The warden is in a session of its
own, so that what ends the launcher's does not end the warden.

This file is also the warden's program: it imports nothing but the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from types import TracebackType

PID_FILE = "pid"
"""Holds a process id and the end of the line, in a folder of its own under the launcher's."""

_POLL = 0.5
"""Seconds between looks at the parent: a fork of the launcher may hold the pipe open, too."""


class Warden:
    """This process's warden; `close()` ends it when this process has cleaned up by itself.

    `folder`, if given, is removed after this process was killed, and the processes in it are
    killed, too. Where no warden can be started (no such thing here, no memory) there is none, and
    nothing else changes.
    """

    def __init__(self, folder: str = "") -> None:
        import subprocess  # noqa: PLC0415 -- the warden itself needs none

        self._process: subprocess.Popen[bytes] | None = None
        if not hasattr(os, "killpg"):
            return
        with suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid()), folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )

    def hold(self, pid: int) -> None:
        """Have process `pid`, which leads a session or soon will, killed after this one."""
        self._tell(f"+{pid}\n")

    def release(self, pid: int) -> None:
        """Forget process `pid`: it has ended, and its number may become another's."""
        self._tell(f"-{pid}\n")

    def close(self) -> None:
        """End the warden; what it still holds is left alone. Waits a moment for it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()

    def __enter__(self) -> Warden:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _tell(self, line: str) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            with suppress(OSError, ValueError):  # whoever has killed the warden has no warden
                os.write(process.stdin.fileno(), line.encode())


def end_session(pid: int) -> None:
    """Kill process `pid` and the processes of its session that are in its process group."""
    if pid <= 1:  # to the system that means many others
        return
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _watch(parent: int) -> set[int]:
    """Return the processes that are left when `parent`, at the other end of stdin, has ended."""
    held: set[int] = set()
    rest = b""
    while True:
        alive = os.getppid() == parent
        if not select.select([0], [], [], _POLL if alive else 0)[0]:
            if alive:
                continue
            break
        data = os.read(0, 1 << 16)  # also of a parent that has ended: its last words
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            (held.add if line[:1] == b"+" else held.discard)(int(line[1:]))
    return held


def _in_folder(folder: str) -> set[int]:
    """Return the processes that have left their number in `folder`."""
    found: set[int] = set()
    for path, _, names in os.walk(folder):
        if PID_FILE in names:
            with suppress(OSError, ValueError), open(os.path.join(path, PID_FILE)) as file:
                found.add(int(file.read()))
    return found


def _main() -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # it ends when its parent has
    parent, folder = int(sys.argv[1]), sys.argv[2]
    for pid in _watch(parent) | _in_folder(folder):
        end_session(pid)
    if folder:
        import shutil  # noqa: PLC0415

        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main()
