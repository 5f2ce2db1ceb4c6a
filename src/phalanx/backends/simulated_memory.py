"""What ranks that are threads of one process have in common: memory of that process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

from torch import UntypedStorage
from typing_extensions import override

from phalanx.backends.common import Place, Source, zeros


class Shelf:
    """Memory that was taken by one rank and not attached by all others yet."""

    def __init__(self, lock: threading.RLock) -> None:
        self.lock = lock
        self.numbers: Iterator[int] = count()
        self.storages: dict[int, UntypedStorage] = {}


class ShelfMemory(Source):
    """Memory that others find on the shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._number = -1

    @override
    def take(self, size: int) -> tuple[UntypedStorage, Place]:
        storage = zeros(size)
        with self._shelf.lock:
            self._number = next(self._shelf.numbers)
            self._shelf.storages[self._number] = storage
        return storage, (self._number, 0, 0)

    @override
    def attach(self, place: Place, size: int) -> UntypedStorage:
        with self._shelf.lock:
            return self._shelf.storages[place[0]]

    @override
    def close(self) -> None:
        with self._shelf.lock:
            self._shelf.storages.pop(self._number, None)
