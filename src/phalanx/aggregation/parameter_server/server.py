"""A server: wait for any message of any worker, tell the desk, do what it says."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from phalanx.aggregation.parameter_server.state import (
    Apply,
    Desk,
    Free,
    Part,
    Say,
    ServerMode,
    ServiceRecord,
    State,
)
from phalanx.aggregation.parameter_server.wire import (
    TENSORS,
    TEXT,
    WORDS,
    Holding,
    Kind,
    Layout,
    OptimizerFactory,
    Word,
    checked_params,
    checked_servers,
    checked_workers,
    described,
    digest,
    empty_message,
    encoded,
    named,
    numbers_by_server,
    pair_of,
)
from phalanx.core.backend import Backend, SubBackend
from phalanx.core.work import Operation, check_timeout
from phalanx.errors import CollectiveTimeoutError, DesyncError, DistributedError, PeerLostError

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


# ------------------------------------------------------------------------------
# One worker's messages, on the server's side.

Write = Callable[[list[Tensor]], None]


class Line:
    """The messages of one pair of server and worker, which breaks alone.

    error   why it cannot go on, which `poll` has not raised yet; nothing else here raises

    A word is always expected; tensors, while there is memory for them: `free` says that the last
    push is not needed any more. Memory for tensors is taken when the worker comes, twice the
    server's parameters.
    """

    def __init__(self, pair: SubBackend, layout: Layout) -> None:
        self.pair = pair
        self.error: DistributedError | None = None
        self._layout = layout
        self._peer = 1 - pair.rank
        self._word = empty_message()
        self._receives: dict[Operation, Tensor] = {}  # and what each fills
        self._sends: set[Operation] = set()
        self._pushed: Tensor | None = None
        self._values: Tensor | None = None
        self._values_sent: Operation | None = None
        self._put_off: tuple[Word, Write] | None = None
        self._is_expecting = True
        self._expect(self._word, WORDS)

    def pending(self) -> list[Operation]:
        """What is under way, any of which may be waited for."""
        return [*self._receives, *self._sends]

    def poll(self) -> Iterator[Word]:
        """The words that have come since; then the error that ends the line, if there is one."""
        for operation in [each for each in self._receives if each.done]:
            message = self._receives.pop(operation, None)
            if message is None:  # it was given up meanwhile
                continue
            self.pair.wait(operation)
            word = Word.read(message)
            if word.kind is Kind.HELLO and self._pushed is None:
                self._values = self._layout.memory(self.pair)
                self._pushed = self._layout.memory(self.pair)
                self.free()
            yield word
            if message is self._word and self._is_expecting:
                self._expect(self._word, WORDS)
        for operation in [each for each in self._sends if each.done]:
            self._sends.remove(operation)
            self.pair.wait(operation)
        if self._put_off is not None:
            self.say_values(*self._put_off)
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def pushed(self) -> list[Tensor]:
        """The gradients that have come last."""
        assert self._pushed is not None
        return self._layout.views(self._pushed)

    def free(self) -> None:
        """What was pushed is not needed any more: expect the next."""
        if self._is_expecting:
            assert self._pushed is not None
            self._expect(self._pushed, TENSORS)

    def say(self, word: Word, text: bytes = b"") -> None:
        """Send a word, and the text that follows it, if there is any."""
        self._send(word.message(), WORDS)
        if text:
            self._send(torch.frombuffer(bytearray(text), dtype=torch.uint8), TEXT)

    def say_values(self, word: Word, write: Write) -> None:
        """Send a word and the parameters, which `write` copies into views of the message.

        Later, if the last ones are still on their way to a worker that has asked again.
        """
        if self._values_sent is not None and not self._values_sent.done:
            self._put_off = word, write
            return
        assert self._values is not None
        self._put_off = None
        word.write(self._values)
        write(self._layout.views(self._values))
        self._values_sent = self._send(self._values, TENSORS)

    def end(self, *, lost: bool = False) -> None:
        """Expect nothing more of this worker; `lost`: nor that it takes what was sent."""
        self._is_expecting = False
        for operation in [*self._receives, *(self._sends if lost else ())]:
            self.pair.give_up(operation, "the worker is gone")
        self._receives.clear()
        self._put_off = self.error = None
        if lost:
            self._sends.clear()

    def why(self, error: Exception) -> str:
        """Why the line has ended, without the words of the message that noticed it."""
        failure = self.pair.group.failure
        return failure.reason if failure is not None else str(error)

    def culprit(self, backend: Backend, worker: int) -> int:
        """Whose fault that is, as a rank of the backend: the worker's, or of whom it says so."""
        failure = self.pair.group.failure
        named = None if failure is None else backend.group.to_local.get(failure.culprit)
        return worker if named is None or named == backend.rank else named

    def _expect(self, into: Tensor, tag: int) -> None:
        try:
            operation, _ = self.pair.start_recv(into, self._peer, tag=tag, timeout=math.inf)
        except DistributedError as error:
            self.error = error
        else:
            self._receives[operation] = into

    def _send(self, message: Tensor, tag: int) -> Operation | None:
        try:
            operation = self.pair.start_send(message, self._peer, tag=tag, timeout=math.inf)
        except DistributedError as error:
            self.error = error
            return None
        self._sends.add(operation)
        return operation
