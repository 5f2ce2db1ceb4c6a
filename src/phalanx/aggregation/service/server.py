"""A server: wait for any message of any worker, tell the desk, do what it says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from torch import Tensor

from phalanx.aggregation.service.desk import Apply, Desk, Free, Part, Say, State
from phalanx.aggregation.service.holding import Holding, OptimizerFactory
from phalanx.aggregation.service.line import Line
from phalanx.aggregation.service.modes import ServerMode
from phalanx.aggregation.service.ranks import checked_servers, checked_workers, named, pair_of
from phalanx.aggregation.service.record import ServiceRecord
from phalanx.aggregation.service.shards import (
    Layout,
    checked_params,
    described,
    digest,
    encoded,
    numbers_by_server,
)
from phalanx.aggregation.service.words import Kind, Word
from phalanx.backends.base import Backend
from phalanx.backends.messages import check_timeout
from phalanx.errors import (
    CollectiveTimeoutError,
    DesyncError,
    DistributedError,
    PeerLostError,
)

log = logging.getLogger("phalanx")

WHO = "ParameterServer.serve"


def serve(
    params: Sequence[Tensor],
    optimizer: OptimizerFactory,
    backend: Backend,
    *,
    servers: Sequence[int] = (0,),
    workers: Sequence[int] | None = None,
    mode: ServerMode = ServerMode.SYNCHRONOUS,
    quorum: int | None = None,
    timeout: float | None = None,
    on_step: Callable[[ServiceRecord], None] | None = None,
) -> ServiceRecord:
    """See `ParameterServer.serve`."""
    listed = checked_params(params, f"rank {backend.rank}: {WHO}")
    places = checked_servers(servers, backend, WHO)
    ranks = checked_workers(workers, places, backend, WHO)
    if quorum is None:
        quorum = len(ranks) if mode.together else 1
    elif quorum < 1:
        raise ValueError(f"{WHO}: quorum={quorum}: the first step waits for one worker at least")
    seconds = backend.timeout if timeout is None else check_timeout(timeout)
    numbers = numbers_by_server(listed, len(places))[places.index(backend.rank)]
    holding = Holding([listed[number] for number in numbers], optimizer)
    lines = described(listed, places)
    server = Server(
        holding,
        Desk(ranks, mode, quorum, digest(lines)),
        backend,
        ServiceRecord(backend.rank, numbers, holding.params, holding.optimizer),
        text=encoded(lines),
        together=mode.together,
        timeout=seconds,
        on_step=on_step,
    )
    return server.run()


class Server:
    """One server, from the first worker to the last."""

    def __init__(
        self,
        holding: Holding,
        desk: Desk,
        backend: Backend,
        record: ServiceRecord,
        *,
        text: bytes,
        together: bool,
        timeout: float,
        on_step: Callable[[ServiceRecord], None] | None,
    ) -> None:
        self._holding = holding
        self._desk = desk
        self._backend = backend
        self._record = record
        self._text = text
        self._together = together
        self._timeout = timeout
        self._on_step = on_step
        self._lines: dict[int, Line] = {}

    def run(self) -> ServiceRecord:
        """Serve until every worker is gone. Blocks."""
        layout = Layout(self._holding.params)
        try:
            for worker in self._desk.visits:
                self._lines[worker] = Line(pair_of(self._backend, worker), layout)
            self._serve()
        except BaseException as error:
            self._tell_all(error)
            raise
        self._note()
        for line in self._lines.values():
            line.pair.close()
        return self._record

    def _serve(self) -> None:
        lines = self._lines.values()
        while self._desk.is_open or any(line.pending() for line in lines):
            if not any(line.error for line in lines):
                self._wait()
            for worker, line in self._lines.items():
                self._attend(worker, line)

    def _wait(self) -> None:
        pending = [each for line in self._lines.values() for each in line.pending()]
        try:
            self._backend.wait_any(pending, timeout=self._timeout)
        except CollectiveTimeoutError as error:
            raise self._silence() from error

    def _attend(self, worker: int, line: Line) -> None:
        """See to what has come from one worker."""
        words = line.poll()
        while self._hears(worker, line, words):
            self._settle()  # what the optimizer or `on_step` raises is not the worker's

    def _hears(self, worker: int, line: Line, words: Iterator[Word]) -> bool:
        """Whether there is anything new of a worker: a word, or that it is lost."""
        try:
            word = next(words, None)
            if word is not None:
                self._desk.heard(worker, word)
        except (DistributedError, ValueError) as error:
            was_there = self._desk.visits[worker].state is not State.GONE
            if was_there:
                self._lose(worker, line, error)
            line.end(lost=True)
            return was_there
        return word is not None

    def _settle(self) -> None:
        for action in self._desk.settle():
            if isinstance(action, Apply):
                self._apply(action.workers)
            elif isinstance(action, Free):
                self._lines[action.worker].free()
            elif isinstance(action, Part):
                self._lines[action.worker].end()
            else:
                self._say(action)

    def _apply(self, workers: list[int]) -> None:
        self._holding.step([self._lines[worker].pushed() for worker in workers])
        self._note()
        if self._on_step is not None:
            self._on_step(self._record)

    def _say(self, action: Say) -> None:
        line, word = self._lines[action.worker], action.word
        if word.kind is Kind.VALUES:
            line.say_values(word, self._holding.copy_to)
        elif word.kind is Kind.DIFFERS:
            line.say(word._replace(number=len(self._text)), self._text)
        else:
            line.say(word)

    def _note(self) -> None:
        record, desk = self._record, self._desk
        record.steps = desk.steps
        record.clocks = dict(desk.clocks.of)
        record.pushes = {worker: visit.pushes for worker, visit in desk.visits.items()}

    # When somebody is lost ----------------------------------------------------------------

    def _lose(self, worker: int, line: Line, error: Exception) -> None:
        """A worker is gone: it is dropped, or nobody can go on."""
        desk, rank = self._desk, self._backend.rank
        reason = line.why(error)
        if line.pair.group.failure is None:  # it lives, and says what makes no sense
            line.pair.fail(PeerLostError(f"server rank {rank} dropped rank {worker}: {reason}"))
        if self._together:
            kind = DesyncError if isinstance(error, DesyncError) else PeerLostError
            culprit = line.culprit(self._backend, worker)
            whose = f"worker rank {worker} was lost" if culprit == worker else "the others end"
            raise kind(
                f"rank {rank}: {WHO}: {whose} in step {desk.round + 1}: {reason}",
                rank=rank,
                peer=culprit,
                op="serve",
                sequence=desk.round,
            ) from error
        count = desk.visits[worker].pushes
        desk.lost(worker)
        self._record.dropped[worker] = reason
        log.warning(
            "rank %d: the parameter server goes on without worker rank %d, of which %d pushes were "
            "applied: %s",
            rank,
            worker,
            count,
            reason,
        )

    def _tell_all(self, error: BaseException) -> None:
        """The workers learn why this server does not go on; of a lost worker, which one."""
        ranks, rank = self._backend.group.ranks, self._backend.rank
        lost = error.peer if isinstance(error, (PeerLostError, DesyncError)) else None
        text = str(error) if lost is not None else f"server rank {rank} ended with {error!r}"
        kind = DesyncError if isinstance(error, DesyncError) else PeerLostError
        for line in self._lines.values():
            with suppress(DistributedError):
                line.pair.fail(kind(text), culprit=None if lost is None else ranks[lost])

    def _silence(self) -> CollectiveTimeoutError:
        visits, rank = self._desk.visits, self._backend.rank
        coming = [w for w, v in visits.items() if v.state is State.COMING]
        here = [w for w, v in visits.items() if v.state in (State.GREETED, State.JOINED)]
        parts = []
        if coming:
            parts.append(f"{named(coming)} did not come (ParameterServer.connect there)")
        if here:
            parts.append(
                f"{named(here)} came, and did not say anything more or close its client; or its "
                "step takes longer than timeout= allows"
            )
        parts = parts or ["workers that are gone do not take their last answers"]
        return CollectiveTimeoutError(
            f"rank {rank}: {WHO} has heard nothing of anybody for {self._timeout:g} s: "
            f"{'; '.join(parts)}",
            rank=rank,
            peer=next(iter([*coming, *here]), None),
            op="serve",
            seconds=self._timeout,
        )
