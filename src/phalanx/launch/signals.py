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
from contextlib import ExitStack, suppress
from typing import Any


class Interrupted(Exception):  # noqa: N818 -- it is no error
    """Raised by the launcher's loop when a signal has come, whose number it carries."""


class Signals:
    """Takes note of signals, in a `with` statement of the main thread.

    Signals that were ignored before (nohup, a shell's background job) stay ignored. After the
    `with` statement a program that was told to end cannot be disturbed any more.
    """

    def __init__(self) -> None:
        self.received: list[int] = []  # the signals that came, in order
        # Readable when a signal has come; none in a thread that is not the main one.
        self.descriptors: list[int] = []
        self._undo = ExitStack()

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
        reader, writer = os.pipe()
        for descriptor in (reader, writer):
            os.set_blocking(descriptor, False)
            self._undo.callback(os.close, descriptor)
        self.descriptors.append(reader)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            before = signal.getsignal(signum)
            if before is not signal.SIG_IGN:
                signal.signal(signum, lambda signum, _: self.received.append(signum))
                self._undo.callback(self._restore, signum, before)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._undo.callback(signal.set_wakeup_fd, -1)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        self.descriptors.clear()

    def _restore(self, signum: int, before: Any) -> None:
        # The interpreter's own end takes a moment, too.
        signal.signal(signum, signal.SIG_IGN if self.received else before)


def announce_end(signum: int) -> int:
    """Tell the user why it all ended; return the exit code, as a shell counts it."""
    sys.stderr.write(f"stopped by {signal.Signals(signum).name}\n")
    return 128 + signum
