"""A server: wait for any worker's message, pass it to the state, do the resulting actions."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from phalanx.aggregation.parameter_server.state import (
    ApplyUpdate,
    Disconnect,
    ReleaseBuffer,
    ServerMode,
    ServerState,
    ServiceRecord,
    SessionState,
)
from phalanx.aggregation.parameter_server.wire import (
    HEADER_SIZE,
    HEADERS,
    TENSORS,
    TEXT,
    MessageHeader,
    MessageKind,
    ParameterList,
    ShardMessage,
    checked_params,
    checked_servers,
    local_rank,
    not_finite,
    numbers_by_server,
)
from phalanx.collectives import PendingCollective
from phalanx.core.backend import Backend, SubBackend
from phalanx.core.call import check_timeout
from phalanx.errors import (
    CollectiveTimeoutError,
    DesyncError,
    DistributedError,
    MisuseError,
    PeerLostError,
    name_ranks,
)

log = logging.getLogger("phalanx")

WHO = "ParameterServer.serve"
OptimizerFactory = Callable[[list[Tensor]], torch.optim.Optimizer]
OnStep = Callable[[ServiceRecord], None]


class Server:
    """One server, from the first worker to the last. See `ParameterServer.serve`."""

    def __init__(
        self,
        params: Sequence[Tensor],
        optimizer: OptimizerFactory,
        backend: Backend,
        servers: Sequence[int],
        workers: Sequence[int] | None,
        mode: ServerMode,
        quorum: int | None,
        timeout: float | None,
        on_step: OnStep | None,
    ) -> None:
        listed = checked_params(params, f"rank {backend.rank}: {WHO}")
        places = checked_servers(servers, backend, WHO)
        ranks = checked_workers(workers, places, backend)
        if quorum is None:
            quorum = len(ranks) if mode.together else 1
        elif quorum < 1:
            raise ValueError(
                f"{WHO}: quorum={quorum}: the first step waits for one worker at least"
            )
        self._timeout = backend.timeout if timeout is None else check_timeout(timeout)
        self._backend = backend
        self._mode = mode
        self._on_step = on_step
        numbers = numbers_by_server(listed, len(places))[places.index(backend.rank)]
        own = [listed[number] for number in numbers]
        self._list = ParameterList(listed, places)
        self._state = ServerState(ranks, mode, quorum, self._list.digest)
        self._record = ServiceRecord(backend.rank, numbers, own, optimizer(own) if own else None)
        self._connections: dict[int, WorkerConnection] = {}

    def run(self) -> ServiceRecord:
        """Serve until every worker is gone. Blocks."""
        connections, backend = self._connections, self._backend
        try:
            for worker in self._state.sessions:
                pair = backend.subgroup((backend.rank, worker))
                connections[worker] = WorkerConnection(pair, self._record.params)
            while self._state.is_open or any(each.pending() for each in connections.values()):
                if not any(each.error for each in connections.values()):
                    pending = [each for c in connections.values() for each in c.pending()]
                    try:
                        backend.wait_any(pending, timeout=self._timeout)
                    except CollectiveTimeoutError as error:
                        raise self._silence() from error
                for worker, connection in connections.items():
                    self._serve(worker, connection)
        except BaseException as error:
            self._tell_all(error)
            raise
        self._update_record()
        for connection in connections.values():
            connection.pair.close()
        return self._record

    def _serve(self, worker: int, connection: WorkerConnection) -> None:
        """Handle the messages that have come from one worker, or drop it if it is lost."""
        headers = connection.poll()
        while True:
            try:
                header = next(headers, None)
                if header is None:
                    return
                if header.kind is MessageKind.PUSH:
                    self._check_finite(connection.pushed())
                self._state.received(worker, header)
            except (DistributedError, ValueError) as error:
                if self._state.sessions[worker].state is not SessionState.GONE:
                    self._lose(worker, connection, error)
                connection.end(lost=True)
            self._act()  # errors of the optimizer or `on_step` are not the worker's

    def _check_finite(self, pushed: list[Tensor]) -> None:
        """Raise ValueError for gradients that no `ParameterClient` sends."""
        if (found := not_finite(pushed)) is not None:
            number, value = self._record.numbers[found[0]], found[1]
            raise ValueError(f"it pushes a gradient of parameter {number} with the value {value}")

    def _act(self) -> None:
        """Do the actions of the state."""
        for action in self._state.actions():
            if isinstance(action, ApplyUpdate):
                self._step([self._connections[worker].pushed() for worker in action.workers])
                continue
            connection = self._connections[action.worker]
            if isinstance(action, ReleaseBuffer):
                connection.release()
            elif isinstance(action, Disconnect):
                connection.end()
            elif action.header.kind is MessageKind.VALUES:
                connection.send_values(action.header)
            elif action.header.kind is MessageKind.DIFFERS:
                text = self._list.text
                connection.send(action.header._replace(number=len(text)), text)
            else:
                connection.send(action.header)

    def _step(self, pushed: Sequence[list[Tensor]]) -> None:
        """Take one step of the optimizer along the mean of some workers' gradients.

        The gradients' memory is overwritten. Sums are in the order given; of float16 and bfloat16,
        in float32.
        """
        record = self._record
        if record.optimizer is not None:
            for param, gradients in zip(record.params, zip(*pushed, strict=True), strict=True):
                param.grad = _mean(gradients).to(param.device)
            record.optimizer.step()
            for param in record.params:
                param.grad = None
        self._update_record()
        if self._on_step is not None:
            self._on_step(record)

    def _update_record(self) -> None:
        record, state = self._record, self._state
        record.steps = state.steps
        record.clocks = dict(state.clocks)
        record.pushes = {worker: session.pushes for worker, session in state.sessions.items()}

    def _lose(self, worker: int, connection: WorkerConnection, error: Exception) -> None:
        """Drop a lost worker, or end the service if nobody can go on without it."""
        state, rank = self._state, self._backend.rank
        failure = connection.pair.failure
        reason, culprit = str(error), worker
        if failure is None:  # it lives, and sends nonsense
            connection.pair.fail(
                PeerLostError(f"server rank {rank} dropped rank {worker}: {reason}")
            )
        else:  # without the words of the message that noticed it; and whose fault it says it is
            reason, blamed = failure.reason, local_rank(self._backend, failure.culprit)
            culprit = worker if blamed is None or blamed == rank else blamed
        if self._mode.together:
            kind = DesyncError if isinstance(error, DesyncError) else PeerLostError
            whose = f"worker rank {worker} was lost" if culprit == worker else "the others end"
            raise kind(
                f"rank {rank}: {WHO}: {whose} in step {state.round + 1}: {reason}",
                rank=rank,
                peer=culprit,
                op="serve",
                sequence=state.round,
            ) from error
        count = state.sessions[worker].pushes
        state.lost(worker)
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
        """Tell the workers why this server ends, and which worker is lost, if one is."""
        ranks, rank = self._backend.ranks, self._backend.rank
        lost = error.peer if isinstance(error, (PeerLostError, DesyncError)) else None
        text = str(error) if lost is not None else f"server rank {rank} ended with {error!r}"
        kind = DesyncError if isinstance(error, DesyncError) else PeerLostError
        for connection in self._connections.values():
            with suppress(DistributedError):
                connection.pair.fail(kind(text), culprit=None if lost is None else ranks[lost])

    def _silence(self) -> CollectiveTimeoutError:
        """Return the error that names the silent workers."""
        rank, here, coming = self._backend.rank, [], []
        for worker, session in self._state.sessions.items():
            if session.state is SessionState.COMING:
                coming.append(worker)
            elif session.state is not SessionState.GONE:
                here.append(worker)
        parts = []
        if coming:
            parts.append(f"{name_ranks(coming)} did not come (ParameterServer.connect there)")
        if here:
            parts.append(
                f"{name_ranks(here)} came, and did not say anything more or close its client; or "
                "its step takes longer than timeout= allows"
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


def checked_workers(
    workers: Sequence[int] | None, servers: tuple[int, ...], backend: Backend
) -> tuple[int, ...]:
    """Return the workers, ascending: by default every rank that is no server."""
    if backend.rank not in servers:
        raise MisuseError(
            f"rank {backend.rank} calls {WHO} and is none of servers={servers}: workers call "
            "ParameterServer.connect",
            rank=backend.rank,
        )
    if workers is None:
        return tuple(rank for rank in range(backend.world_size) if rank not in servers)
    listed = sorted({backend.check_rank(worker, "worker") for worker in workers})
    for worker in listed:
        if worker in servers:
            raise ValueError(f"{WHO}: rank {worker} cannot be a server and a worker")
    return tuple(listed)


# ------------------------------------------------------------------------------
# The connection to one worker.


class WorkerConnection:
    """The messages of one pair of server and worker, which breaks alone.

    error   its failure, which `poll` has yet to raise; nothing else here raises

    A header is always expected; tensors only while there is memory for them: `release` frees that
    of the last push. Memory of twice the parameters is allocated when the worker comes.
    """

    def __init__(self, pair: SubBackend, params: Sequence[Tensor]) -> None:
        self.pair = pair
        self.error: DistributedError | None = None
        self._params = params
        self._peer = 1 - pair.rank
        self._header = torch.empty(HEADER_SIZE, dtype=torch.uint8)
        self._receives: dict[PendingCollective[int], Tensor] = {}  # and what each fills
        self._sends: set[PendingCollective[None]] = set()
        self._pushed: ShardMessage | None = None
        self._values: ShardMessage | None = None
        self._values_sent: PendingCollective[None] | None = None
        self._deferred: MessageHeader | None = None
        self._is_expecting = True
        self._expect(self._header, HEADERS)

    def pending(self) -> list[PendingCollective[Any]]:
        """Return the works under way, any of which may be waited for."""
        return [*self._receives, *self._sends]

    def poll(self) -> Iterator[MessageHeader]:
        """Yield the headers of messages that have come; then raise the connection's error."""
        for receive in [each for each in self._receives if each.over]:
            message = self._receives.pop(receive, None)
            if message is None:  # it was given up meanwhile
                continue
            receive.wait()
            header = MessageHeader.read(message)
            if (header.kind is MessageKind.PUSH) != (message is not self._header):
                raise ValueError(f"it says {header.kind.name} in a message of another kind")
            if header.kind is MessageKind.HELLO and self._pushed is None:
                self._values = ShardMessage(self._params, self.pair)
                self._pushed = ShardMessage(self._params, self.pair)
                self.release()
            yield header
            if message is self._header and self._is_expecting:
                self._expect(self._header, HEADERS)
        for send in [each for each in self._sends if each.over]:
            self._sends.remove(send)
            send.wait()
        if self._deferred is not None:
            self.send_values(self._deferred)
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def pushed(self) -> list[Tensor]:
        """Return the gradients of the latest push."""
        assert self._pushed is not None
        return self._pushed.tensors

    def release(self) -> None:
        """Free the memory of the last push, and expect the next one."""
        if self._is_expecting:
            assert self._pushed is not None
            self._expect(self._pushed.data, TENSORS)

    def send(self, header: MessageHeader, text: bytes = b"") -> None:
        """Send a header, and the text that follows it, if there is any."""
        self._send(header.message(), HEADERS)
        if text:
            self._send(torch.frombuffer(bytearray(text), dtype=torch.uint8), TEXT)

    @torch.no_grad()
    def send_values(self, header: MessageHeader) -> None:
        """Send a header and the current parameters.

        They are sent later if the last ones are still on their way to this worker.
        """
        if self._values_sent is not None and not self._values_sent.over:
            self._deferred = header
            return
        assert self._values is not None
        self._deferred = None
        header.write(self._values.data)
        for sent, param in zip(self._values.tensors, self._params, strict=True):
            sent.copy_(param)
        self._values_sent = self._send(self._values.data, TENSORS)

    def end(self, *, lost: bool = False) -> None:
        """Expect nothing more of this worker; if `lost`, cancel the sends to it, too."""
        self._is_expecting = False
        for pending in [*self._receives, *(self._sends if lost else ())]:
            pending.cancel("the worker is gone")
        self._receives.clear()
        self._deferred = self.error = None
        if lost:
            self._sends.clear()

    def _expect(self, into: Tensor, tag: int) -> None:
        try:
            pending = self.pair.irecv(into, self._peer, tag=tag, timeout=math.inf, background=False)
        except DistributedError as error:
            self.error = error
        else:
            self._receives[pending] = into

    def _send(self, message: Tensor, tag: int) -> PendingCollective[None] | None:
        try:
            pending = self.pair.isend(
                message, self._peer, tag=tag, timeout=math.inf, background=False
            )
        except DistributedError as error:
            self.error = error
            return None
        self._sends.add(pending)
        return pending


def _mean(gradients: tuple[Tensor, ...]) -> Tensor:
    first, *others = gradients
    if not others:
        return first
    total = first.float() if first.dtype.itemsize <= 2 else first
    for other in others:
        total += other
    return total.div_(len(gradients)).to(first.dtype)
