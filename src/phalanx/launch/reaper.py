"""The reaper: a small process that kills the processes of a killed supervisor.

    supervisor --- pipe: "+812\n" process 812 runs, "-812\n" it has ended --->  reaper
        `- rank (process 812, a session of its own) - its data loader's workers, and so on

When the supervisor is killed, the pipe closes. The reaper then kills the processes that ran, each
with its whole session, removes the working folder if there is one, and ends. The kernel kills ranks
with their parent, too (`die_with_parent`), but only those that have already asked for it, and not
their own children.

The reaper leads a session of its own, so that the end of the supervisor's session spares it. This
file is also the reaper's program (`python -I -S`): it imports nothing but the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress

GRACE = 2.0  # seconds that a process told to stop has, before it is killed
_POLL = 0.5  # seconds between looks at the parent: a fork of it may hold the pipe open, too


class Reaper:
    """This process's reaper, in a `with` statement, at whose end it ends without killing anything.

    `folder`, if given, is removed after this process was killed. If no reaper can be started (no
    memory, say) there is none, and nothing else changes.
    """

    def __init__(self, folder: str = "") -> None:
        import subprocess  # noqa: PLC0415 -- the reaper's own program needs none

        self._process: subprocess.Popen[bytes] | None = None
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
        """Let the reaper kill process `pid`, which leads a session, if this process is killed."""
        self._send(f"+{pid}\n")

    def release(self, pid: int) -> None:
        """Forget process `pid`: it has ended, and its number may become another's."""
        self._send(f"-{pid}\n")

    def close(self) -> None:
        """End the reaper, and wait until it has ended."""
        process, self._process = self._process, None
        if process is not None:
            with process:  # which waits for it, and closes the pipe
                process.kill()

    def __enter__(self) -> Reaper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):  # somebody has killed the reaper
                os.write(self._process.stdin.fileno(), line.encode())


def end_session(pid: int) -> None:
    """Kill process `pid` and the processes of its session that are in its process group."""
    if pid <= 1:  # 0, -1 and so on stand for many processes
        return
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def die_with_parent(parent: int) -> None:
    """End this process at once when its `parent` (a process id) ends.

    On Linux the kernel sees to it (when the thread ends that started this process, to be exact:
    supervisors' threads stay until their ranks have ended); elsewhere a thread looks twice a
    second. This process's own children, and the time before this call, are the `Reaper`'s.
    """
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 -- the reaper's own program needs none

        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the kernel was asked
            os._exit(1)
    else:
        import threading  # noqa: PLC0415
        import time  # noqa: PLC0415

        def look() -> None:
            while os.getppid() == parent:
                time.sleep(_POLL)
            os._exit(1)

        threading.Thread(target=look, name="parent watch", daemon=True).start()


def _main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # it ends when its parent has
    parent, folder = int(sys.argv[1]), sys.argv[2]
    held: set[int] = set()
    rest = b""
    while True:
        alive = os.getppid() == parent
        if select.select([0], [], [], _POLL if alive else 0)[0]:
            data = os.read(0, 1 << 16)  # also the bytes that a parent wrote before its end
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                (held.add if line[:1] == b"+" else held.discard)(int(line[1:]))
        elif not alive:
            break
    for pid in held:
        end_session(pid)
    if folder:
        import shutil  # noqa: PLC0415

        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main()
