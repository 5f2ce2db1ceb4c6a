"""How much of a link ranks use: the shares, what is complained of, and the bare exchange."""

from __future__ import annotations

import io
import socket
import sys
import threading
from pathlib import Path

import pytest
from clusters import Tcp
from networks import why_not
from rich.console import Console

from phalanx import Backend

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import links
from linked_hosts import NoLinkError, bucket
from links import BARE, GLOO, OURS, Bare, Figure, Link, both_ways

from phalanx.ops.bench.operations import OPERATIONS
from phalanx.ops.bench.peers import RankContext
from phalanx.ops.bench.rank import time_rounds
from phalanx.ops.bench.request import Entry, ResultLine

MIB = 1 << 20


def figure(ours: float, gloo: float, bare: float, *, size: int = 4 * MIB, wrong: int = 0) -> Figure:
    seconds = {OURS: ours, GLOO: gloo, BARE: bare}
    return Figure("all_reduce", size, seconds, seconds, wrong)


@pytest.mark.parametrize(
    ("text", "link", "shown"),
    [
        ("100M", Link(100), "100 Mbit/s"),
        ("10G", Link(10_000), "10 Gbit/s"),
        ("1G+10ms", Link(1000, 10), "1 Gbit/s, 10 ms"),
        ("any", Link(None), "any rate"),
        ("any+5ms", Link(None, 5), "any rate, 5 ms"),
    ],
)
def test_a_link_is_a_rate_and_perhaps_a_delay(text: str, link: Link, shown: str):
    assert (Link.parse(text), str(link)) == (link, shown)


@pytest.mark.parametrize("text", ["", "1", "G", "1T", "1G+10", "fast"])
def test_what_is_no_link_is_refused(text: str):
    with pytest.raises(ValueError, match="is no rate such as"):
        Link.parse(text)


def test_a_full_packet_leaves_its_headers_share_of_the_rate():
    assert Link(1514 * 8 / 1e6).goodput == pytest.approx(1448)
    assert Link(1500 * 8 / 1e6, 10).goodput == pytest.approx(1448)  # a tunnel has no Ethernet
    assert Link(None).goodput is None


def test_shares_are_of_the_bytes_that_go_each_way():
    link = Link(1000)
    assert link.goodput is not None
    least = 4 * MIB / link.goodput
    one = figure(2 * least, 3 * least, 1.5 * least)
    assert one.times_gloo == pytest.approx(1.5)
    assert one.of_bare == pytest.approx(0.75)
    assert one.of_rate(link) == pytest.approx(0.5)
    assert one.of_rate(Link(None)) is None


def test_what_is_wrong_and_what_is_missed_is_complained_of():
    link, free = Link(1000), Link(None)
    small = figure(1.0, 1.0, 0.1, size=MIB)  # the latency's, not the link's
    assert list(links.complaints({link: [figure(1.0, 0.96, 0.96), small]})) == []
    assert list(links.complaints({free: [figure(1.0, 1.0, 0.5)]})) == []  # the processors'
    assert list(links.complaints({link: [figure(1.0, 0.94, 0.94, wrong=3)]})) == [
        "WRONG: 1 Gbit/s: all_reduce of 4M: 3 elements",
        "MISSED: 1 Gbit/s: all_reduce of 4M: 94.0% of the bare stream",
        "MISSED: 1 Gbit/s: all_reduce of 4M: Gloo takes 0.94 of its time",
    ]


def test_a_table_has_a_row_for_each_size_and_a_column_for_each_link():
    found = {Link(1000): [figure(0.04, 0.08, 0.03)], Link(None, 10): [figure(2.0, 1.0, 1.5)]}
    shown = io.StringIO()
    console = Console(width=120, file=shown)
    for title, table in links.tables(found):
        console.print(title, table, sep="\n")
    lines = [line.split("|")[2:-1] for line in shown.getvalue().splitlines() if "4M" in line]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["4M", "2.00 (40)", "0.50 (2,000)"],
        ["4M", "75%, 88%", "75%, -"],
        ["4M", "40, 80, 30", "2,000, 1,000, 1,500"],
    ]


def test_figures_are_medians_and_the_processors_mean():
    def line(peer: str, *seconds: float) -> ResultLine:
        entry = Entry(peer)
        return ResultLine(
            operation="all_reduce", ranks=2, bytes=8, entry=entry, calls=1, seconds=[*seconds],
            bus=1.0, wrong=1,
        )  # fmt: skip

    lines = [line(OURS, 1, 9, 2), line(GLOO, 4), line(BARE, 3)]
    spent = {(name, "all_reduce", 8): [1.0, 2.0] for name in (OURS, GLOO, BARE)}
    (one,) = links.figures(lines, spent)
    assert one.seconds == {OURS: 2, GLOO: 4, BARE: 3}
    assert one.busy == dict.fromkeys((OURS, GLOO, BARE), 1.5)
    assert one.wrong == 3


def test_a_large_packet_fits_the_bucket_of_a_fast_link():
    assert [bucket(rate) for rate in (100, 1000, 10_000)] == ["16kb", "128kb", "500kb"]


def test_a_bare_exchange_goes_both_ways_at_once():
    """More than the sockets hold, so neither could first send all."""
    data = [bytes([number]) * (8 * MIB) for number in (1, 2)]
    ends = socket.socketpair()
    into = [bytearray(8 * MIB) for _ in ends]
    other = threading.Thread(
        target=both_ways, args=(ends[1], memoryview(data[1]), memoryview(into[1]))
    )
    other.start()
    both_ways(ends[0], memoryview(data[0]), memoryview(into[0]))
    other.join()
    for end in ends:
        end.close()
    assert into == [data[1], data[0]]


def test_what_a_bare_exchange_brings_is_checked():
    def rank(backend: Backend) -> list[int]:
        context = RankContext(backend, "127.0.0.1", 20.0)
        peer = Bare(context)
        right = peer.prepare(OPERATIONS["all_reduce"], 4096)
        wrong = peer.prepare(OPERATIONS["all_reduce"], 4096)
        wrong.call = lambda: None
        calls = {"right": right, "wrong": wrong}
        assert time_rounds(calls, context, rounds=1, seconds=1e-6) == {}
        peer.close()
        return [right.wrong, wrong.wrong]

    for right, wrong in Tcp().run(rank, 2):
        assert right == 0 < wrong


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "networks are allowed")
def test_ranks_are_measured_on_a_link_with_a_delay() -> None:
    try:
        found = links.measure("1G+1ms", ["--sizes", "8", "--rounds", "1"])
    except NoLinkError as error:
        pytest.skip(f"no hosts can be joined here: {error}")
    assert [one.operation for one in found] == ["all_reduce", "stream"]
    assert [(one.bytes, one.wrong) for one in found] == [(8, 0)] * 2
    assert min(found[0].seconds.values()) > 1e-3  # no all_reduce is over before a packet arrives
