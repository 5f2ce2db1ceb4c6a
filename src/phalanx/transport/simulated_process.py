"""`SimulatedProcess`: what a process of `phalanx.simulate` can do beside being a rank.

It forms further groups with other processes, keeps values in a store that all of them have, and
sleeps. Each of these is a turn, so others may come in between, and it may crash there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from phalanx.core.backend import DEFAULT_TIMEOUT
from phalanx.errors import CollectiveTimeoutError
from phalanx.transport.cooperative import CooperativeScheduler
from phalanx.transport.simulated import InProcessSwitch, SimulatedBackend


@dataclass
class SimulatedWorld:
    """What the processes of one simulation have in common.

    values    of the store
    forming   the processes that have come to form a group, by its name and then by their rank
    formed    the groups that are complete; None for one that somebody has given up
    """

    scheduler: CooperativeScheduler
    values: dict[str, bytes] = field(default_factory=dict)
    forming: dict[Hashable, dict[int, int]] = field(default_factory=dict)
    formed: dict[Hashable, InProcessSwitch | None] = field(default_factory=dict)


class SimulatedProcess:
    """One process of a simulation: a thread, which has the turn while it runs.

    number   which one; those that are there from the start come first
    store    values that all processes of the simulation see
    """

    def __init__(self, world: SimulatedWorld, number: int) -> None:
        self.number = number
        self.store = SimulatedStore(world, number)
        self._world = world

    def now(self) -> float:
        """Return the seconds that the simulation's clock has jumped."""
        return self._world.scheduler.now

    def has_ended(self, number: int) -> bool:
        """Return whether another process of the simulation has crashed, or come to its end."""
        return self._world.scheduler.has_ended(number)

    def give_turn(self) -> None:
        """Let others run, at a place where a process might crash."""
        self._world.scheduler.give_turn(self.number)

    def sleep(self, seconds: float, until: Callable[[], object] = lambda: False) -> None:
        """Sleep for so long on the simulation's clock, or until that is true."""
        self._world.scheduler.sleep(self.number, seconds, until)

    def form(
        self,
        name: Hashable,
        rank: int,
        world_size: int,
        *,
        seconds: float,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> SimulatedBackend:
        """Be this rank of the group of that name, when all its ranks have come.

        Raises `CollectiveTimeoutError`, naming who has not come, after so many seconds.
        """
        world = self._world
        coming = world.forming.setdefault(name, {})
        coming[rank] = self.number
        if len(coming) == world_size and name not in world.formed:
            processes = [coming[each] for each in range(world_size)]
            world.formed[name] = InProcessSwitch(world_size, world.scheduler, processes)
        self.sleep(seconds, lambda: world.formed.get(name))
        switch = world.formed.setdefault(name, None)
        if switch is None:
            missing = [each for each in range(world_size) if each not in coming]
            raise CollectiveTimeoutError(
                f"rank {rank}: group {name!r}: ranks {missing} did not come within {seconds:g} s",
                rank=rank,
                peer=missing[0] if missing else None,
                op="form",
            )
        return SimulatedBackend(switch.engines[rank], timeout=timeout, process=self)


class SimulatedStore:
    """Values by key, as `torch.distributed.Store` has them; each call is a turn."""

    def __init__(self, world: SimulatedWorld, process: int) -> None:
        self._world = world
        self._process = process

    def get(self, key: str) -> bytes:
        """Return a value; KeyError if there is none."""
        return self._values()[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these have values."""
        values = self._values()
        return all(key in values for key in keys)

    def set(self, key: str, value: str | bytes) -> None:
        self._values()[key] = _as_bytes(value)
        self._world.scheduler.look()

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value if it is the expected one ("": there is none); return what it is then."""
        values = self._values()
        if values.get(key, b"") == _as_bytes(expected):
            values[key] = _as_bytes(desired)
            self._world.scheduler.look()
        return values.get(key, _as_bytes(expected))

    def wait_for_change(self, seconds: float) -> None:
        """Sleep until another process has changed a value, or for so long."""
        before = dict(self._world.values)
        self._world.scheduler.sleep(self._process, seconds, lambda: self._world.values != before)

    def _values(self) -> dict[str, bytes]:
        self._world.scheduler.give_turn(self._process)
        return self._world.values


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
