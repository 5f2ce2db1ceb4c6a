"""`Regrouping`: this process's way from one generation's group, or none, into the next one's.

    decide     with the others, through the store      generations.py
    meet       connect to the other ranks              site.py
    move       take the state, from where it is        moves.py, memory.py
    barrier    all have it, and have kept it: what was there before may go

A rank that is lost on the way begins the next generation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from phalanx.checkpoint.group import CheckpointGroup
from phalanx.collectives import barrier
from phalanx.core import random_state
from phalanx.core.replaceable import ReplaceableBackend
from phalanx.elastic.generations import Generations
from phalanx.elastic.kept import Kept
from phalanx.elastic.membership import Decision
from phalanx.elastic.memory import Memory
from phalanx.elastic.moves import Holding, move
from phalanx.elastic.saves import Checkpoints
from phalanx.elastic.site import Site
from phalanx.errors import CheckpointNotFoundError, CollectiveTimeoutError, PeerLostError

log = logging.getLogger("phalanx")
LOSS = PeerLostError, CollectiveTimeoutError


class Generation(NamedTuple):
    """One generation of a job, as this process saw it.

    number      from 1
    first_step  the number of its first step
    world_size  its number of ranks
    lost        ranks of the generation before that are gone: lost, or left
    joined      its ranks that were not in the generation before
    redone      steps that had counted, and are taken again
    seconds     from the loss's notice on, by phase: "decided", "met", "moved"; "total"
    """

    number: int
    first_step: int
    world_size: int
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    redone: int
    seconds: dict[str, float]


class Regrouping:
    """Forms the generations of one process.

    seed      of the random states
    timeout   seconds: of the groups
    """

    def __init__(
        self,
        site: Site,
        backend: ReplaceableBackend,
        generations: Generations,
        kept: Kept,
        memory: Memory,
        checkpoints: Checkpoints,
        *,
        seed: int,
        timeout: float,
    ) -> None:
        self._site, self._backend, self._generations = site, backend, generations
        self._kept, self._memory, self._checkpoints = kept, memory, checkpoints
        self._seed, self._timeout = seed, timeout
        self._version = 0
        self._seconds: dict[str, float] = {}

    def form(self, version: int, gone: Collection[int], how: str) -> Generation:
        """Form generations, until one has a state that all of its ranks have; return that.

        version   the number of steps that count here
        gone      ranks of this generation that are lost
        how       what became of ranks that are not in the next one: "lost", "left"
        """
        began, lost = time.monotonic(), set(gone)
        before, self._seconds = self._generations.members, {}
        while True:
            with self._timed("decided"):
                held = self._memory.held(self._generations.entered)
                decision = self._generations.next(held, lost)
            try:
                self._enter(decision)
                break
            except LOSS as error:
                log.warning("generation %d has not formed: %s", decision.generation, error)
                lost = blamed(error)
                if error.peer is not None and error.peer >= len(decision.survivors):
                    self._generations.newcomers.did_not_come(decision.members[error.peer])
        self._generations.formed()
        self._seconds["total"] = time.monotonic() - began
        rank, size = self._backend.rank, self._backend.world_size
        members = decision.members
        made = Generation(
            decision.generation,
            self._version,
            size,
            tuple(rank for rank, process in enumerate(before) if process not in members),
            tuple(rank for rank, process in enumerate(members) if process not in before),
            max(0, version - self._version),
            self._seconds,
        )
        if rank == 0:
            self._generations.tell_kept()
            _tell(made, before, version, how)
        self._generations.newcomers.watch(wanted=rank == 0)
        return made

    def _enter(self, decision: Decision) -> None:
        """Be a rank of this generation: meet the others, and take the state."""
        backend, kept, memory = self._backend, self._kept, self._memory
        members, number = decision.members, decision.generation
        rank, first = members.index(self._site.process), not decision.layout
        if rank >= len(decision.survivors):  # it has nothing to give if it alone is left
            memory.forget(first=first)
        with self._timed("met"):
            group = self._site.meet(number, rank, len(members), decision.address, self._timeout)
        with self._timed("moved"):
            backend.inner.abort()
            backend.enter(group)
            self._generations.enter()
            given = memory.give(decision)
            kept.regrouped(given)
            loaded = self._checkpoints.load_newest() if first else None
            if number > 1 and not decision.survivors and rank == 0:
                log.warning(
                    "generation %d: all who trained have ended. The training %s",
                    number,
                    "goes on from the newest checkpoint"
                    if loaded
                    else "begins anew with step 0, as there is no checkpoint",
                )
            if loaded is None:
                loaded = self._moved(given, first=first), decision.version or 0
            values, self._version = loaded
            kept.load_values(values)
            text = f"{self._seed} {self._version} {backend.world_size}"
            random_state.seed_all(xxh3_64_intdigest(text.encode()), rank)
            memory.enter(self._version, number, members)
            barrier(backend, label=f"generation {number} has its state")
            memory.complete()

    def _moved(self, given: Sequence[Holding], *, first: bool) -> Any:
        """Take the state that the ranks give, or before the first step rank 0; return the other
        values.
        """
        backend, kept = self._backend, self._kept

        def check() -> None:
            if backend.rank == 0 and not given:
                raise CheckpointNotFoundError(
                    "no version of the state is complete, and there is no checkpoint "
                    "(checkpoints=): ranks are lost that alone had parts of it, or all are between "
                    "two versions, in a collective behind an optimizer's step. Start the job again"
                )

        if first:
            CheckpointGroup(backend, "elastic", self._timeout).on_all(check)
            given = given if backend.rank == 0 else []
        values = move(given, backend, kept.model, kept.optimizers)
        return values[0] if values else None

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Add the time that this takes to a phase's."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - began


def blamed(error: BaseException) -> set[int]:
    """Return the rank that did not come, to a meeting or to a call.

    Whom it cannot reach each rank of a group finds by itself: another one may reach it.
    """
    if not isinstance(error, LOSS) or error.peer is None:
        return set()
    did_not_come = isinstance(error, CollectiveTimeoutError) or error.op == "rendezvous"
    return {error.peer} if did_not_come else set()


def _tell(made: Generation, before: Sequence[str], step: int, how: str) -> None:
    """Log a generation in one line; as a warning if ranks are lost."""
    gone = ", ".join(f"rank {rank} ({_named(before[rank])})" for rank in made.lost)
    when = f"before step {step}" if how == "left" else f"in step {step}"
    counts = ", which counts" if how == "lost" and made.first_step > step else ""
    phases = [f"{name} {took:.3f}" for name, took in made.seconds.items() if name != "total"]
    log.log(
        logging.WARNING if how == "lost" else logging.INFO,
        "generation %d: %s; %d go on, %d join, %d steps done again, %.3f s (%s)",
        made.number,
        f"{gone} {how} {when}{counts}" if gone else f"begins with step {made.first_step}",
        made.world_size - len(made.joined),
        len(made.joined),
        made.redone,
        made.seconds["total"],
        ", ".join(phases),
    )


def _named(process: str) -> str:
    """Return a process's name for people: "host b, process 812"."""
    host, number, *_ = process.split("/")
    return f"host {host}, process {number}"
