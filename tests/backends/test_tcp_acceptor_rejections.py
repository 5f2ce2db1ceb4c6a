"""The acceptor: bad hellos of every kind are told so, and logged, and the job goes on forming."""

from __future__ import annotations

import logging
import re
import socket
from typing import Any

import pytest
from clusters import TOKEN
from test_tcp_rendezvous import (  # noqa: F401
    Start,
    _no_token_in_the_environment,
    place,
    start,
    works,
)

from phalanx import AuthenticationError, CollectiveTimeoutError, InvalidWorldSizeError
from phalanx.transport.tcp.admission import TOLD_IN_FULL
from phalanx.wire import handshake
from phalanx.wire.control import Address, encode
from phalanx.wire.frame import Channel, Kind, pack_header
from phalanx.wire.handshake import DialerHandshake, Identity, Refused


def pending(address: str, identity: Identity, **options: Any) -> str:
    """Call as somebody, and hang up; what this caller is told."""
    sock, told = stay(address, identity, **options)
    sock.close()
    return told


def stay(
    address: str,
    identity: Identity,
    *,
    token: str = TOKEN,
    target: int = 0,
    version: int = handshake.PROTOCOL_VERSION,
) -> tuple[socket.socket, str]:
    """Call as somebody; the connection, and what this caller is told."""
    host, _, port = address.rpartition(":")
    call_site = DialerHandshake(identity, token.encode(), target)
    sock = socket.create_connection((host, int(port)), timeout=20)
    words, begin = call_site.start(), handshake._HEAD.size
    words = words[:begin] + version.to_bytes(2, "little") + words[begin + 2 :]
    try:
        while not call_site.complete:
            sock.sendall(words)
            words = call_site.receive(sock.recv(4096))
    except Refused as refused:
        if call_site.farewell:
            sock.sendall(call_site.farewell)
        return sock, refused.reason
    return sock, "welcome"


RIGHT = Identity("", 0, 1, 3)

# The six kinds of the issue, and what else a hello can have wrong: caller, what it is told.
BAD = {
    "rank": (RIGHT._replace(rank=7), "says that it is rank 7 of 3"),
    "rank 0's own": (RIGHT._replace(rank=0), "says that it is rank 0 of 3, to rank 0"),
    "world size": (RIGHT._replace(world_size=4), "has world size 4, this rank 3"),
    "duplicate": (RIGHT._replace(rank=2), "rank 2 is, or was, connected already"),
    "job": (RIGHT._replace(job="another"), "is of another job"),
    "generation": (RIGHT._replace(generation=1), "is of generation 1, this rank 0"),
    "version": (RIGHT, f"speaks protocol version 9, this rank {handshake.PROTOCOL_VERSION}"),
    "token": (RIGHT, "do not hold the same token"),
    "target": (RIGHT, "reached rank 0 where rank 1 should be"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "version": {"version": 9},
    "token": {"token": "another token of some length"},
    "target": {"target": 1},
}


def test_every_bad_hello_is_told_what_is_wrong_with_it_and_so_is_the_log(
    start: Start,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener, address = place()
    zero = start(0, 3, address, listener=listener)
    first_copy, told = stay(address, RIGHT._replace(rank=2))
    assert told == "welcome"
    done = 0
    for kind, (identity, words) in BAD.items():
        told = pending(address, identity, **OPTIONS.get(kind, {}))
        assert words in told, kind
        done += 1
    first_copy.close()
    works(zero, start(1, 3, address), start(2, 3, address))
    lines = [r.getMessage() for r in caplog.records if "turned away" in r.getMessage()]
    for kind, (identity, words) in BAD.items():
        # In a hello of another version nobody knows where the rank is.
        who = "127.0.0.1:" if kind == "version" else f"127.0.0.1, as rank {identity.rank}:"
        assert any(words in line and who in line for line in lines), kind
    print(f"\nbad hellos turned away, told why, and logged: {done} of {len(BAD)}")


RANKS = {
    "world size": ({"size": 4}, "has world size 4, this rank 2"),
    "job": ({"job": "another"}, "is of another job"),
    "generation": ({"generation": 1}, "is of generation 1, this rank 0"),
    "token": ({"token": "another token of some length"}, "do not hold the same token"),
}


def test_a_rank_that_is_turned_away_raises_at_once_and_says_why(
    start: Start,  # noqa: F811
) -> None:
    listener, address = place()
    zero = start(0, 2, address, listener=listener)
    for kind, (options, words) in RANKS.items():
        size = int(options.get("size", 2))  # type: ignore[call-overload]
        rest = {name: value for name, value in options.items() if name != "size"}
        error = InvalidWorldSizeError if kind == "world size" else AuthenticationError
        with pytest.raises(error, match=words) as info:
            start(1, size, address, **rest).result()
        assert (info.value.rank, info.value.peer, info.value.op) == (1, 0, "rendezvous"), kind
    works(zero, start(1, 2, address))


def test_a_late_rank_of_an_earlier_generation_is_turned_away(start: Start) -> None:  # noqa: F811
    listener, address = place()
    zero = start(0, 2, address, listener=listener, generation=3)
    with pytest.raises(AuthenticationError, match="is of generation 2, this rank 3"):
        start(1, 2, address, generation=2).result()
    works(zero, start(1, 2, address, generation=3))


def test_a_timeout_quotes_the_rank_that_was_turned_away_and_not_only_the_noise(
    start: Start,  # noqa: F811
) -> None:
    listener, address = place()
    zero = start(0, 3, address, listener=listener, timeout=2)
    assert "world size 4" in pending(address, RIGHT._replace(world_size=4))
    callers = []
    for _ in range(20):
        callers.append(socket.create_connection(listener.getsockname(), timeout=20))
        callers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(CollectiveTimeoutError, match="ranks 1, 2 of 3 did not come") as info:
        zero.result()
    for call_site in callers:
        call_site.close()
    assert "last turned away: 127.0.0.1: what came is not Phalanx's handshake" in str(info.value)
    assert "before that 127.0.0.1, as rank 1: the caller has world size 4" in str(info.value)


def test_a_scanner_cannot_fill_the_log_nor_hide_a_rank_in_it(
    start: Start,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener, address = place()
    zero = start(0, 2, address, listener=listener)
    for _ in range(300):
        with socket.create_connection(listener.getsockname(), timeout=20) as caller:
            caller.sendall(b"GET / HTTP/1.1\r\n\r\n")
    # It was accepted after all of them, so they have been counted when it is answered.
    assert "same token" in pending(
        address, Identity("", 0, 1, 2), token="another token of some length"
    )
    works(zero, start(1, 2, address))
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    full = [line for line in lines if line.startswith("rank 0 turned away 127.0.0.1: what")]
    assert len(full) == TOLD_IN_FULL
    assert sum("turned away 100 unauthenticated callers so far" in line for line in lines) == 1
    assert sum("as rank 1: the two do not hold the same token" in line for line in lines) == 1
    total = [
        re.search(r"turned away (\d+) unauthenticated callers and 1 that", line) for line in lines
    ]
    assert [int(match[1]) for match in total if match] == [300]
    assert len(lines) == TOLD_IN_FULL + 3


def test_no_log_line_and_no_error_has_the_token_in_it(
    start: Start,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whichever way an epoch fails, and whatever the level of the log."""
    caplog.set_level(logging.DEBUG)
    mine, other = "mine-" + "0123456789abcdef" * 2, "other-" + "fedcba9876543210" * 2
    told: list[object] = []
    listener, address = place()
    zero = start(0, 3, address, listener=listener, token=mine, timeout=1)
    for options in (
        {"token": other},
        {"token": mine, "job": "another"},
        {"token": mine, "generation": 4},
        {"token": ""},
    ):
        late = start(1, 3, address, **options)
        told.append(late.exception())
    gone = start(1, 3, "127.0.0.1:9", token=mine, timeout=0.2)
    told += [gone.exception(), zero.exception()]
    assert all(isinstance(error, (AuthenticationError, CollectiveTimeoutError)) for error in told)
    text = caplog.text + "".join(f"{error!r} {error} {vars(error)}" for error in told)  # type: ignore[arg-type]
    assert "turned away" in text
    for secret in (mine, other, mine[5:], other[6:], mine.encode().hex(), other.encode().hex()):
        assert secret not in text


LIES = {
    "a name": Address("rank1.example.org", 29500, "host"),
    "no port": Address("127.0.0.1", 0, "host"),
    "no port of this world": Address("127.0.0.1", 65536, "host"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_where_a_rank_listens_is_a_number_or_nothing(
    start: Start,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    lie: Address,
) -> None:
    """It has the token, and is not believed all the same: nobody looks names up for others."""
    listener, address = place()
    zero = start(0, 3, address, listener=listener)
    sock, told = stay(address, RIGHT)
    assert told == "welcome"
    payload = encode(lie)
    size = len(payload)
    sock.sendall(pack_header(Channel(0, Kind.ADDRESS, 0), length=size, total=size) + payload)
    assert sock.recv(1) == b""
    sock.close()
    works(zero, start(1, 3, address), start(2, 3, address))
    assert "rank 0: rank 1 came and was lost: rank 1 listens at" in caplog.text


def test_a_rank_that_came_and_went_is_told_apart_from_one_that_never_came(
    start: Start,  # noqa: F811
) -> None:
    listener, address = place()
    zero = start(0, 3, address, listener=listener, timeout=1)
    assert pending(address, RIGHT._replace(rank=2)) == "welcome"
    with pytest.raises(CollectiveTimeoutError, match="ranks 1, 2 of 3 did not come") as info:
        zero.result()
    assert "; rank 2 came and was lost: its connection ended" in str(info.value)
    assert "rank 1 came" not in str(info.value)
