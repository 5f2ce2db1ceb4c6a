"""The worker's side: gradients go to the servers, parameters come from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.aggregation.parameter_server.wire import (
    HEADER_SIZE,
    HEADERS,
    LONGEST_TEXT,
    TENSORS,
    TEXT,
    MessageHeader,
    MessageKind,
    ParameterList,
    ShardMessage,
    checked_params,
    checked_servers,
    described,
    local_rank,
    not_finite,
    numbers_by_server,
)
from phalanx.collectives import PendingCollective
from phalanx.compression.compressor import listed_tensors
from phalanx.core.backend import Backend, SubBackend
from phalanx.core.call import check_timeout
from phalanx.errors import (
    CollectiveTimeoutError,
    DesyncError,
    DistributedError,
    MisuseError,
    PeerLostError,
    SizeMismatchError,
)
from phalanx.wire.memory import tensor_bytes

if TYPE_CHECKING:
    from typing_extensions import Self
WHO = "ParameterServer.connect"


class ParameterClient:
    """A worker's client, made by `ParameterServer.connect`, which see. Use it in a `with`.

    params    the tensors given to `connect`, into which `pull_` and `step` copy
    servers   the ranks that have the parameters
    pushes    number of this worker's steps that count, on every server
    timeout   seconds that each call waits at most, by default

    Every call goes to all servers at the same time. Errors of all of them:

    `PeerLostError`           a server is gone; or, in synchronous mode, a worker: `peer` says
                              which. Every later call raises it again
    `CollectiveTimeoutError`  a server has not answered in time, be it that the worker is too far
                              ahead of the slowest, which the error names if it can. Nothing is
                              broken: the same call may be made again
    `MisuseError`             the client is closed

    If the body raises, the client ends as a lost worker.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        backend: Backend,
        *,
        servers: Sequence[int] = (0,),
        timeout: float | None = None,
    ) -> None:
        self.params = checked_params(params, f"rank {backend.rank}: {WHO}")
        self.servers = checked_servers(servers, backend, WHO)
        self.backend = backend
        self.pushes = 0
        self.timeout = backend.timeout if timeout is None else check_timeout(timeout)
        if backend.rank in self.servers:
            raise MisuseError(
                f"rank {backend.rank} calls {WHO} and is one of servers={self.servers}: servers "
                "call ParameterServer.serve",
                rank=backend.rank,
            )
        self._requests = 0
        self._broken: DistributedError | None = None
        self._closed = False
        shares = numbers_by_server(self.params, len(self.servers))
        self._connections = [
            ServerConnection(backend.subgroup((backend.rank, server)), server, numbers, self.params)
            for server, numbers in zip(self.servers, shares, strict=True)
        ]
        try:
            self._join()
        except BaseException as error:
            self._end(error)
            raise

    def push(self, gradients: Sequence[Tensor], *, timeout: float | None = None) -> int:
        """Give the servers this worker's gradients: its next step. Return the step's number.

        gradients   as many as `params`, of the same shapes and dtypes; not changed. Zeros for a
                    parameter that was not used

        Blocks until every server has them and lets the step count: while the worker is too far
        ahead, or fewer than `quorum` have joined, it waits. Sends the gradients' bytes once, 32
        more to each server, and gets 32 from it. After a `CollectiveTimeoutError` call it again
        with the same gradients: servers to which they count already take no notice.

        TypeError or ValueError, before anything is sent, for gradients that do not fit, or are not
        finite, which would spoil the parameters for all: `skip` the step then.
        """
        self._fill(gradients, "push")
        self._call(MessageKind.PUSH, self.pushes + 1, "push", timeout)
        return self.pushes

    def skip(self, *, timeout: float | None = None) -> int:
        """Take a step without gradients: others do not wait for this worker's. Else as `push`.

        In synchronous mode the mean is of the workers that pushed.
        """
        self._call(MessageKind.SKIP, self.pushes + 1, "skip", timeout)
        return self.pushes

    def pull(self, *, timeout: float | None = None) -> list[Tensor]:
        """Return the parameters as they are now: new tensors, where `params` are.

        Blocks until this worker may begin its next step: in synchronous mode until the step that it
        has pushed is over, else until it is not too far ahead of the slowest. They include its
        pushes. From each server they are of one moment; several servers may be apart. Gets the
        parameters' bytes once, and 32 more from each server, and sends 32 to it.
        """
        fresh = [torch.empty_like(param, requires_grad=False) for param in self.params]
        self.pull_(fresh, timeout=timeout)
        return fresh

    def pull_(
        self, params: Sequence[Tensor] | None = None, *, timeout: float | None = None
    ) -> None:
        """Pull into `params`, by default the client's, which change when all have come."""
        into = self.params
        if params is not None:
            who = f"rank {self.backend.rank}: ParameterClient.pull_"
            into = checked_gradients(params, self.params, who, what="tensor")
        self._call(MessageKind.PULL, self.pushes, "pull", timeout, into)

    def step(self, gradients: Sequence[Tensor], *, timeout: float | None = None) -> None:
        """Do `push` and `pull_` into the client's parameters, both at the same time."""
        self._fill(gradients, "step")
        self._call(MessageKind.PUSH, self.pushes + 1, "step", timeout, self.params)

    def close(self, *, timeout: float | None = None) -> None:
        """Leave: nobody waits for this worker any more. May be repeated.

        Blocks until the servers know. A push that timed out may count, or not.
        """
        if self._closed or self.backend.forked:
            return
        try:
            if self._broken is None:
                self._call(MessageKind.BYE, 0, "close", timeout)
        finally:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self._end(error)

    def _join(self) -> None:
        mine = ParameterList(self.params, self.servers)
        self._call(MessageKind.HELLO, mine.digest, "connect", None)
        for connection in self._connections:
            if connection.text:
                rank, server = self.backend.rank, connection.server
                here, there = mine.first_difference(connection.text)
                raise DesyncError(
                    f"rank {rank}: {WHO}: the lists of parameters differ: worker rank {rank} has "
                    f"{here}, server rank {server} has {there}. Give tensors alike, in the same "
                    "order, and the same servers=",
                    rank=rank,
                    peer=server,
                    op="connect",
                )
        clock = max(connection.clock for connection in self._connections)
        self._call(MessageKind.JOIN, clock, "connect", None)

    def _fill(self, gradients: Sequence[Tensor], op: str) -> None:
        who = f"rank {self.backend.rank}: ParameterClient.{op}"
        listed = checked_gradients(gradients, self.params, who)
        self._check_usable(op)
        if (found := not_finite(listed)) is not None:
            raise ValueError(
                f"{who}: gradient {found[0]} ({described(listed[found[0]])}) has the value "
                f"{found[1]}, which would spoil the parameters of all workers; nothing was sent: "
                "skip() this step, as torch.amp.GradScaler does"
            )
        for connection in self._connections:
            connection.fill(listed)

    def _call(
        self,
        kind: MessageKind,
        number: int,
        op: str,
        timeout: float | None,
        into: Sequence[Tensor] | None = None,
    ) -> None:
        """Send all servers one request, and wait for their answers; with parameters, if `into`."""
        self._check_usable(op)
        seconds = self.timeout if timeout is None else check_timeout(timeout)
        headers = [MessageHeader(kind, self._requests + 1, number)]
        if into is not None and kind is not MessageKind.PULL:
            headers.append(MessageHeader(MessageKind.PULL, self._requests + 2, number))
        self._requests += 2
        try:
            ask_all(self.backend, self._connections, headers, seconds)
        except CollectiveTimeoutError as error:
            raise self._translated(error, op, number) from error
        except DistributedError as error:
            self._broken = self._translated(error, op, number)
            self._end(self._broken)
            raise self._broken from error
        except BaseException as error:
            self._end(error)
            raise
        if kind in (MessageKind.PUSH, MessageKind.SKIP):
            self.pushes += 1
            self.backend.progress.count(self)
        if into is not None:
            for connection in self._connections:
                connection.copy_to(into)

    def _translated(self, error: DistributedError, op: str, number: int) -> DistributedError:
        """Return the error in this backend's numbers, and of this call."""
        rank = self.backend.rank
        failures = [c.pair.failure for c in self._connections]
        failure = next((each for each in failures if each is not None), None)
        reason, peer = str(error), error.peer
        if failure is not None:
            reason, peer = failure.reason, local_rank(self.backend, failure.culprit)
        text = f"rank {rank}: ParameterClient.{op}: {reason}"
        return type(error)(
            text, rank=rank, peer=peer, op=op, sequence=number, seconds=error.seconds
        )

    def _check_usable(self, op: str) -> None:
        if self._broken is not None:
            raise self._broken.again()
        if self._closed:
            raise MisuseError(
                f"rank {self.backend.rank}: ParameterClient.{op} on a client that is closed",
                rank=self.backend.rank,
                op=op,
            )

    def _end(self, error: BaseException) -> None:
        """Leave without BYE: the servers learn why, and which rank is to blame."""
        rank, ranks = self.backend.rank, self.backend.ranks
        told: DistributedError = PeerLostError(f"worker rank {rank} ended with {error!r}")
        culprit = ranks[rank]
        if isinstance(error, DesyncError):
            told = DesyncError(str(error))
        elif isinstance(error, PeerLostError) and error is self._broken and error.peer is not None:
            told, culprit = PeerLostError(str(error)), ranks[error.peer]
        for connection in self._connections:
            connection.pair.fail(told, culprit=culprit)
        self._close()

    def _close(self) -> None:
        self._closed = True
        for connection in self._connections:
            connection.pair.close()


def checked_gradients(
    gradients: Iterable[Tensor], params: Sequence[Tensor], who: str, *, what: str = "gradient"
) -> list[Tensor]:
    """Return the gradients, or `what` they are, as a list. TypeError or ValueError, which names it,
    for one that is missing or does not fit its parameter.
    """
    advice = "; give zeros for a parameter that was not used"
    listed = listed_tensors(gradients, who, what=what, advice=advice)
    if len(listed) != len(params):
        raise ValueError(f"{who}: {len(listed)} {what}s for {len(params)} parameters")
    for number, (gradient, param) in enumerate(zip(listed, params, strict=True)):
        if (gradient.shape, gradient.dtype) != (param.shape, param.dtype):
            raise ValueError(
                f"{who}: {what} {number} ({described(gradient)}) does not fit parameter {number} "
                f"({described(param)})"
            )
        if gradient.layout != torch.strided:
            raise ValueError(f"{who}: {what} {number} is sparse; give its to_dense()")
    return listed


# ------------------------------------------------------------------------------
# A call: the same messages to all servers, and their answers.
#
#          server 0   - PUSH ->   <- DONE
# worker   server 1   - PUSH -------->     <- DONE      it goes on when all have answered
#          server 2   - PUSH ->       <- DONE

SHORTEST = 1e-3  # seconds that are left at least


def ask_all(
    backend: Backend,
    connections: Sequence[ServerConnection],
    headers: Sequence[MessageHeader],
    seconds: float,
) -> None:
    """Send the same messages to all servers, and take their answers. Blocks until all have
    answered. After an error nothing stays under way.
    """
    deadline = monotonic() + seconds
    # Works to wait for; for a receive, the generator that goes on when it is over.
    under_way: dict[PendingCollective[Any], Iterator[PendingCollective[int]] | None] = {}
    try:
        for connection in connections:
            for header in headers:
                if header.kind is not MessageKind.JOIN:  # which has no answer
                    answer = connection.take_answer(header)
                    under_way[next(answer)] = answer
                under_way[connection.send(header)] = None
        while under_way:
            left = max(deadline - monotonic(), SHORTEST)
            backend.wait_any([*under_way], timeout=left)
            for pending in [each for each in under_way if each.over]:
                taking = under_way.pop(pending)
                pending.wait()
                following = next(taking, None) if taking is not None else None
                if following is not None:
                    under_way[following] = taking
    finally:
        for pending in under_way:
            pending.cancel("another message of this call failed")


class ServerConnection:
    """A worker's messages to one server, and its answers.

    server    its rank
    numbers   of the parameters that it has
    clock     at which the worker may begin
    text      its list of parameters, if that differs

    Memory for two messages with tensors, each as large as this server's parameters.
    """

    def __init__(
        self, pair: SubBackend, server: int, numbers: list[int], params: Sequence[Tensor]
    ) -> None:
        self.pair = pair
        self.server = server
        self.numbers = numbers
        self.clock = 0
        self.text = b""
        self._peer = 1 - pair.rank
        own = [params[number] for number in numbers]
        self._gradients, self._values = ShardMessage(own, pair), ShardMessage(own, pair)

    def fill(self, gradients: Sequence[Tensor]) -> None:
        """Copy this server's gradients into the message for them."""
        for view, number in zip(self._gradients.tensors, self.numbers, strict=True):
            view.copy_(gradients[number].detach())

    @torch.no_grad()
    def copy_to(self, params: Sequence[Tensor]) -> None:
        """Copy the latest parameters to their places."""
        for view, number in zip(self._values.tensors, self.numbers, strict=True):
            params[number].copy_(view)

    # The wait for any of these has a deadline; they have none of their own.

    def send(self, header: MessageHeader) -> PendingCollective[None]:
        """Begin to send a message; a PUSH with the gradients."""
        message, tag = header.message(), HEADERS
        if header.kind is MessageKind.PUSH:
            message, tag = self._gradients.data, TENSORS
            header.write(message)
        return self.pair.isend(message, self._peer, tag=tag, timeout=math.inf, background=False)

    def take_answer(self, header: MessageHeader) -> Iterator[PendingCollective[int]]:
        """Receive the answer to a message, and the text that follows it. Yield the waits
        between.
        """
        of_values = header.kind is MessageKind.PULL
        while True:
            into = self._values.data if of_values else torch.empty(HEADER_SIZE, dtype=torch.uint8)
            yield self._receive(into, TENSORS if of_values else HEADERS)
            answer = MessageHeader.read(into)
            if answer.request == header.request:  # else of a call that did not wait for it
                break
        if answer.kind is MessageKind.WELCOME:
            self.clock = answer.number
        elif answer.kind is MessageKind.DIFFERS:
            if answer.number > LONGEST_TEXT:
                raise SizeMismatchError(
                    f"server rank {self.server} announces a list of parameters of {answer.number} "
                    f"bytes, and {LONGEST_TEXT} are taken at most",
                    peer=self.server,
                )
            into = torch.empty(answer.number, dtype=torch.uint8)
            yield self._receive(into, TEXT)
            self.text = bytes(tensor_bytes(into))

    def _receive(self, into: Tensor, tag: int) -> PendingCollective[int]:
        return self.pair.irecv(into, self._peer, tag=tag, timeout=math.inf, background=False)
