"""What a launcher does when it is told to end: once, cleanly, and soon.

    first SIGINT, SIGTERM, ...   the ranks are told, when they are able to hear it
      they have ended            it is raised in the main thread
      GRACE later                ranks that are still there are killed
      LAST_CALL later            this process ends, whatever it does
    second                       the last two at once

Python runs a handler when the main thread returns to it, and that may be minutes later: torch's
store waits without looking. So a thread hears the signals, by way of `signal.set_wakeup_fd`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from phalanx.launch.scratch import GRACE

__all__ = ["Interrupted", "Signals"]

_HEARD = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
    if hasattr(signal, name)
)
_LAST_CALL = 1.0


class Interrupted(BaseException):
    """Raised in the main thread by a signal that came before there were ranks."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Signals:
    """Hears the signals that end a program, in a `with` statement of the main thread.

    Raises nothing before `arm()`, which belongs into the `try` that catches what is raised.

    Signals that were ignored before (nohup, a shell's background job) stay ignored. After the
    `with` statement a program that was told to end cannot be disturbed any more. `last_call` are
    the seconds that this process has when there are no ranks any more.
    """

    def __init__(self, *, last_call: float = _LAST_CALL) -> None:
        self.received: int | None = None
        """The first signal that came."""
        self.error: Callable[[int], BaseException] = Interrupted
        """What is raised in the main thread; see `disarm`."""
        self.settle: Callable[[], None] = lambda: None
        """Waits, a second at most, until the ranks are able to hear a signal."""
        self.tell: Callable[[int], None] = lambda signum: None
        """Passes a signal on to the ranks; returns when they have ended."""
        self.force: Callable[[], None] = lambda: None
        """Ends at once what there is."""
        self._last_call = last_call
        self._unsaid = threading.Lock()
        self._armed = False
        self._due = False
        self._before: dict[int, object] = {}
        self._pipe: tuple[int, int] | None = None
        self._over = threading.Event()

    def arm(self) -> None:
        """Raise signals from now on, and one that has come before at once."""
        self._armed = True
        self.check()

    def check(self) -> None:
        """Raise the signal that has come, if it was lost where nothing can be raised."""
        if self.received is not None and self._armed:
            self._due = False
            raise self.error(self.received)

    def disarm(self) -> None:
        """Raise nothing from now on: what is left to do is cleaning up."""
        self._armed = False

    def say(self, signum: int) -> int:
        """Tell the user why it all ended, once; return the exit code, as a shell counts it."""
        if self._unsaid.acquire(blocking=False):
            sys.stderr.write(f"stopped by {signal.Signals(signum).name}\n")
            sys.stderr.flush()
        return 128 + signum

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread() or os.name != "posix":
            return self
        reader, writer = self._pipe = os.pipe()
        os.set_blocking(writer, False)
        for signum in _HEARD:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self.handle)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._armed = False
        self._over.set()
        if self._pipe is None:
            return
        signal.set_wakeup_fd(-1)
        for signum, before in self._before.items():
            # The interpreter's own end takes a moment, too.
            after = before if self.received is None else signal.SIG_IGN
            signal.signal(signum, after)  # type: ignore[arg-type]
        os.close(self._pipe[1])  # the thread reads its end, and closes the other

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Python's handler: raises what is due, in the main thread."""
        if self._due and self._armed:
            self._due = False
            self.tell(signum)  # here, so that the main thread does not mistake it for a failure
            raise self.error(signum)

    def _listen(self, reader: int) -> None:
        """Hear every signal, in a thread; ours, which wakes the main thread, among them."""
        deadline: float | None = None
        ours = False
        try:
            while True:
                if not select.select([reader], [], [], deadline)[0]:
                    return self._end()
                data = os.read(reader, 1)
                if not data:
                    return None
                signum = data[0]
                if signum not in self._before:
                    continue
                if ours:
                    ours = False
                elif self.received is None:
                    self.received, deadline = signum, GRACE
                    self.settle()
                    self._due = ours = True
                    signal.pthread_kill(threading.main_thread().ident or 0, signum)
                else:
                    return self._end()
        finally:
            os.close(reader)

    def _end(self) -> None:
        """End the ranks at once; if that does not let this process end, end it, too."""
        self.force()
        if not self._over.wait(self._last_call) and self.received is not None:
            os._exit(self.say(self.received))
