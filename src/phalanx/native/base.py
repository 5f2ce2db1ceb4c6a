"""Another library's collectives as native steps: torch's process groups, MPI.

    Library      one rank's view of one group of the library: starts collectives
    Handle       a collective under way in the library
    NativeStep   a collective of the library as the only step of a program
    Natives      the library's group for each group of ranks

For messages, barriers, agreement, blame, sub-groups and deadlines the ranks have a TCP mesh of
their own (backend.py).

A collective that a library does whole cannot be compared before it runs. So a rank that waits asks
the others whether they are in the same collective (core/checker.py), and at every tenth collective
each rank tells the next one the rolling hash of all collectives of the group.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from typing_extensions import override

from phalanx.core.call import WORLD_ID
from phalanx.core.failure import Failure
from phalanx.core.posted import GroupBase
from phalanx.core.steps import Native, NativeCall, Step
from phalanx.errors import DistributedError, PeerLostError

if TYPE_CHECKING:
    from phalanx.core.call import Call
    from phalanx.core.engine import Engine

NOBODY = -1  # as a culprit: the library does not say who
SOON = 0.003  # seconds for which the caller waits for a collective before it becomes a work
SAY_WHO_WITHIN = 0.5  # seconds within which the mesh may name the culprit of a failed collective
FINISH_WITHIN = 1.0  # seconds within which a collective ends here after a member has left
TELL_EVERY = 10  # collectives between two in which a rank tells its rolling hash


class Abilities(NamedTuple):
    """What a library can do that not every library can. The same on every rank.

    devices    kinds of device on which its collectives take tensors: `cpu`, `cuda`
    subgroups  whether some of its ranks can form a group of their own
    on_stream  whether its groups have to be formed by the thread that uses them, whose current
               device and stream they take
    """

    devices: frozenset[str] = frozenset({"cpu"})
    subgroups: bool = True
    on_stream: bool = False


class Handle(ABC):
    """A collective under way in the library. Any thread may call it, one at a time.

    The memory that it was given is the library's until it is over.

    on_stream   `wait` does not wait, but makes this thread's stream do so
    """

    on_stream = False

    @abstractmethod
    def done(self) -> bool:
        """Whether it is over, without waiting. Raises what went wrong, as the library puts it.

        Where the library moves bytes only when it is called, this is such a call.
        """

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Block until it is over, or for about so many seconds; whether it is. Raises as `done`.

        Other threads of this process run meanwhile, and may ask other handles. It may return
        early.
        """


class Library(ABC):
    """One rank's view of one group of the library. Methods do not block unless they say so.

    name         of the library, for messages
    rank, size   this rank in the group, and how many there are
    can          its abilities

    Methods are called by one thread at a time, except `subgroup`, which runs in a thread of its own
    beside the others.
    """

    name: str
    rank: int
    size: int
    can: Abilities

    @abstractmethod
    def has(self, call: NativeCall) -> bool:
        """Whether it carries out such a collective: the same answer on every rank.

        It is asked for every collective, so it has to be quick.
        """

    @abstractmethod
    def collective(self, call: NativeCall) -> Handle:
        """Start a collective for which `has` is true; all ranks start the same ones in order."""

    @abstractmethod
    def subgroup(self, members: Sequence[int], ident: int, timeout: float) -> Library:
        """The group of some of this one's ranks, in this order.

        Each of them calls this, and is blocked until all have, at most `timeout` seconds. `ident`
        (64 bits) is the group's alone, the same on all its members. Calls for several groups may
        cross: each runs in a thread of its own.
        """

    def kind_of(self, error: Exception) -> type[DistributedError]:
        """The Phalanx error for an error of the library."""
        return PeerLostError

    @abstractmethod
    def close(self) -> None:
        """Close; nothing is under way. Bounded in time; may be repeated."""

    @abstractmethod
    def abort(self) -> None:
        """End at once what is under way; if possible, its memory is not touched from now on.

        Does not affect groups that were formed of it. May be repeated.
        """


class Natives:
    """The library's groups on one rank. Called with the engine's lock held.

    The group of the whole job exists from the start. That of a sub-group is formed at its first
    collective, in a thread of its own: it needs all members, which may be busy with other groups
    first, and the mesh never waits for it.
    """

    def __init__(self, engine: Engine, world: Library) -> None:
        self.engine = engine
        self.world = world
        self._groups: dict[int, NativeGroup] = {}
        self._broken: list[Library] = []
        self.unfinished: list[NativeCall] = []  # whose memory the library may still write

    def of(self, group: GroupBase) -> Native | None:
        """The native collectives of a group; None if it has none."""
        if group.size == 1 or (group.id != WORLD_ID and not self.world.can.subgroups):
            return None
        native = self._groups.get(group.id)
        if native is None:
            library = self.world if group.id == WORLD_ID else None
            native = self._groups[group.id] = NativeGroup(self, group, library)
        return native

    def broke(self, library: Library) -> None:
        """A collective was given up: the library's group cannot be used further."""
        self._broken.append(library)
        library.abort()

    def forget(self, group: GroupBase) -> None:
        """A sub-group was closed."""
        native = self._groups.pop(group.id, None) if group.id != WORLD_ID else None
        if native is not None and native.library is not None:
            native.library.close()

    def close(self) -> None:
        """Close all groups."""
        libraries = [native.library for native in self._groups.values()]
        self._groups.clear()
        for library in [*libraries, *self._broken]:
            if library is not None:
                library.close()
        self.world.close()
        self._broken.clear()
        self.unfinished.clear()


class NativeGroup(Native):
    """The library's collectives for one group of ranks.

    library   the library's group; None before it is formed, and once it is broken
    """

    def __init__(self, natives: Natives, group: GroupBase, library: Library | None) -> None:
        self.natives = natives
        self.group = group
        self.library = library
        self._waiting: list[NativeStep] = []  # for the library's group to be formed
        self._forming = False

    @override
    def step(self, call: NativeCall) -> Step | None:
        # A barrier over the mesh is slower, but it compares what the ranks do.
        if call.collective == "barrier" or not self.natives.world.has(call):
            return None
        return NativeStep(self, call)

    def start(self, step: NativeStep, timeout: float) -> None:
        """Start a collective, or have it started when the library's group is formed."""
        if self.library is None and self.natives.world.can.on_stream:
            self.library = self._form(timeout)
        if self.library is not None:
            step.handle = self.library.collective(step.native)
            return
        self._waiting.append(step)
        if not self._forming:
            self._forming = True
            name = f"phalanx rank {self.natives.engine.rank} forms a group"
            threading.Thread(
                target=self._form_beside, args=(timeout,), name=name, daemon=True
            ).start()

    def _form(self, timeout: float) -> Library:
        return self.natives.world.subgroup(self.group.ranks, self.group.id, timeout)

    def _form_beside(self, timeout: float) -> None:
        library = problem = None
        world, group, engine = self.natives.world, self.group, self.natives.engine
        try:
            library = self._form(timeout)
        except Exception as error:  # whatever the library raises
            problem = error
        with engine.lock:
            waiting, self._waiting = self._waiting, []
            self._forming = False
            if problem is not None:
                reason = f"{world.name} could not form{group.suffix}: {first_line(problem)}"
                group.fail(Failure(world.kind_of(problem), NOBODY, engine.rank, reason))
            elif library is not None and (group.closed or group.failure is not None):
                self.natives.broke(library)
            elif library is not None:
                self.library = library
                for step in waiting:
                    step.start()
            engine.run_ready()

    def break_off(self) -> None:
        """A collective of this group was given up."""
        library, self.library = self.library, None
        if library is not None:
            self.natives.broke(library)

    @override
    def close(self) -> None:
        self.natives.forget(self.group)


class NativeStep(Step):
    """One collective of the library under way: it needs all members, to the end.

    handle   None while the library's group is being formed
    """

    __slots__ = (
        "_begun",
        "_busy",
        "_call",
        "_deadline",
        "_group",
        "_left",
        "_over",
        "_problem",
        "handle",
        "native",
    )

    wakes: ClassVar[bool] = False
    blocks: ClassVar[bool] = True

    def __init__(self, group: NativeGroup, native: NativeCall) -> None:
        self._group = group
        self.native = native
        self.handle: Handle | None = None
        self._begun = False
        self._busy = False  # a thread waits for the handle
        self._over = False
        self._problem: Exception | None = None  # what the library says went wrong,
        self._left: int | None = None  # or a member that has left,
        self._deadline = 0.0  # and when that counts

    @override
    def begin(self, call: Call) -> None:
        if not self._begun:
            self._begun = True
            self._call = call
            if call.sequence % TELL_EVERY == 0:
                self._group.group.checker.tell_neighbour(call)
            self._group.start(self, call.timeout)

    def start(self) -> None:
        """The library's group is formed."""
        try:
            self._group.start(self, self._call.timeout)
        except Exception as error:  # as if it had been raised by `begin`
            self._failed(error)

    @override
    def ready(self, *, spin: bool = False) -> bool:
        if self.handle is None or self._busy or self._over or self._problem is not None:
            self._check_deadline()
            return self._over
        try:
            # On a device it is done when its result is ordered on the caller's stream.
            if self.handle.on_stream:
                self._over = self.handle.wait(0.0)
            elif spin:
                now = self._group.natives.engine.now
                began = now()
                self._over = self.handle.wait(min(SOON, self._call.timeout))
                self._group.group.was_blocked(now() - began)
            else:
                self._over = self.handle.done()
        except Exception as error:  # whatever the library raises
            self._failed(error)
        self._check_deadline()
        return self._over

    @override
    def block(self, seconds: float) -> bool:
        handle, lock = self.handle, self._group.natives.engine.lock
        if handle is None or self._busy or self._over or self._problem is not None:
            return False
        problem = None
        self._busy = True
        lock.release()
        try:
            over = handle.wait(seconds)
        except Exception as error:  # whatever the library raises
            over, problem = False, error
        finally:
            lock.acquire()
            self._busy = False
        self._over = over
        if problem is not None:
            self._failed(problem)
        return True

    def _failed(self, error: Exception) -> None:
        """The library reports an error. Wait a moment: the mesh may name the culprit."""
        if self._problem is None:
            self._problem = error
            self._deadline = self._group.natives.engine.now() + SAY_WHO_WITHIN

    def _check_deadline(self) -> None:
        """Fail if the mesh has named no culprit in time, or if a member left before the end."""
        engine, group = self._group.natives.engine, self._group.group
        if self._over or (self._problem is None and self._left is None):
            return
        if engine.now() < self._deadline and self._left is None:
            return
        if self._problem is not None:
            world = self._group.natives.world
            reason = f"{world.name} says: {first_line(self._problem)}"
            kind = world.kind_of(self._problem)
            culprit = NOBODY if self._left is None else self._left
            if self._left is not None:
                kind, reason = PeerLostError, f"rank {group.name_of_global(self._left)} left"
            call = self._call
            group.fail(Failure(kind, culprit, engine.rank, reason, call.describe(), call.sequence))
        elif engine.now() >= self._deadline and self._left is not None:
            raise PeerLostError(
                f"rank {group.rank}: {self._call.describe()}: rank "
                f"{group.name_of_global(self._left)} left",
                rank=group.rank,
                peer=group.to_local.get(self._left),
                op=self._call.name,
                sequence=self._call.sequence,
            )

    @override
    def waits_for(self) -> list[int]:
        group = self._group.group
        return [rank for rank in group.ranks if rank != group.here]

    @override
    def needs(self, rank: int) -> bool:
        """A member that leaves may have ended this collective; then it ends here, too."""
        if self._left is None:
            self._left = rank
            self._deadline = self._group.natives.engine.now() + FINISH_WITHIN
        return False

    @override
    def cancel(self) -> None:
        if not self._over:
            if self.handle is not None:
                self._group.natives.unfinished.append(self.native)
            self._group.break_off()


def first_line(error: Exception) -> str:
    """A library's error as a part of a sentence."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
