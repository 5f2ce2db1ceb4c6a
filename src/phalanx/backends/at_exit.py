"""What becomes of a backend that is still open when the interpreter ends."""

from __future__ import annotations

import atexit
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from phalanx.errors import DistributedError

if TYPE_CHECKING:
    from phalanx.backends.base import Backend


class CloseAtExit:
    """Closes a backend when the interpreter ends, without keeping it alive."""

    def __init__(self, backend: Backend) -> None:
        self._backend = weakref.ref(backend)
        atexit.register(self)

    def __call__(self) -> None:
        """The interpreter ends."""
        backend = self._backend()
        if backend is not None:
            with suppress(DistributedError, OSError):
                backend.close()

    def cancel(self) -> None:
        """There is nothing to close any more."""
        atexit.unregister(self)
