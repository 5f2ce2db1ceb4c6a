"""The acceptor: what an unauthenticated connection may cost, and which gives way first."""

from __future__ import annotations

import gc
import logging
import socket
import time
import tracemalloc

import pytest
from acceptor_step import Doorstep, acceptor_step, answer, hung_up

from phalanx.transport.tcp.admission import PLACES, TICKS
from phalanx.wire.handshake import LIMIT, DialerHandshake, Identity

KIB = 1024
HELLO = DialerHandshake(Identity("", 0, 1, 1000), b"", 0).start()

HALF_OPEN = {
    "says nothing": b"",
    "says half a hello": HELLO[:40],
    "says as much as it may": b"PHX?\x01" + LIMIT.to_bytes(2, "little") + bytes(LIMIT - 1),
    "says hello, and no more": HELLO,
    "says as much as it may after a hello": HELLO
    + b"PHX?\x03"
    + LIMIT.to_bytes(2, "little")
    + bytes(LIMIT - 1),
}


@pytest.mark.parametrize("words", HALF_OPEN.values(), ids=HALF_OPEN.keys())
def test_a_thousand_half_open_connections_cost_a_kibibyte_each(words: bytes) -> None:
    with acceptor_step(world_size=1000) as step:  # so large that nobody has to give way
        step.call(words)
        auth_state = 0 if not words else 2 if words.startswith(HELLO) else 1
        step.drive_until(lambda: [k.auth_state for k in step.acceptor.pending] == [auth_state])
        callers = [step.call(words) for _ in range(1000)]
        gc.collect()
        tracemalloc.start()
        try:
            step.drive_until(
                lambda: (
                    len(step.acceptor.pending) == 1001
                    and all(k.auth_state == auth_state for k in step.acceptor.pending)
                )
            )
            gc.collect()
            cost = tracemalloc.get_traced_memory()[0] / 1000
        finally:
            tracemalloc.stop()
        assert len(callers) == 1000
    print(f"\n{cost:.0f} bytes for each connection")
    assert cost < KIB


def test_an_unauthenticated_caller_is_dropped_however_much_it_sends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with acceptor_step() as step:
        slow, silent = step.call(HELLO[:1]), step.call()
        step.drive_until(lambda: len(step.acceptor.pending) == 2)
        said = 1
        seen: set[int] = set()

        def both_are_gone() -> bool:
            nonlocal said
            seen.update(step.acceptor.now - pending.born for pending in step.acceptor.pending)
            if step.acceptor.pending and step.acceptor.now >= said:  # a byte with every tick
                slow.sendall(HELLO[said : said + 1])
                said += 1
            return not step.acceptor.pending

        step.drive_until(both_are_gone)
        assert said > TICKS // 2
        assert max(seen) == TICKS - 1, "nobody was there for longer"
        assert hung_up(slow)
        assert hung_up(silent)
    assert "127.0.0.1: was silent for 2 s" in caplog.text
    assert "127.0.0.1: did not prove itself for 2 s" in caplog.text


def test_a_rank_that_was_away_does_not_count_it_against_who_waited() -> None:
    """Stopped, or with something that holds the interpreter, between any two steps."""
    away = 3 * 0.002 * TICKS
    with acceptor_step(tick=0.002) as step:
        sock, call_site = step.rank(1)
        step.drive_until(lambda: bool(step.acceptor.pending))
        time.sleep(away)
        step.drive_until(lambda: [k.auth_state for k in step.acceptor.pending] == [2])
        assert not answer(sock, call_site)
        time.sleep(away)
        step.drive_until(lambda: 1 in step.connected)
        assert answer(sock, call_site)


def silent_ones(step: Doorstep, count: int) -> list[socket.socket]:
    return [step.call() for _ in range(count)]


def test_the_oldest_silent_one_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    with acceptor_step(world_size=4) as step:
        assert step.acceptor.places == PLACES + 4
        speakers = [step.call(HELLO[:40])]
        first, *others = silent_ones(step, step.acceptor.places - 1)
        step.drive_until(lambda: len(step.acceptor.pending) == step.acceptor.places)
        assert not hung_up(first)
        sock, call_site = step.rank(1)
        step.drive_until(lambda: any(k.auth_state == 2 for k in step.acceptor.pending))
        assert hung_up(first)
        assert not any(map(hung_up, [*others, *speakers]))
        assert not answer(sock, call_site)
        step.drive_until(lambda: 1 in step.connected)
        assert answer(sock, call_site)
    assert "had to give way to other callers" in caplog.text


def test_who_has_said_the_least_gives_way_first() -> None:
    """A rank in the middle of its handshake outlives any number of those that never begin one."""
    with acceptor_step(world_size=4) as step:
        sock, call_site = step.rank(1)
        step.drive_until(lambda: [k.auth_state for k in step.acceptor.pending] == [2])
        crowd = [step.call(HELLO[:40]) for _ in range(2 * PLACES)]
        step.drive_until(
            lambda: len(step.acceptor.pending) == step.acceptor.places and hung_up(crowd[0])
        )
        silent_ones(step, PLACES)
        step.drive_until(lambda: sum(map(hung_up, crowd)) >= 2 * PLACES + 1 - step.acceptor.places)
        assert not answer(sock, call_site)
        step.drive_until(lambda: 1 in step.connected)
        assert answer(sock, call_site)


def test_a_rank_that_calls_first_and_is_heard_last_is_not_taken_for_silent() -> None:
    """All have called, and the rank has said hello, before the acceptor looks the first time."""
    with acceptor_step(world_size=4) as step:
        sock, call_site = step.rank(1)
        silent_ones(step, 3 * PLACES)
        step.drive_until(lambda: len(step.acceptor.pending) == step.acceptor.places)
        assert not answer(sock, call_site)
        step.drive_until(lambda: 1 in step.connected)
        assert answer(sock, call_site)


def test_an_acceptor_without_pending_connections_has_nothing_to_do() -> None:
    """No timer ticks when nobody stands there."""
    with acceptor_step() as step:
        sock = step.call(b"GET / HTTP/1.1\r\n\r\n")
        step.drive_until(lambda: hung_up(sock))
        ticks = step.acceptor.now
        step.drive_until(lambda: not step.acceptor._ticking)
        assert step.acceptor.now <= ticks + 1


def test_nobodys_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(*_: object) -> str:
        raise AssertionError("a name was looked up")

    for name in ("getaddrinfo", "gethostbyaddr", "getfqdn", "getnameinfo", "gethostbyname"):
        monkeypatch.setattr(socket, name, lookup)
    with acceptor_step(tick=0.002) as step:
        callers = [socket.socket() for _ in range(3)]
        for caller, words in zip(callers, (b"", HELLO[:9], b"GET /"), strict=True):
            caller.connect(step._address)
            caller.send(words)
        step.drive_until(lambda: len(step.acceptor.pending) == 2)
        step.drive_until(lambda: not step.acceptor.pending)
        for caller in callers:
            caller.close()


def test_what_is_refused_is_told_at_debug_level_only_if_it_said_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    with acceptor_step() as step:
        step.call().close()
        step.call(HELLO[:10]).close()
        sentinel = step.call(b"GET /")
        step.drive_until(lambda: hung_up(sentinel))
    (record,) = caplog.records
    assert "not Phalanx's handshake" in record.getMessage()
