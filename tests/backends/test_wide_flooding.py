"""Flooding: over which graph word goes; that it reaches everyone, around ranks that are gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from math import inf, log2

import pytest
from acceptor_step import lonely_transport
from framing import framed
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.group import Group
from phalanx.transport.tcp.flooding import neighbours
from phalanx.transport.tcp.transport import TcpTransport
from phalanx.wire.control import (
    Address,
    CompactTable,
    FailureNotice,
    GroupFailed,
    GroupLeft,
    News,
    RankLeft,
    RankLost,
    decode,
    encode,
)
from phalanx.wire.frame import HEADER_SIZE, Channel, FrameError, Kind, unpack_header

PICTURE = """\
17 ranks    0: 1 4 13 16
64 ranks    0: 1 4 16 48 60 63
256 ranks   0: 1 4 16 64 192 240 252 255
"""


def hops(size: int, gone: AbstractSet[int] = frozenset(), start: int = 0) -> dict[int, int]:
    """Of every rank that word from `start` reaches, over how many links."""
    found = {start: 0}
    for rank in (queue := [start]):  # grows while it is walked
        for peer in neighbours(rank, size):
            if peer not in found and peer not in gone:
                found[peer] = found[rank] + 1
                queue.append(peer)
    return found


def test_the_graph_is_as_drawn() -> None:
    drawn = "".join(
        f"{f'{size} ranks':12}0: {' '.join(map(str, neighbours(0, size)))}\n"
        for size in (17, 64, 256)
    )
    assert drawn == PICTURE


@given(st.integers(17, 2000), st.data())
def test_neighbours_are_few_and_mutual_and_few_hops_from_everyone(
    size: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    mine = neighbours(rank, size)
    assert len(mine) <= 1 + log2(size)
    assert rank not in mine
    assert all(rank in neighbours(peer, size) for peer in mine)
    reached = hops(size)
    assert len(reached) == size
    assert max(reached.values()) <= 1 + log2(size)


@given(st.integers(17, 300), st.data())
def test_word_reaches_all_that_are_left_when_fewer_die_than_a_rank_has_neighbours(
    size: int, data: st.DataObject
) -> None:
    most = len(neighbours(0, size)) - 1
    gone = data.draw(st.sets(st.integers(1, size - 1), max_size=most))
    near = data.draw(st.sets(st.sampled_from(neighbours(0, size)), max_size=most - len(gone)))
    assert len(hops(size, gone | near)) == size - len(gone | near)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 65535), st.integers(-1, 99))))
def test_a_compact_table_holds_the_same_addresses(entries: list[tuple[str, int, int]]) -> None:
    table = [
        Address(f"192.0.2.{host}", port, f"host {host}", 7, memory, memory + 1)
        for host, port, memory in entries
    ]
    assert decode(encode(CompactTable.of(table)), CompactTable).addresses() == table


def test_a_table_of_a_thousand_ranks_takes_some_ten_bytes_a_rank() -> None:
    table = [Address("192.0.2.1", 20000 + rank, "a host" * 20, 4321) for rank in range(1000)]
    assert len(encode(CompactTable.of(table))) < 12_000


# What a rank makes of it --------------------------------------------------------------------


@pytest.fixture
def transport() -> Iterator[TcpTransport]:
    made = lonely_transport(2, 17)
    address = Address("127.0.0.1", 1, "this host")
    made.mesh.addresses.update(dict.fromkeys(range(17), address))
    yield made
    with made.engine.lock:
        made.shut()


def test_word_about_ranks_is_taken_once_and_the_first_counts(transport: TcpTransport) -> None:
    wide, engine = transport.wide, transport.engine
    assert wide is not None
    with engine.lock:
        wide.came(encode(News([RankLeft(5), RankLost(6, "rank 6 was lost: its host burns")])))
        wide.came(encode(News([RankLost(5, "no"), RankLeft(6), RankLost(6, "no")])))
        assert engine.left == {5}
        assert engine.lost.keys() == {6}
        assert engine.lost[6].reason == "rank 6 was lost: its host burns"
        wide.came(encode(News([RankLeft(2), RankLost(2, "this rank itself")])))
        assert engine.left == {5}
        assert engine.lost.keys() == {6}


def test_word_about_a_rank_to_which_there_is_a_connection_is_left_to_that(
    transport: TcpTransport,
) -> None:
    """It says so itself, behind its last message."""
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    assert transport.wide is not None
    with transport.engine.lock, theirs:
        transport.mesh.link_opened(9, mine, b"")
        transport.wide.came(encode(News([RankLeft(9), RankLost(9, "no"), GroupLeft(9, 77)])))
        assert not transport.engine.left
        assert not transport.engine.lost
        theirs.sendall(framed(Channel(0, Kind.LEAVE, 0), b""))
        transport.drive(lambda: 9 in transport.engine.left, inf)


def test_a_member_whose_connection_opens_when_this_rank_has_closed_the_group_is_told_so(
    transport: TcpTransport,
) -> None:
    """It does not take the word from others while it calls."""
    group = Group(transport.engine, 77, (2, 9))
    assert transport.wide is not None
    for peer, due in ((9, framed(Channel(77, Kind.LEAVE_GROUP, 0), b"")), (10, b"")):
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        with transport.engine.lock, theirs:
            group.close()
            transport.wide.tell_members(group, None)
            transport.mesh.link_opened(peer, mine, b"")
            transport.mesh.connections[peer].send_control(Kind.HEARTBEAT)
            assert theirs.recv(1 << 16) == due + framed(Channel(0, Kind.HEARTBEAT, 0), b"")


def test_a_neighbour_whose_connection_opens_late_hears_what_came_before(
    transport: TcpTransport,
) -> None:
    words = [RankLeft(5), failure(6, 7)]
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    assert transport.wide is not None
    with transport.engine.lock, theirs:
        transport.wide.came(encode(News(words)))
        transport.mesh.link_opened(3, mine, b"")
        sent = theirs.recv(1 << 16)
    heard: list[object] = []
    while sent:
        header = unpack_header(sent)
        assert header.channel.kind is Kind.NEWS
        heard += decode(sent[HEADER_SIZE : HEADER_SIZE + header.length], News).words
        sent = sent[HEADER_SIZE + header.length :]
    assert heard == words


def test_nothing_is_sent_to_a_rank_that_is_known_to_be_gone(transport: TcpTransport) -> None:
    assert transport.wide is not None
    with transport.engine.lock:
        assert transport.wide.call(7) is not None
        transport.wide.came(encode(News([RankLost(7, "rank 7 was lost: it died")])))
        assert not transport.wide.calls
        assert transport.wide.call(7) is None


def failure(culprit: int, reporter: int) -> GroupFailed:
    return GroupFailed(9, FailureNotice("PeerLostError", culprit, reporter, "why"))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        encode([[[1, 17]]]),
        encode(News([RankLeft(17)])),
        encode(News([RankLost(-1, "")])),
        encode(News([failure(17, 0)])),
        encode(News([failure(0, -1)])),
    ],
)
def test_news_that_make_no_sense_are_refused(transport: TcpTransport, payload: bytes) -> None:
    assert transport.wide is not None
    with transport.engine.lock, pytest.raises(FrameError):
        transport.wide.came(payload)
    assert not transport.engine.left
    assert not transport.engine.lost
