"""The signals that end a program, as events for the launcher's loop.

    first SIGINT, SIGTERM, ...   the ranks are sent the same; they have `GRACE` seconds
    second                       the ranks are killed at once

A handler that raises would do so in the middle of anything. Here it only takes a note, and a
descriptor becomes readable (`signal.set_wakeup_fd`), which wakes the loop.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

_HEARD = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")


class Interrupted(Exception):  # noqa: N818 -- it is no error
    """Raised by the launcher's loop when a signal has come."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Signals:
    """Takes note of signals, in a `with` statement of the main thread.

    Signals that were ignored before (nohup, a shell's background job) stay ignored. After the
    `with` statement a program that was told to end cannot be disturbed any more.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        """The signals that came, in order."""
        self.descriptors: list[int] = []
        """Readable when a signal has come; none in a thread that is not the main one."""
        self._before: dict[int, object] = {}
        self._pipe: tuple[int, int] | None = None

    def check(self) -> None:
        """Raise `Interrupted` if a signal has come."""
        for descriptor in self.descriptors:
            with suppress(BlockingIOError):
                os.read(descriptor, 1 << 10)
        if self.received:
            raise Interrupted(self.received[0])

    def again(self) -> bool:
        """Return whether a second signal has come: the user does not want to wait."""
        return len(self.received) > 1

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self
        reader, writer = self._pipe = os.pipe()
        for descriptor in self._pipe:
            os.set_blocking(descriptor, False)
        self.descriptors.append(reader)
        for name in _HEARD:
            signum = getattr(signal, name)
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._note)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is None:
            return
        signal.set_wakeup_fd(-1)
        for signum, before in self._before.items():
            # The interpreter's own end takes a moment, too.
            after = signal.SIG_IGN if self.received else before
            signal.signal(signum, after)  # type: ignore[arg-type]
        for descriptor in self._pipe:
            os.close(descriptor)
        self.descriptors.clear()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)


def announce_end(signum: int) -> int:
    """Tell the user why it all ended; return the exit code, as a shell counts it."""
    sys.stderr.write(f"stopped by {signal.Signals(signum).name}\n")
    sys.stderr.flush()
    return 128 + signum
