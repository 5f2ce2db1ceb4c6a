"""`LibraryBackend`: what the backends over other libraries have in common."""

from __future__ import annotations

import os
import weakref

from phalanx.backends.at_exit import CloseAtExit
from phalanx.backends.base import Backend
from phalanx.backends.engine import WORLD_ID, Group
from phalanx.backends.library.engine import LibraryEngine
from phalanx.backends.library.library import Library

FAREWELL = 5.0  # seconds that close() waits at most for what was sent to be gone


class LibraryBackend(Backend):
    """A backend over another library's groups of ranks.

    collectives   the library's group of all ranks, for its own collectives
    messages      for all else; None if there is none: then there is nothing else
    topology      for each rank the number of the host that it is on
    """

    def __init__(
        self,
        collectives: Library,
        messages: Library | None,
        topology: tuple[int, ...],
        *,
        timeout: float,
    ) -> None:
        engine = LibraryEngine(collectives, messages)
        group = Group(engine, WORLD_ID, tuple(range(engine.world_size)))
        super().__init__(engine, group, timeout=timeout)
        self._engine = engine
        self.topology = topology
        self.devices = collectives.can.devices | self.devices
        self._at_exit = CloseAtExit(self)
        os.register_at_fork(after_in_child=_CloseInChild(self))

    def close(self) -> None:
        """Leave: whoever waits for this rank gets a `PeerLostError` that says that it left.

        Waits until what was sent has been taken by the library, 5 seconds at most.
        """
        self._leave(farewell=FAREWELL)

    def abort(self) -> None:
        """Leave as if this rank had died: the groups that it is in are broken."""
        self._leave(farewell=0.0)

    def _leave(self, *, farewell: float) -> None:
        engine = self._engine
        with engine.lock:
            if engine.closed:
                return
            if farewell:
                engine.look_after_all()  # word of a failure may be waiting
            for group in list(engine.groups.values()):
                group.close()
            engine.run_ready()
            if farewell:
                engine.say_goodbye(farewell)
            engine.shut()
        self._at_exit.cancel()


class _CloseInChild:
    """Ends a backend in a child process that was forked, which has none of its threads."""

    def __init__(self, backend: LibraryBackend) -> None:
        self._backend = weakref.ref(backend)

    def __call__(self) -> None:
        backend = self._backend()
        if backend is not None:
            backend.group.closed = backend.engine.closed = True
