"""Backends over another library (torch, MPI): a mesh, and the library's own collectives.

    LibraryBackend   a rank: a `MeshBackend` that its ranks form by way of the library
    Library          one rank's view of one group of the library: starts collectives
    Handle           a collective under way in the library
    NativeStep       a collective of the library as the only step of a program
    NativeGroup      the library's group for a group of ranks; `Natives` has all of them

For messages, barriers, agreement, blame, sub-groups and deadlines the ranks have the mesh.

A collective that a library does whole cannot be compared before it runs. So a rank that waits asks
the others whether they are in the same collective (core/checker.py). At every tenth collective each
rank tells the next one the rolling hash of the group's collectives.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from phalanx.core.call import WORLD_ID
from phalanx.core.failure import Failure
from phalanx.core.steps import Native, NativeCall, Program, Step, ring_barrier
from phalanx.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    DistributedError,
    PeerLostError,
)
from phalanx.transport.backends import MeshBackend
from phalanx.wire.control import parse_address

if TYPE_CHECKING:
    from phalanx.core.call import Call
    from phalanx.core.engine import Engine
    from phalanx.core.group import Group
    from phalanx.native.store_rendezvous import RendezvousResult

NOBODY = -1  # as a culprit: the library names none
SOON = 0.003  # seconds for which the caller waits for a collective before it becomes a work
SAY_WHO_WITHIN = 0.5  # seconds within which the mesh may name the culprit of a failed collective
FINISH_WITHIN = 1.0  # seconds within which a collective ends here after a member has left
TELL_EVERY = 10  # collectives between two in which a rank tells its rolling hash


class Handle(ABC):
    """A collective under way in the library. Any thread may call it, one at a time.

    The memory that it was given is the library's until it is over.

    on_stream   `wait` does not wait, but makes this thread's stream do so
    """

    on_stream = False

    @abstractmethod
    def done(self) -> bool:
        """Return whether it is over, without waiting. Raise the library's error.

        If the library moves bytes only when it is called, this is such a call.
        """

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Block until it is over, for about `seconds` at most; return whether it is. Raise as
        `done`.

        Other threads of this process run meanwhile, and may ask other handles. It may return
        early.
        """


class Library(ABC):
    """One rank's view of one group of the library. Methods do not block unless they say so.

    name           of the library, for messages
    devices        kinds of device on which its collectives take tensors: `cpu`, `cuda`
    has_subgroups  whether some of its ranks can form a group of their own
    on_stream      whether its groups have to be formed by the thread that uses them, whose current
                   device and stream they take

    All ranks have the same library, which can do the same. One thread at a time calls methods,
    except `subgroup`, which runs in a thread of its own beside the others.
    """

    name: str
    devices: frozenset[str] = frozenset({"cpu"})
    has_subgroups = True
    on_stream = False

    @abstractmethod
    def has(self, call: NativeCall) -> bool:
        """Return whether it carries out such a collective: the same answer on every rank.

        It is asked for every collective, so it has to be quick.
        """

    @abstractmethod
    def collective(self, call: NativeCall) -> Handle:
        """Start a collective for which `has` is true; all ranks start the same ones in order."""

    @abstractmethod
    def subgroup(self, members: Sequence[int], ident: int, timeout: float) -> Library:
        """Return the group of some of this one's ranks, in this order.

        Each of them calls this, at about the same time, and is blocked until all have, for at most
        `timeout` seconds. `ident` (64 bits) is the group's alone, the same on all its members.
        Calls for several groups may cross: each runs in a thread of its own.
        """

    def kind_of(self, error: Exception) -> type[DistributedError]:
        """Return the Phalanx error for an error of the library."""
        return PeerLostError

    @abstractmethod
    def close(self) -> None:
        """Close; nothing is under way. Bounded in time; may be repeated."""

    @abstractmethod
    def abort(self) -> None:
        """End all pending calls at once; if possible, their memory is not touched from now on.

        Does not affect groups that were formed of it. May be repeated.
        """


class Natives:
    """The library's groups on one rank. Called with the engine's lock held.

    The group of the whole job exists from the start. That of a sub-group is formed at its first
    collective, in a thread of its own, when all members are there: a barrier of the mesh comes
    first, which has deadlines and names absent ranks. The mesh never waits for the library.

    libraries   the library's groups that are to be closed in the end, that of the whole job first
    unfinished  calls whose memory the library may still write
    """

    def __init__(self, engine: Engine, world: Library) -> None:
        self.engine = engine
        self.world = world
        self.libraries = [world]
        self.unfinished: list[NativeCall] = []

    def of(self, group: Group) -> Native | None:
        """Return the native collectives of a group; None if it has none."""
        is_world = group.id == WORLD_ID
        if group.size == 1 or not (is_world or self.world.has_subgroups):
            return None
        return NativeGroup(self, group, self.world if is_world else None)

    def close(self) -> None:
        for library in reversed(self.libraries):
            library.close()
        self.libraries.clear()
        self.unfinished.clear()


class NativeGroup(Native):
    """The library's collectives for one group of ranks.

    library   the library's group; None before it is formed, and once it is broken
    """

    def __init__(self, natives: Natives, group: Group, library: Library | None) -> None:
        self.natives = natives
        self.group = group
        self.library = library

    @override
    def steps(self, call: NativeCall) -> Iterable[Program] | None:
        if not self.natives.world.has(call):
            return None
        step = NativeStep(self, call)
        return (step,) if self.library is not None else self._steps(step)

    def _steps(self, step: NativeStep) -> Iterator[Program]:
        """Form the library's group if this is its first collective: all members are there."""
        if self.library is None:
            yield from ring_barrier(self.group.rank, self.group.size)
        yield step

    def start(self, step: NativeStep, timeout: float) -> None:
        """Start a collective, or have it started when the library's group is formed."""
        natives, world, group = self.natives, self.natives.world, self.group
        if self.library is None and world.on_stream:
            self.library = world.subgroup(group.ranks, group.id, timeout)
            natives.libraries.append(self.library)
        if self.library is not None:
            step.handle = self.library.collective(step.native)
            return
        name = f"phalanx rank {natives.engine.rank} forms a group"
        threading.Thread(target=self._form, args=(step, timeout), name=name, daemon=True).start()

    def _form(self, step: NativeStep, timeout: float) -> None:
        library = problem = None
        world, group, engine = self.natives.world, self.group, self.natives.engine
        try:
            library = world.subgroup(group.ranks, group.id, timeout)
        except Exception as error:  # whatever the library raises
            problem = error
        with engine.lock:
            if problem is not None:
                reason = f"{world.name} could not form{group.suffix}: {first_line(problem)}"
                group.fail(Failure(world.kind_of(problem), NOBODY, engine.rank, reason))
            elif library is not None:
                self.natives.libraries.append(library)
                if group.closed or group.failure is not None:
                    library.abort()
                else:
                    self.library = library
                    try:
                        step.handle = library.collective(step.native)
                    except Exception as error:  # as if it had been raised by `begin`
                        step.fail_soon(error)
            engine.run_ready()

    def break_off(self) -> None:
        """Use the library's group no further: a collective was given up."""
        library, self.library = self.library, None
        if library is not None:
            library.abort()

    @override
    def close(self) -> None:
        library, self.library = self.library, None
        if library is not None:
            self.natives.libraries.remove(library)
            library.close()


class NativeStep(Step):
    """One collective of the library under way: it needs all members, to the end.

    handle   None while the library's group is being formed
    """

    wakes: ClassVar[bool] = False
    blocks: ClassVar[bool] = True

    def __init__(self, group: NativeGroup, native: NativeCall) -> None:
        self._group = group
        self.native = native
        self.handle: Handle | None = None
        self._call: Call  # once it has begun
        self._begun = False
        self._busy = False  # a thread waits for the handle
        self._over = False
        self._problem: Exception | None = None  # the library's error,
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

    @override
    def ready(self, *, spin: float = 0.0) -> bool:
        handle = self.handle
        if handle is not None and not self._busy and not self._over and self._problem is None:
            try:
                # On a device it is done when its result is ordered on the caller's stream.
                if handle.on_stream:
                    self._over = handle.wait(0.0)
                elif spin >= SOON:
                    now = self._group.natives.engine.now
                    began = now()
                    self._over = handle.wait(min(SOON, self._call.timeout))
                    self._group.group.was_blocked(now() - began)
                else:
                    self._over = handle.done()
            except Exception as error:  # whatever the library raises
                self.fail_soon(error)
        if not self._over and (self._problem is not None or self._left is not None):
            self._check_deadline()
        return self._over

    @override
    def block(self, seconds: float) -> bool:
        handle, lock = self.handle, self._group.natives.engine.lock
        if handle is None or self._busy or self._over or self._problem is not None:
            return False
        over, problem = False, None
        self._busy = True
        lock.release()
        try:
            over = handle.wait(seconds)
        except Exception as error:  # whatever the library raises
            problem = error
        finally:
            lock.acquire()
            self._busy = False
        self._over = over
        if problem is not None:
            self.fail_soon(problem)
        return True

    def fail_soon(self, error: Exception) -> None:
        """Take an error of the library. Wait a moment: the mesh may name the culprit."""
        if self._problem is None:
            self._problem = error
            self._deadline = self._group.natives.engine.now() + SAY_WHO_WITHIN

    def _check_deadline(self) -> None:
        """Fail if the mesh has named no culprit in time, or if a member left before the end."""
        natives, group, call = self._group.natives, self._group.group, self._call
        problem, left = self._problem, self._left
        if natives.engine.now() < self._deadline and (problem is None or left is None):
            return
        kind: type[DistributedError] = PeerLostError
        if left is not None:
            culprit, reason = left, f"rank {group.name_of_global(left)} left"
        else:
            assert problem is not None
            culprit, kind = NOBODY, natives.world.kind_of(problem)
            reason = f"{natives.world.name} says: {first_line(problem)}"
        here, what = natives.engine.rank, call.describe()
        group.fail(Failure(kind, culprit, here, reason, what, call.sequence))

    @override
    def waits_for(self) -> list[int]:
        group = self._group.group
        return [rank for rank in group.ranks if rank != group.here]

    @override
    def needs(self, rank: int) -> bool:
        """Return whether a member's leaving ends this collective, as it may have in the library."""
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
    """Return a library's error as a part of a sentence."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


# ------------------------------------------------------------------------------
# Backends: a mesh that the ranks form by way of the library.


class LibraryBackend(MeshBackend):
    """A mesh for everything but the library's own collectives.

    met       rank 0's address, on rank 0 its listener
    join      returns the library's group of all ranks, once these are connected: called with the
              number of each one's host
    all_came  whether the library has brought all ranks together: then ranks absent from the mesh
              cannot connect
    """

    sharing = "hosts"

    def __init__(
        self,
        rank: int,
        world_size: int,
        met: RendezvousResult,
        join: Callable[[tuple[int, ...]], Library],
        *,
        name: str,
        timeout: float,
        all_came: bool = False,
        job: str = "",
        generation: int = 0,
    ) -> None:
        try:
            super().__init__(
                rank,
                world_size,
                met.address,
                token=met.token,
                timeout=timeout,
                job=job,
                generation=generation,
                listener=met.listener,
                fall_back=True,
            )
        except CollectiveTimeoutError as error:
            if not all_came:
                raise
            rank0 = parse_address(met.address)
            raise BackendUnavailableError(
                f"rank {rank} on {socket.gethostname()}: {name} brings the ranks together, but "
                f"they cannot connect over TCP, which messages need, to rank 0 at {rank0} within "
                f"{timeout:g} s ({error.message}): may these hosts connect to each other?",
                rank=rank,
                peer=error.peer,
            ) from error
        try:
            library = join(self.topology)
        except BaseException:
            super()._leave(farewell=0.0)
            raise
        self._natives = Natives(self.engine, library)
        self.engine.native = self._natives.of
        self.native = None if self.engine.strict else self._natives.of(self.group)
        self.devices = library.devices | self.devices

    @override
    def describe(self) -> str:
        return f"{self._natives.world.name} on {super().describe()}"

    @override
    def _leave(self, *, farewell: float) -> None:
        super()._leave(farewell=farewell)
        if not self.forked:
            self._natives.close()
