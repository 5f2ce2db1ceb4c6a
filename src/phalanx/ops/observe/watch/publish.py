"""The publisher of a rank: publishes its state twice a second while somebody watches its job.

    nobody watches    once a second, in a call of Phalanx, a look at the marker's time: 18 us
    somebody does     a thread writes the rank's state into the job's folder (folder.py)
    nobody any more   the thread ends, and takes the state back

A rank outside of calls does not notice a new watcher until its next call, or until it logs a step.
Until then its launcher reports the status of its process, and other ranks their waits. Once the
thread is there it publishes at all times, unless the process is stopped.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.core.backend import Backend
from phalanx.core.call import WORLD_ID
from phalanx.core.counters import Counts
from phalanx.core.engine import Engine
from phalanx.core.group import Group
from phalanx.core.posted import Wait
from phalanx.core.work import Work
from phalanx.errors import DistributedError, MisuseError, plain
from phalanx.launch.environment import World, read_environment
from phalanx.ops.observe.watch.folder import (
    PERIOD,
    VARIABLE,
    WatchFolder,
    machine,
    make_private_folder,
    open_folder,
)
from phalanx.ops.observe.watch.nodes import WatchServer, as_address, serve
from phalanx.ops.observe.watch.state import MOST_VALUES, JobState, RankState, number

log = logging.getLogger("phalanx")

LOOK_EVERY = 1.0  # seconds between looks for watchers
_FIRST = 0.2  # seconds over which the first rates are taken
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Publisher:
    """Publishes the state of one rank, while somebody watches and its backend is open."""

    def __init__(
        self, engine: Engine, world: World, folder: WatchFolder, server: WatchServer | None = None
    ) -> None:
        self._engine = engine
        self._world = world
        self._folder = folder
        self._server = server
        self._name = f"rank-{world.rank}.json"
        self._thread: threading.Thread | None = None
        self._before: tuple[float, ...] = ()  # the sums at its latest state
        self._trouble = ""
        self._due = 0.0  # the time of its next look when it logs a step

    def begin(self) -> None:
        """Publish that there is this rank, and from now on look for watchers."""
        engine = self._engine
        self._write(self._bare())
        engine.transport.every(LOOK_EVERY, self._look)
        engine.progress.on_log = self._logged
        engine.at_close.append(self._end)

    def state(self) -> RankState:
        """Return this rank's present state; rates are since the call before."""
        engine = self._engine
        with engine.lock:
            counts, now = engine.count(), engine.now()
            waits = list(engine.watchdog.waits.items())
            works = [work for group in engine.groups.values() for work in group.under_way()]
            sums = _sums(engine, counts, waits, works, now)
            state = self._doing(waits, works, now)
            state.last_call = engine.watchdog.last_call()
        before, self._before = self._before, sums
        if before and (seconds := sums[0] - before[0]) > 0:
            rates = ((now - then) / seconds for now, then in zip(sums, before, strict=True))
            _, blocked, waiting, busy, state.sent, state.received = rates
            state.waiting = min(max(blocked, waiting), 1.0)
            state.communicating = min(max(busy - state.waiting, 0.0), 1.0 - state.waiting)
        latest = engine.progress.latest
        if latest.number >= 0:
            state.step, state.step_seconds = latest.number, latest.seconds or 0.0
        state.values = {
            plain(name): number(value) for name, value in [*latest.values.items()][:MOST_VALUES]
        }
        with suppress(OSError):  # of a system without /proc
            state.memory = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
        return state

    def _doing(
        self, waits: list[tuple[Wait, float]], works: list[Work[Any]], now: float
    ) -> RankState:
        """Return the call that is under way: one that blocks a thread, or else any."""
        state = RankState(rank=self._world.rank)
        for wait, began in waits[:1]:
            state.operation, state.seconds_in = wait.name, now - began
            state.waits_for = wait.waits_for()
            works = list(wait.parts())
        for work in works[:1]:
            call = work.call
            state.operation, state.sequence = call.name, call.sequence
            state.signature = call.signature
            state.group = call.suffix.removeprefix(" in the group of ")
            state.where = str(call.site) if call.site.line else ""
            state.seconds_in = now - call.started
        return state

    def _logged(self) -> None:
        """Look for watchers when the program logs a step, too: a job of one rank makes no calls."""
        now = self._engine.now()
        if now >= self._due:
            self._due = now + LOOK_EVERY
            with self._engine.lock:
                self._look()

    def _look(self) -> None:
        """Look for watchers. Lock held."""
        if self._engine.closed:
            return
        if self._thread is None and self._folder.is_watched():
            name = f"phalanx rank {self._world.rank} publishes"
            self._thread = threading.Thread(target=self._publish, name=name, daemon=True)
            self._thread.start()

    def _publish(self) -> None:
        self._before = ()
        self.state()  # from which the first rates are
        time.sleep(_FIRST)
        while self._folder.is_watched() and not self._engine.closed:
            self._write(self.state())
            time.sleep(PERIOD)
        if self._engine.closed:  # this thread's last publication may be older
            self._write_end()
        else:
            self._write(self._bare())
        self._thread = None

    def _end(self) -> None:
        """Publish that this rank has left. Lock not held."""
        self._write_end()
        if self._server is not None:
            self._server.close()

    def _write_end(self) -> None:
        """Publish the last state of this rank, with its logged values."""
        state = self.state()
        state.status, state.reason, state.operation = "ended", "it has closed its backend", ""
        self._write(state)

    def _bare(self) -> RankState:
        alone = self._world.world_size == 1  # it makes no calls, in which it would look; it may log
        return RankState(rank=self._world.rank, status="running" if alone else "starting")

    def _write(self, state: RankState) -> None:
        state.pid, state.machine, state.host = os.getpid(), machine(), socket.gethostname()
        state.time, state.generation = time.time(), self._world.restart_count
        part = JobState(
            name=" ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
            world_size=self._world.world_size,
            time=state.time,
            ranks=[state],
            generation=state.generation,
        )
        try:
            self._folder.write(self._name, part)
        except OSError as error:  # the folder is gone, the disk is full: the training goes on
            if not self._trouble:
                self._trouble = str(error)
                log.debug("rank %d: its state is not published: %s", self._world.rank, error)


def _sums(
    engine: Engine,
    counts: Counts,
    waits: list[tuple[Wait, float]],
    works: list[Work[Any]],
    now: float,
) -> tuple[float, ...]:
    """Return the sums so far, of which differences are published. Lock held.

    The time; the seconds that threads were and are blocked in calls, without very short waits, and
    the same by the counters; the seconds of calls, to their end or now; bytes sent, and received.
    """
    blocked = sum(now - began for _, began in waits)
    if isinstance(world := engine.groups.get(WORLD_ID), Group):
        blocked += world.seconds_waiting
    calls = sum(each.seconds for each in counts.operations.values())
    calls += sum(now - work.call.started for work in works)
    return now, blocked, counts.seconds_waiting, calls, counts.bytes_out, counts.bytes_in


def check(environ: Mapping[str, str]) -> None:
    """Raise `MisuseError` for an invalid address; a folder is checked when it is opened."""
    as_address(environ.get(VARIABLE, ""))


def begin(
    backend: Backend, world: World | None = None, environ: Mapping[str, str] = os.environ
) -> None:
    """Publish this rank's state while somebody watches, at the place in the environment.

    `world` is the launcher's description; by default that in the environment. At an address the
    first rank of each host serves the states of the ranks there. `MisuseError` if PHALANX_WATCH
    names a folder or an address that is not fit for it; the backend is gone then. If no folder of
    this user's can be made for an address, a line in the log says so, and the job goes on.
    """
    place = environ.get(VARIABLE, "")
    if not place:
        return
    if world is None:
        with suppress(DistributedError):  # a program may have torch's groups form by themselves
            world = read_environment(environ)
    if world is None or (world.rank, world.world_size) != (backend.rank, backend.world_size):
        world = World(backend.rank, backend.world_size)  # made by hand, as torch's groups may be
    try:
        endpoint, server = as_address(place), None
        if endpoint is None:
            folder = open_folder(Path(place))
        else:
            try:
                folder = make_private_folder(f"port-{endpoint.port}")
            except MisuseError as error:  # another user may have taken its place: it is not ours
                log.warning("rank %d cannot be watched: %s", backend.rank, error)
                return
            server = serve(folder, endpoint) if world.local_rank == 0 else None
    except BaseException:
        backend.abort()
        raise
    Publisher(backend.engine, world, folder, server).begin()
