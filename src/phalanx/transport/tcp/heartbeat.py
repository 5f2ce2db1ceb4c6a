"""The heartbeat: a check that peers that send nothing are still alive.

A rank that computes says nothing; neither does one that is stopped (SIGSTOP, a machine that sleeps)
or cut off from the network. A dead one is another matter: its connection ends.

    on this host    the process table says whether a process is stopped, or ends. Nothing is sent,
                    there is no thread, and a rank that holds the interpreter for minutes raises no
                    alarm. One that was killed frees its memory, 0.1 s for a GiB, before its
                    connections end
    elsewhere       a thread says HEARTBEAT to the peer, and any byte from there is a sign of life

A rank of a wide mesh has that thread in any case: it passes on news for others, and takes their
calls, while this rank computes. If all ranks are on this host, it sleeps until something
comes.

A rank that waits checks this a few times a second, and more often where that costs it little, so
that a killed peer is soon known. A peer without a sign of life for too long is given up: its groups
are broken. Its connection stays, so that it is told if it comes back. Only time in which this rank
itself was running counts.
"""

from __future__ import annotations

import enum
import math
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from phalanx.wire.frame import Kind

if TYPE_CHECKING:  # the launcher looks at processes, and does not wait for torch
    from phalanx.transport.tcp.connection import Connection
    from phalanx.transport.tcp.mesh import Mesh

VARIABLE = "PHALANX_HEARTBEAT"
HEARTBEAT = 3.0  # seconds after which a peer that stops, or cannot be reached, is known, by default
LONGEST_RELAY = 0.1  # seconds until a rank of a wide mesh that computes passes on what it is told
SOON = 0.02  # seconds between two looks at the peers: at least
LOOK = 2e-3  # seconds between two looks, a peer: a look at a process takes 20 us, so that is 1 %


def check_heartbeat(seconds: float | None) -> float:
    """Return the seconds to use; None: the environment's, or the default. Raises ValueError."""
    given = os.environ.get(VARIABLE, HEARTBEAT) if seconds is None else seconds
    with suppress(ValueError):  # it is no number
        if float(given) > 0:
            return float(given)
    raise ValueError(
        f"heartbeat ({VARIABLE}) must be a positive number of seconds, or infinity for none, "
        f"not {given!r}"
    )


class Heartbeat:
    """Looks after the peers of one rank.

    seconds    within which a peer that has stopped, or cannot be reached, is known; a beat goes
               out 30 times as often, and a peer may miss them for 5/6 of the time
    poll       moves bytes without waiting; called by the thread that beats, lock held
    """

    def __init__(self, mesh: Mesh, seconds: float, poll: Callable[[], None]) -> None:
        self._mesh = mesh
        self._seconds = seconds
        self._poll = poll
        self._processes: Mapping[int, int] = {}  # of the peers on this host
        self._silent: defaultdict[int, float] = defaultdict(float)  # seconds without a sign of life
        self._last_look = self._next_look = math.inf
        self._every = seconds / 30 if mesh.wide is None else min(seconds / 30, LONGEST_RELAY)
        # Hundreds of ranks that wait on one host shall leave it time for something else.
        often = max(SOON, mesh.world_size * LOOK)
        self._look_every = min(seconds / 30, often) if mesh.wide is None else seconds / 12
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._end: tuple[int, int] | None = None  # a pipe that wakes the thread, if it so sleeps

    def begin(self, processes: Mapping[int, int]) -> None:
        """Begin: all are connected; `processes` are those of the peers on this host."""
        wide = self._mesh.wide is not None
        if self._seconds == math.inf and not wide:
            return
        self._processes = processes
        self._last_look = monotonic()
        self._next_look = self._last_look + self._look_every
        if wide or any(peer not in processes for peer in self._mesh.connections):
            if len(processes) == self._mesh.world_size - 1:
                self._end = os.pipe()
            name = f"phalanx rank {self._mesh.rank} heartbeat"
            self._thread = threading.Thread(target=self._keep_beating, name=name, daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Stop the thread. Lock not held."""
        self._over.set()
        end, self._end = self._end, None
        if end is not None:
            os.write(end[1], b"!")  # to close it would not do: a forked child may hold it open
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for file in end or ():
            os.close(file)

    def attend(self) -> float:
        """Check the peers, if it is time to; return the seconds to the next time. Lock held."""
        now = monotonic()
        if now >= self._next_look:
            self.look()
        return self._next_look - now

    def look(self) -> None:
        """Check the peers, if it has begun. Lock held."""
        now = monotonic()
        # A rank that was stopped itself, or had no processor, must not blame the others for it.
        seconds = max(0.0, min(now - self._last_look, self._seconds / 6))
        state = cache(state_of)  # ranks may be threads of few processes
        for connection in list(self._mesh.connections.values()):
            self._look_at(connection, seconds, state)
        if self._last_look < math.inf:
            self._last_look = now
            self._next_look = now + self._look_every

    def silent(self) -> list[int]:
        """Return the peers given up, and those that missed some beats. Lock held."""
        return [
            peer
            for peer, connection in self._mesh.connections.items()
            if connection.given_up or self._silent[peer] > self._seconds / 6
        ]

    def _look_at(
        self, connection: Connection, seconds: float, state: Callable[[int], State]
    ) -> None:
        """Give a peer up that has been silent for too long, of which these seconds are new."""
        peer = connection.peer
        process = self._processes.get(peer)
        known = connection.given_up or connection.left or connection.paused
        alive = connection.heard or known
        how = state(process) if process is not None and not known else None
        if how is State.ENDS:
            connection.end()
            return
        if alive or how is State.RUNS:
            connection.heard = False
            self._silent[peer] = 0.0
            return
        self._silent[peer] += seconds
        if self._silent[peer] < self._seconds * 5 / 6:
            return
        if process is not None:
            reason = f"its process {process} is stopped (SIGSTOP, or a debugger holds it)"
        else:
            reason = (
                f"nothing was heard from it for {self._silent[peer]:.1f} s: it is stopped, it "
                "holds the interpreter, or the network between the two is down"
            )
        connection.given_up = True  # it counts as lost, and is told so if it comes back
        self._mesh.rank_lost(peer, f"rank {self._mesh.rank} gave rank {peer} up, since {reason}")

    def _keep_beating(self) -> None:
        engine, end = self._mesh.engine, self._end
        while not self._over.wait(self._every):
            if end is not None:
                with engine.lock:
                    if engine.closed:
                        return
                    sleep = self._mesh.reactor.sleeper(end[0])
                sleep()
            with engine.lock:
                if engine.closed:
                    return
                for peer, connection in list(self._mesh.connections.items()):
                    if peer not in self._processes and connection.idle and not connection.given_up:
                        connection.send_control(Kind.HEARTBEAT)
                # What came is read meanwhile, also if this rank computes: so beats do not pile up,
                # and questions are answered.
                self._poll()
                self.attend()


# ------------------------------------------------------------------------------
# Which host this is, and how its processes are.


def host_id() -> str:
    """Return an id that is the same for all processes of one host, and different between hosts."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Containers that share neither are hosts of their own.
        spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("net", "pid")]
    except OSError:
        return socket.gethostname()
    return " ".join([boot, *spaces])


def process_id() -> int:
    """Return this process's id for others of this host; 0 if they could not use `is_stopped`."""
    return os.getpid() if Path("/proc/self/stat").exists() else 0


class State(enum.Enum):
    """How a process of this host is."""

    RUNS = enum.auto()  # or it is gone, or cannot be seen
    STOPPED = enum.auto()  # or traced and held
    ENDS = enum.auto()  # it runs no program any more, and frees its memory


def state_of(process: int) -> State:
    """Return how a process of this host is."""
    folder = f"/proc/{process}"
    with suppress(OSError):
        state, flags = _state_and_flags(folder)
        if state in (b"T", b"t"):
            return State.STOPPED
        # The thread that the process is named after may end by itself.
        if flags & _EXITING and all(
            _state_and_flags(f"{folder}/task/{thread}")[1] & _EXITING
            for thread in os.listdir(f"{folder}/task")
        ):
            return State.ENDS
    return State.RUNS


_EXITING = 0x4  # PF_EXITING (Linux, include/linux/sched.h)


def _state_and_flags(folder: str) -> tuple[bytes, int]:
    """Return the state and the flags of a process or a thread. See proc_pid_stat(5)."""
    with open(f"{folder}/stat", "rb", buffering=0) as file:
        status = file.read(1024)
    fields = status[status.rindex(b")") + 2 :].split()  # behind the name, which may hold anything
    return fields[0], int(fields[6])


def has_ended(process: int) -> bool:
    """Return whether a process of this host runs no program any more; False if nobody can see."""
    gone = process_id() and not os.path.exists(f"/proc/{process}")
    return bool(gone) or state_of(process) is State.ENDS


def is_stopped(process: int) -> bool:
    """Return whether a process of this host is stopped, or traced and held; False if gone."""
    return state_of(process) is State.STOPPED
