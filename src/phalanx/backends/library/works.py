"""Handles on what torch has under way: its `Work` objects."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from typing_extensions import override

from phalanx.backends.library.library import Handle

Work = Any  # torch.distributed.Work, which builds without distributed support lack
FOREVER = timedelta(days=3650)


class CollectiveWork(Handle):
    """A collective of a process group, and what is to be done with what it leaves.

    finish   called once, when it is over, by the thread that finds out; None: nothing
    """

    __slots__ = ("_finish", "_work")

    def __init__(self, work: Work, finish: Callable[[], object] | None) -> None:
        self._work: Work | None = work
        self._finish = finish

    @override
    def done(self) -> bool:
        work = self._work
        if work is not None:
            if not work.is_completed():
                return False
            work.wait()  # raises what went wrong
            self._end()
        return True

    @override
    def wait(self, seconds: float) -> bool:
        work = self._work
        if work is not None:
            try:
                # Whole milliseconds; none would mean that it waits as long as it takes.
                work.wait(timedelta(0, 0, 0, int(seconds * 1e3) or 1))
            except RuntimeError:
                if not work.is_completed():
                    return False
                work.wait()  # it has failed, or ended just now
            self._end()
        return True

    def _end(self) -> None:
        self._work = None
        if self._finish is not None:
            self._finish()


class StreamWork(CollectiveWork):
    """A collective on a device."""

    __slots__ = ()
    on_stream = True

    @override
    def wait(self, seconds: float) -> bool:
        work = self._work
        if work is not None:
            work.wait()
            self._end()
        return True


class MessageWork(Handle):
    """A message, for whose end a thread of `Waiters` waits: torch does not say it otherwise."""

    __slots__ = ("_error", "_over", "memory")

    def __init__(self, memory: object) -> None:
        self.memory = memory  # kept alive until it is over
        self._over = threading.Event()
        self._error: Exception | None = None

    def see_through(self, work: Work) -> None:
        """Block until the message is over."""
        try:
            work.wait(FOREVER)
        except Exception as error:  # raised where the handle is asked
            self._error = error
        self._over.set()

    @override
    def done(self) -> bool:
        if not self._over.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    @override
    def wait(self, seconds: float) -> bool:
        self._over.wait(seconds)
        return self.done()


class Waiters:
    """Threads that wait for messages: as many as there have been messages at a time."""

    def __init__(self, name: str, news: Callable[[], None]) -> None:
        self._name = name
        self._news = news
        self._tasks: queue.SimpleQueue[tuple[MessageWork, Work] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0

    def wait_for(self, handle: MessageWork, work: Work) -> None:
        """Have the handle learn when the work is over."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._tasks.put((handle, work))

    def end(self, seconds: float) -> None:
        """Let the threads end, those that wait when what they wait for has ended."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(seconds)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            handle, work = task
            handle.see_through(work)
            del work, task, handle
            self._news()
            with self._lock:
                self._idle += 1
