"""One rank of a benchmark: makes the peers, goes through operations and sizes, and tells rank 0's.

Every rank does the same, in the same order; what one of them cannot do, none does.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from phalanx.bench.control import Control
from phalanx.bench.exchange import Exchange
from phalanx.bench.memory import Memory, kinds_for
from phalanx.bench.operations import OPERATIONS, Operation
from phalanx.bench.peak import measure_peak
from phalanx.bench.peers.backends import Ours
from phalanx.bench.peers.peer import Peer, Place
from phalanx.bench.peers.table import PEERS
from phalanx.bench.records import (
    PEAK,
    Ask,
    Contender,
    LeftOut,
    Line,
    Made,
    Message,
    Progress,
)
from phalanx.bench.rounds import time_rounds
from phalanx.bench.sizes import show_size
from phalanx.collectives.tuning import root_of
from phalanx.launch.environment import read_environment
from phalanx.launch.init import init

__all__ = ["run_rank"]

Tell = Callable[[Message], None]


def run_rank(ask: Ask, tell: Tell) -> None:
    """This rank's part; `tell` is called on rank 0, with what is found as it is found."""
    torch.set_num_threads(ask.threads)
    world = read_environment(os.environ)
    with init("tcp", timeout=ask.timeout) as backend:
        control = Control(backend)
        master = world.master_addr if world is not None else ""
        place = Place(
            control, master, ask.timeout / 2, ask.width
        )  # who waits for a peer is waited for, too
        with _peers(ask, place, tell if control.rank == 0 else _silent) as peers:
            for name in ask.operations:
                if ask.measure == (PEAK,):
                    _peaks(ask, OPERATIONS[name], peers, control, tell)
                else:
                    _Sweep(ask, OPERATIONS[name], peers, control, tell).run()
        control.barrier()


def _silent(message: Message) -> None:
    """Every rank but the first."""


def _peaks(
    ask: Ask, operation: Operation, peers: dict[str, Peer], control: Control, tell: Tell
) -> None:
    """Each peer's peak of memory; there should be one peer only."""
    for name, peer in peers.items():
        found = measure_peak(name, peer, operation, ask, control)
        if control.rank == 0:
            tell(found)


@contextmanager
def _peers(ask: Ask, place: Place, tell: Tell) -> Iterator[dict[str, Peer]]:
    """All that were asked for and can be made on every rank."""
    made: dict[str, Peer] = {}
    control = place.control
    try:
        for name in ask.backends:
            tell(Progress(f"{place.size} ranks: starting {name}"))
            row = PEERS[name]
            problem = control.problem(row.lacks())
            if not problem:
                here = ""
                try:
                    made[name] = row.make(place)
                except Exception as error:
                    here = f"{type(error).__name__}: {error}"
                problem = control.problem(here)
            peer = made.get(name)
            if problem:
                tell(LeftOut(name, place.size, problem))
                if peer is not None:
                    del made[name]
                    with suppress(Exception):
                        peer.close()
            elif isinstance(peer, Ours):
                root = root_of(peer.backend)
                tell(Made(name, type(root).__name__, root.topology))
        yield made
    finally:
        for peer in made.values():
            with suppress(Exception):  # what was measured counts
                peer.close()


def _named(words: Sequence[str], known: tuple[str, ...]) -> list[str]:
    """Which of the `known` algorithms (`auto` is the first) the words mean; else `auto`."""
    meaning = {"all": known, "fixed": known[1:]}
    named = [name for word in words for name in meaning.get(word, (word,))]
    return list(dict.fromkeys(name for name in named if name in known)) or ["auto"]


class _Sweep:
    """One operation, through the sizes."""

    def __init__(
        self, ask: Ask, operation: Operation, peers: dict[str, Peer], control: Control, tell: Tell
    ) -> None:
        self.ask = ask
        self.operation = operation
        self.peers = peers
        self.control = control
        self.tell = tell if control.rank == 0 else _silent
        self.contenders = list(self._contenders())

    def run(self) -> None:
        """Measure every size."""
        sizes = self.ask.sizes if self.operation.source is not None else [0]
        for size in sizes:
            self._measure(size)

    def _contenders(self) -> Iterator[Contender]:
        """Who takes part."""
        for name, peer in self.peers.items():
            if self.operation.name not in peer.binders:
                if not PEERS[name].machine:
                    reason = "it has no such operation"
                    self.tell(LeftOut(name, self.control.size, reason, self.operation.name))
                continue
            kinds = kinds_for(self.operation, self.ask.memories)
            kinds = [peer.only] if peer.only else [kind for kind in kinds if kind in peer.memories]
            algorithms = _named(self.ask.algorithms, peer.algorithms(self.operation))
            if PEERS[name].machine:
                kinds = ["ordinary"]
            elif not kinds:
                reason = f"it has no memory of a kind asked for ({', '.join(self.ask.memories)})"
                self.tell(LeftOut(name, self.control.size, reason, self.operation.name))
            for kind, algorithm in itertools.product(kinds, algorithms):
                yield Contender(name, kind, algorithm)

    def _measure(self, size: int) -> None:
        control, operation = self.control, self.operation
        memory = Memory()
        where = f"{operation.name}, {control.size} ranks, {show_size(size)}"
        exchanges: dict[str, Exchange] = {}
        by_name = {str(contender): contender for contender in self.contenders}
        failures: dict[str, str] = {}
        for name, contender in by_name.items():
            here = ""
            try:
                exchanges[name] = self.peers[contender.peer].exchange(
                    operation, size, contender.memory, contender.algorithm, memory
                )
            except Exception as error:
                here = f"{type(error).__name__}: {error}"
            if problem := control.problem(here):
                exchanges.pop(name, None)
                failures[name] = problem
        timings, refused = time_rounds(
            exchanges,
            control,
            rounds=self.ask.rounds,
            seconds=self.ask.seconds,
            said=lambda text: self.tell(Progress(f"{where}: {text}")),
        )
        for name, reason in (failures | refused).items():
            self.contenders.remove(by_name[name])
            self.tell(LeftOut(name, control.size, reason, operation.name))
        for name, timing in timings.items():
            self.tell(
                Line(
                    operation=operation.name,
                    ranks=control.size,
                    bytes=4 * operation.fitting(control.size, size),
                    contender=by_name[name],
                    calls=timing.calls,
                    seconds=timing.seconds,
                    bus=exchanges[name].operation.bus(control.size),
                    wrong=timing.wrong,
                )
            )
