"""TCP: who is turned away while the ranks meet; the job goes on forming all the same."""

from __future__ import annotations

import logging
import socket
import struct
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress

import pytest
from clusters import TOKEN
from test_tcp_rendezvous import (  # noqa: F401
    Start,
    _no_token_in_the_environment,
    place,
    start,
    works,
)

from phalanx import (
    AuthenticationError,
    CollectiveTimeoutError,
    DistributedError,
    InvalidWorldSizeError,
)
from phalanx.wire.handshake import DialerHandshake, Identity


def hello(rank: int = 1, size: int = 2) -> bytes:
    """What a caller says first; it needs no token."""
    return DialerHandshake(Identity("", 0, rank, size), b"", 0).start()


def call(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def reset(sock: socket.socket) -> None:
    """Close so that the other side gets a reset, not an end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_a_wrong_token_is_refused_and_the_right_one_still_gets_in(
    start: Start,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener, address = place()
    zero = start(0, 3, address, listener=listener)
    two = start(2, 3, address)
    with pytest.raises(AuthenticationError, match="same token") as info:
        start(1, 3, address, token="another token of some length").result()
    assert (info.value.rank, info.value.peer) == (1, 0)
    assert isinstance(info.value, PermissionError)
    assert TOKEN not in str(info.value)
    works(zero, start(1, 3, address), two)
    assert "turned away" in caplog.text
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(
    ("options", "size", "kind", "words"),
    [
        ({"job": "other"}, 2, AuthenticationError, "another job"),
        ({"generation": 1}, 2, AuthenticationError, "is of generation 1, this rank 0"),
        ({}, 3, InvalidWorldSizeError, "has world size 3, this rank 2; start every rank with the"),
    ],
)
def test_a_rank_of_another_job_is_told_so_and_the_right_one_still_gets_in(
    start: Start,  # noqa: F811
    options: dict[str, object],
    size: int,
    kind: type[Exception],
    words: str,
) -> None:
    listener, address = place()
    zero = start(0, 2, address, listener=listener)
    with pytest.raises(kind, match=words):
        start(1, size, address, **options).result()
    works(zero, start(1, 2, address))


def test_a_second_copy_of_a_rank_is_told_so_and_the_first_one_stays(start: Start) -> None:  # noqa: F811
    listener, address = place()
    zero = start(0, 3, address, listener=listener)
    copies = [start(1, 3, address), start(1, 3, address)]
    (refused,) = wait(copies, return_when=FIRST_COMPLETED).done
    first = copies[1 - copies.index(refused)]
    with pytest.raises(AuthenticationError, match="second copy"):
        refused.result()
    works(zero, first, start(2, 3, address))


NOT_OURS = {
    "a browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a port scanner": b"",
    "half a greeting": hello()[:20],
    "a rank that says no more": hello(),
    "a greeting that never ends": b"PHX?\x01\x00\x02" + bytes(100),
    "a flood": bytes(1 << 20),
    "a proof without a greeting": b"PHX?\x03\x20\x00" + bytes(32),
    "a refusal": b"PHX?\x05\x03\x00no!",
    "a rank that does not exist": hello(rank=77),
    "two greetings": hello() + hello(),
}


@pytest.mark.checkered
@pytest.mark.parametrize("end", ["stays", "hangs up", "resets"])
@pytest.mark.parametrize("words", NOT_OURS.values(), ids=NOT_OURS.keys())
def test_callers_do_not_keep_a_job_from_forming(
    start: Start,  # noqa: F811
    words: bytes,
    end: str,
) -> None:
    """They are all at the acceptor before rank 0 opens it: what they say and do comes at once."""
    listener, address = place()
    callers = [call(address) for _ in range(3)]
    for caller in callers:
        caller.setblocking(False)
        caller.send(words)
        if end == "hangs up":
            caller.close()
        elif end == "resets":
            reset(caller)
    zero = start(0, 2, address, listener=listener)
    works(zero, start(1, 2, address))
    for caller in callers:
        caller.close()


def test_a_timeout_quotes_the_last_one_that_was_turned_away(
    start: Start,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener, address = place()
    with call(address) as browser:
        browser.sendall(NOT_OURS["a browser"])
        zero = start(0, 2, address, listener=listener, timeout=1)
        with pytest.raises(CollectiveTimeoutError, match="rank 1 of 2 did not come") as info:
            zero.result()
    assert "last turned away: 127.0.0.1: what came is not Phalanx's handshake" in str(info.value)
    (record,) = [r for r in caplog.records if "turned away" in r.getMessage()]
    assert (record.name, record.levelno) == ("phalanx", logging.WARNING)


def test_an_impostor_of_rank_0_is_not_trusted(start: Start) -> None:  # noqa: F811
    """It answers anything; the caller must neither join it, nor crash, nor wait for ever."""
    for words in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", bytes(1 << 16), hello(rank=0)):
        with socket.create_server(("127.0.0.1", 0)) as impostor:
            address = f"127.0.0.1:{impostor.getsockname()[1]}"
            one = start(1, 2, address, timeout=0.5)
            call_site, _ = impostor.accept()
            with call_site:
                with suppress(ConnectionError):
                    call_site.sendall(words)
                with pytest.raises(DistributedError, match="rank 1: rendezvous"):
                    one.result()


def test_when_the_group_has_formed_nobody_listens_any_more(start: Start) -> None:  # noqa: F811
    listener, address = place()
    zero = start(0, 3, address, listener=listener)
    with call(address) as early:
        early.sendall(hello()[:20])
        one, two = start(1, 3, address), start(2, 3, address)
        works(zero, one, two)
        early.settimeout(20)
        with suppress(ConnectionError):
            assert early.recv(1) == b"", "whoever stood at the acceptor is sent away"
    for _ in range(20):
        with pytest.raises(ConnectionRefusedError):
            call(address)
    works(zero, one, two)


def test_a_second_copy_of_a_rank_of_a_formed_group_is_not_let_in(start: Start) -> None:  # noqa: F811
    listener, address = place()
    zero = start(0, 2, address, listener=listener)
    one = start(1, 2, address)
    works(zero, one)
    with pytest.raises(CollectiveTimeoutError, match="formed without this rank") as info:
        start(1, 2, address, timeout=0.3).result()
    assert (info.value.rank, info.value.peer) == (1, 0)
    works(zero, one)


def test_the_same_place_serves_the_next_group(start: Start) -> None:  # noqa: F811
    """Of a script that makes two groups, or one that is started again at once."""
    listener, address = place()
    first = [start(0, 2, address, listener=listener), start(1, 2, address)]
    works(*first)
    second = [start(1, 2, address), start(0, 2, address)]
    works(*second)
    works(*first)
