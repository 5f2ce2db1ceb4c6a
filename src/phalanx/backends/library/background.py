"""What goes on while nobody waits: a thread that looks after asynchronous operations."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from phalanx.backends.engine import Operation

if TYPE_CHECKING:
    from phalanx.backends.library.engine import LibraryEngine

LOOK = 0.25  # seconds between looks at the deadlines of operations nobody waits for


class Background:
    """The operations that nobody waits for, and the thread, once there has been one.

    Its methods are called with the engine's lock held, which is that of the condition.
    """

    def __init__(self, engine: LibraryEngine, condition: threading.Condition) -> None:
        self._engine = engine
        self._condition = condition
        self._operations: dict[Operation, None] = {}
        self._thread: threading.Thread | None = None

    def add(self, operation: Operation) -> None:
        """Look after this one, too."""
        self._operations[operation] = None
        if self._thread is None:
            name = f"phalanx rank {self._engine.rank}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def discard(self, operation: Operation) -> None:
        """It has ended."""
        self._operations.pop(operation, None)

    def end(self) -> None:
        """Wait for the thread, which ends when the engine is closed. Lock not held."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        with self._engine.lock:
            self._engine.guarded(self._keep_moving)

    def _keep_moving(self) -> None:
        engine = self._engine
        while not engine.closed:
            if not self._operations:
                self._condition.wait()
                continue
            engine.look_after_all()
            soon = LOOK
            for operation in list(self._operations):
                soon = min(soon, max(0.0, operation.group.attend(operation)))
            engine.run_ready()
            if self._operations and not engine.closed:
                engine.rest(next(iter(self._operations)), soon, streams=False)
