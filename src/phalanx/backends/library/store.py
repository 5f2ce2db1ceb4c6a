"""A store through which several groups can be formed at a time, over one that is waited in."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed

dist: Any = torch.distributed  # of which builds of torch have more or less
Store = Any

FIRST_PAUSE, LONGEST_PAUSE = 1e-4, 1e-2  # seconds between two looks


class PatientStore(dist.Store):  # type: ignore[misc]
    """A part of `store`, under `prefix`, that is asked again and again instead of waited in.

    While a thread waits inside one of torch's stores no other thread can use it, nor does it hear a
    signal. A connection of its own for each thread is no way out: torch looks up the name of the
    address for each, which may take seconds where the name server is slow.
    """

    def __init__(
        self, store: Store, prefix: str, seconds: float, stop: threading.Event | None = None
    ) -> None:
        super().__init__()
        self._store = store
        self._prefix = f"{prefix}/"
        self._seconds = seconds
        self._stop = stop or threading.Event()  # set: nobody waits any more

    def set(self, key: str, value: str | bytes) -> None:
        """Set `key` for every rank."""
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """The value of `key`. Blocks until it is there, as `wait`."""
        self.wait([key])
        value: bytes = self._store.get(self._prefix + key)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are there. RuntimeError, which torch expects, after the timeout."""
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        pause = FIRST_PAUSE
        while not self.check(keys):
            if time.monotonic() > deadline:
                missing = [key for key in keys if not self.check([key])]
                raise RuntimeError(f"nobody has set {', '.join(missing)} in {seconds:g} s")
            if self._stop.wait(pause):
                raise RuntimeError("this rank has closed its backend")
            pause = min(2 * pause, LONGEST_PAUSE)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._store.check([self._prefix + key for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """Add to the count `key`, from 0; what it is now."""
        return int(self._store.add(self._prefix + key, amount))

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return bool(self._store.delete_key(self._prefix + key))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `wait` waits, unless it is told otherwise."""
        self._seconds = timeout.total_seconds()
