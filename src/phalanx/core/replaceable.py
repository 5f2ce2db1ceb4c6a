"""`ReplaceableBackend`: one backend that is a rank of one group first, and of another one later."""

from __future__ import annotations

from typing_extensions import override

from phalanx.core.backend import Backend
from phalanx.errors import MisuseError

# What a backend is made of; all else it asks of these.
INSIDE = (
    "engine",
    "group",
    "rank",
    "world_size",
    "ranks",
    "topology",
    "links",
    "devices",
    "native",
    "shared",
    "shares_memory",
    "timeout",
)


class ReplaceableBackend(Backend):
    """One rank's view of a group, which another group can replace: elastic training's.

        backend = ReplaceableBackend(SharedMemoryBackend(2, 4, address))
        ...                                                  # rank 1 is lost
        backend.inner.abort()
        backend.enter(SharedMemoryBackend(1, 3, other))      # the others meet, and go on

    inner   the backend whose rank it is now: its connections, groups and memory are this one's, and
            to close this one closes it

    Wrappers, samplers and schedules that hold this backend hold it still after `enter`; a `Wrapper`
    makes anew, in `regrouped()`, what depends on ranks.
    """

    def __init__(self, inner: Backend) -> None:
        self._take(inner)

    def enter(self, inner: Backend) -> None:
        """Be that rank of that group from now on. Sends nothing.

        `cache` and `kept` begin anew; `progress` goes on. The group before stays as it is: whoever
        calls this has closed it, or does so. Groups that were made of it stay its own, and no other
        thread may be in a call of this backend meanwhile.

        Raises `MisuseError` if `inner` is closed, or is this backend itself.
        """
        if inner is self or inner.group.closed or inner.engine.closed:
            what = "itself" if inner is self else "a backend that is closed"
            raise MisuseError(
                f"rank {self.rank}: a backend cannot enter {what}", rank=self.rank, op="enter"
            )
        inner.engine.take_progress(self.engine)
        self._take(inner)

    def _take(self, inner: Backend) -> None:
        self.inner = inner
        for name in INSIDE:
            setattr(self, name, getattr(inner, name))
        self.cache, self.kept = {}, {}

    @override
    def close(self) -> None:
        self.inner.close()

    @override
    def abort(self) -> None:
        self.inner.abort()
