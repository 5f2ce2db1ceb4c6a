"""The event loop of a `TcpTransport`: which sockets are ready, and which timers are due."""

from __future__ import annotations

import heapq
import itertools
import select
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
LONGEST_SLEEP = 3600.0
Callback = Callable[[bool, bool], None]  # (readable, writable)


class Reactor:
    """Sockets with callbacks, and timers. The sockets may be changed while `turn` waits."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._watched: set[socket.socket | int] = set()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self.watch(self._woken, self._drain)

    def watch(self, sock: socket.socket | int, callback: Callback, events: int = READ) -> None:
        """Call back, from now on, when the socket or file is ready for one of these events."""
        if not events:
            self.forget(sock)
            return
        # Not by trial: the selector's error describes the socket, which takes longer than the rest.
        if sock in self._watched:
            self._selector.modify(sock, events, callback)
        else:
            self._watched.add(sock)
            self._selector.register(sock, events, callback)

    def forget(self, sock: socket.socket | int) -> None:
        """Do not watch this socket any more."""
        if sock in self._watched:
            self._watched.remove(sock)
            with suppress(KeyError, ValueError):
                self._selector.unregister(sock)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> None:
        """Call back once, that many seconds from now. Not while another thread is in `turn`."""
        heapq.heappush(self._timers, (monotonic() + seconds, next(self._order), callback))

    def turn(self, seconds: float, lock: threading.RLock, spin: float = 0.0) -> None:
        """Wait until a socket is ready or a timer is due, that many seconds at most; call back.

        For `spin` seconds it polls before it sleeps. The lock is held, but not while this waits.
        """
        seconds = min(seconds, LONGEST_SLEEP)
        if self._timers:
            seconds = min(seconds, self._timers[0][0] - monotonic())
        look, seconds = self._selector.select, max(seconds, 0.0)
        until, events = monotonic() + min(seconds, spin), None
        lock.release()
        try:
            while not events and monotonic() < until:
                events = look(0.0)
            events = events or look(seconds)
        finally:
            lock.acquire()
        if self._woken.fileno() < 0:  # it was closed meanwhile
            return
        watched, now_due = self._selector.get_map(), monotonic()
        for key, mask in events:
            now = watched.get(key.fd)
            if now is not None and now.fileobj is key.fileobj:  # not closed by an earlier one
                now.data(bool(mask & READ), bool(mask & WRITE))
        while self._timers and self._timers[0][0] <= now_due:
            heapq.heappop(self._timers)[2]()

    def sleeper(self, other: int) -> Callable[[], object]:
        """Return a function that blocks until `turn` has work, or this other file can be read.

        Call it without the lock. New timers count from the next `wake` on.
        """
        seconds = max(self._timers[0][0] - monotonic(), 0.0) if self._timers else LONGEST_SLEEP
        poll = select.poll()
        for file in (self._selector.fileno(), other):
            poll.register(file, select.POLLIN)
        return partial(poll.poll, seconds * 1000)

    def wake(self) -> None:
        """Make a `turn` in another thread return."""
        with suppress(OSError):
            self._waker.send(b"\0")

    def close(self) -> None:
        """Free the reactor's own resources; owners close their sockets."""
        self._selector.close()
        self._waker.close()
        self._woken.close()

    def _drain(self, readable: bool, writable: bool) -> None:
        with suppress(OSError):
            while self._woken.recv(4096):
                pass
