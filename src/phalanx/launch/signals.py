"""The signals that end a program, as events for the loop of a launcher.

    first SIGINT, SIGTERM, ...   the ranks are sent the same; they have some seconds
    second                       the ranks are killed at once
    SIGUSR1, SIGUSR2             the ranks are sent the same: a notice, perhaps (SLURM's --signal)

A handler that raises would do so in the middle of anything, also of what ends the ranks. Here it
only takes a note, and a descriptor becomes readable (`signal.set_wakeup_fd`), which wakes the loop.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class Interrupted(Exception):  # noqa: N818 -- it is no error
    """Raised by the launcher's loop when a signal has come, whose number it carries."""


def end_at_interrupt() -> None:
    """Let Ctrl-C end this process without a word, rather than with a traceback of imports.

    For a program that begins, until it handles the signal itself.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class Signals:
    """Takes note of signals, in a `with` statement of the main thread.

    Signals that were ignored before (nohup, a shell's background job) stay ignored. After the
    `with` statement a program that was told to end cannot be disturbed any more.

    goes_on   whether this is a program that goes on afterwards, such as a notebook's: then Ctrl-C
              alone is noted, unless the program handles it, and `KeyboardInterrupt` raised at the
              end of the `with` statement
    """

    def __init__(self, *, goes_on: bool = False) -> None:
        self.received: list[int] = []  # the signals that came, in order, of those that end programs
        self._passed: list[int] = []  # of the others, those that nobody has taken
        # Readable from when a signal has come; none in a thread that is not the main one.
        self.descriptors: list[int] = []
        self._goes_on = goes_on
        self._undo = ExitStack()

    def check(self) -> None:
        """Raise `Interrupted` if a signal has come."""
        if self.received:
            raise Interrupted(self.received[0])

    def take(self) -> list[int]:
        """Return the signals for the ranks that have come since, and be woken up anew by others."""
        for reader in self.descriptors:
            with suppress(BlockingIOError):
                os.read(reader, 1 << 12)
        taken = list(self._passed)
        del self._passed[: len(taken)]
        return taken

    def forget(self) -> None:
        """Go on as if no signal had come: all that one asked for is done."""
        self.take()
        self.received.clear()

    def again(self) -> bool:
        """Return whether a second signal has come: the user does not want to wait."""
        return len(self.received) > 1

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self
        if not self._goes_on:  # such a program may have an event loop, which signals have to wake
            for end in (ends := os.pipe()):
                self._undo.callback(os.close, end)
                os.set_blocking(end, False)
            self.descriptors.append(ends[0])
            signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
            self._undo.callback(signal.set_wakeup_fd, -1)
        for signum in (signal.SIGINT,) if self._goes_on else (*_ENDING, *_PASSED_ON):
            before = signal.getsignal(signum)
            if _is_replaced(before) if self._goes_on else before is not signal.SIG_IGN:
                signal.signal(signum, self._hear)
                self._undo.callback(self._restore, signum, before)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        self.descriptors.clear()
        if self._goes_on and self.received:
            signal.default_int_handler(signal.SIGINT, None)

    def _hear(self, signum: int, _: FrameType | None) -> None:
        (self.received if signum in _ENDING else self._passed).append(signum)

    def _restore(self, signum: int, before: Any) -> None:
        # The interpreter's own end takes a moment, too.
        ends = self.received and not self._goes_on
        signal.signal(signum, signal.SIG_IGN if ends else before)


def _is_replaced(handler: Any) -> bool:
    """Return whether it is Python's own, or an event loop's, which would wait for this call."""
    loops = sys.modules.get("asyncio")
    in_loop = loops is not None and loops._get_running_loop() is not None
    return handler is signal.default_int_handler or (callable(handler) and in_loop)


def announce_end(signum: int) -> int:
    """Tell the user why it all ended; return the exit code, as a shell counts it."""
    sys.stderr.write(f"stopped by {signal.Signals(signum).name}\n")
    return 128 + signum
