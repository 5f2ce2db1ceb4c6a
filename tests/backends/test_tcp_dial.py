"""A call to a peer: what means that it is gone, and what only that it has to be called again."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from acceptor_step import drive_until, lonely_transport
from clusters import PATIENCE, loopback_listener
from listening import needs_proc
from test_tcp_rendezvous import Start, start  # noqa: F401

from phalanx import CollectiveTimeoutError
from phalanx.transport.tcp.dial import Dial
from phalanx.transport.tcp.transport import TcpTransport


@pytest.fixture
def transport() -> Iterator[TcpTransport]:
    made = lonely_transport(2, 3)
    yield made
    with made.engine.lock:
        made.shut()


def call(transport: TcpTransport, listener: socket.socket, *, patient: bool) -> Dial:
    with transport.engine.lock:
        address = (listener.family, listener.getsockname())
        return Dial(transport.mesh, 1, [address], patient=patient)


def hang_up_on(listener: socket.socket) -> int:
    """Accept who is there, hang up; how many it were."""
    count = 0
    try:
        while True:
            listener.accept()[0].close()
            count += 1
    except BlockingIOError:
        return count


@pytest.mark.parametrize("patient", [True, False])
def test_a_peer_that_hangs_up_is_called_again(transport: TcpTransport, patient: bool) -> None:
    """It may have had to make room for others."""
    hung_up = 0
    with loopback_listener() as listener:
        dial = call(transport, listener, patient=patient)

        def often_enough() -> bool:
            nonlocal hung_up
            hung_up += hang_up_on(listener)
            return hung_up >= 4

        drive_until(transport, often_enough)
        assert dial.refusal is None
    if not patient:
        # Now nobody listens any more: it was there, and is gone.
        drive_until(transport, lambda: dial.refusal is not None)
        assert dial.refusal is not None
        assert dial.refusal.reason == "Connection refused"
        assert not dial.refusal.final
    with transport.engine.lock:
        dial.drop()


def test_one_that_may_not_have_started_yet_is_called_until_it_is_there(
    transport: TcpTransport,
) -> None:
    with socket.socket() as reserved:  # bound, and not listening
        reserved.bind(("127.0.0.1", 0))
        dial = call(transport, reserved, patient=True)
        drive_until(transport, lambda: dial.attempts >= 3)
        assert dial.refusals
        assert dial.trouble == "Connection refused"
        reserved.listen()
        reserved.settimeout(PATIENCE)
        drive_until(transport, lambda: dial.trouble.startswith("it accepts connections"))
        assert not dial.refusals
        reserved.accept()[0].close()
    assert dial.refusal is None
    with transport.engine.lock:
        dial.drop()


def test_a_call_that_is_taken_and_not_answered_is_made_again(transport: TcpTransport) -> None:
    """In a queue that is flooded it may be lost without a word."""
    with loopback_listener() as listener:
        dial = call(transport, listener, patient=True)
        taken: list[socket.socket] = []

        def twice() -> bool:
            with suppress(BlockingIOError):
                taken.append(listener.accept()[0])
            return len(taken) == 2

        drive_until(transport, twice)
        assert dial.refusal is None
        assert dial.trouble.startswith("it accepts connections but does not answer")
        taken[0].settimeout(PATIENCE)
        assert taken[0].recv(4096).startswith(b"PHX?")
        assert taken[0].recv(4096) == b"", "the first call was hung up"
        for sock in taken:
            sock.close()
    with transport.engine.lock:
        dial.drop()


@needs_proc
def test_a_peer_whose_queue_is_full_of_other_callers_is_called_again_and_told_apart_from_silence(
    start: Start,  # noqa: F811
) -> None:
    """Linux says nothing to who finds the queue full, and tries again ever more seldom."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        callers = [socket.socket() for _ in range(4)]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        address = f"127.0.0.1:{full.getsockname()[1]}"
        with pytest.raises(CollectiveTimeoutError, match="calls are not answered"):
            start(1, 2, address, timeout=1.5).result()
        for caller in callers:
            caller.close()
