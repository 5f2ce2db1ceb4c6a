"""How much of a link ranks use, beside Gloo: `python benchmarks/links.py --help`. Needs root.

Two hosts are network namespaces with one rank each, and what each host sends is held to a rate by a
token bucket, and delayed where a delay is asked for. Over each link, in interleaved rounds of the
same processes, every result checked: all_reduce in place, and messages one way (`stream`), by
Phalanx over TCP, by Gloo, and by bare sockets, which send as many bytes each way as the all_reduce
does, both ways at once, and reduce nothing. Gloo and the sockets have no TLS: with PHALANX_TLS=off
Phalanx has none, either. Times are medians, of the slowest rank. With more ranks
on each host it is all_reduce alone, of Phalanx's hybrid backend and Gloo.

Of an all_reduce of n bytes, n leave each of two hosts: 2(h-1)/h n, whatever their number of ranks.
`of the bare stream` is the bare sockets' time over Phalanx's. `of the rate` is n bytes over
Phalanx's time, over what is left of the rate after headers, as the bucket counts them; small
messages pass a token bucket that is full at once, so that share can exceed 1. The time of
processors is that of all threads of a rank, in a call.

The exit status is 1 if a result is wrong, if Gloo takes less than 95 % of Phalanx's time, or if,
where a rate is held to and from 4 MiB on, the share of the bare stream is below 95 %.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import socket
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import process_time
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from linked_hosts import LinkedHosts, NoLinkError
from rich import box
from rich.console import Console
from rich.table import Table

from phalanx.launch.reaper import die_with_parent
from phalanx.ops.bench.operations import OPERATIONS, BenchOperation, PreparedCall
from phalanx.ops.bench.peers import PEERS, Peer, PeerRow, RankContext, Socket
from phalanx.ops.bench.rank import run_rank
from phalanx.ops.bench.request import LeftOut, Message, ResultLine, make_request, show_size
from phalanx.wire.memory import tensor_bytes

OURS, GLOO, BARE = "phalanx", "gloo", "bare"
DUE, LARGE = 0.95, 4 << 20

# What is left to the payload of a full packet of 1,500 bytes (headers of IPv4 and TCP, with time
# stamps, are 52), as a token bucket counts it: with Ethernet's header, or without on a tunnel.
PAYLOAD = 1448
ON_ETHERNET, IN_A_TUNNEL = PAYLOAD / 1514, PAYLOAD / 1500


class Link(NamedTuple):
    """What joins the hosts: megabits a second, or None; and the milliseconds that it delays."""

    megabits: float | None
    delay: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Link:
        """`"1G"`, `"100M+10ms"`, `"any"`; raises ValueError for anything else."""
        match = re.fullmatch(r"(?:(\d+)([MG])|any)(?:\+(\d+)ms)?", text)
        if match is None:
            raise ValueError(f"{text!r} is no rate such as 100M, 10G, any, or 1G+10ms")
        number, unit, delay = match.groups()
        megabits = int(number) * {"M": 1.0, "G": 1e3}[unit] if number else None
        return cls(megabits, float(delay or 0))

    def __str__(self) -> str:
        bits, rate = self.megabits, "any rate"
        if bits is not None:
            rate = f"{bits / 1e3:g} Gbit/s" if bits >= 1e3 else f"{bits:g} Mbit/s"
        return rate + (f", {self.delay:g} ms" if self.delay else "")

    @property
    def goodput(self) -> float | None:
        """Bytes of payload that it carries each way in a second."""
        share = IN_A_TUNNEL if self.delay else ON_ETHERNET
        return self.megabits * 1e6 / 8 * share if self.megabits else None


class Figure(msgspec.Struct, frozen=True):
    """One operation on messages of one size, over one link, by all; of each by its name.

    seconds   of a call, the slowest rank's median
    busy      processor seconds of a call on rank 0
    wrong     elements of results, by all
    """

    operation: str
    bytes: int
    seconds: dict[str, float]
    busy: dict[str, float]
    wrong: int

    @property
    def times_gloo(self) -> float:
        """Gloo's time over Phalanx's."""
        return self.seconds[GLOO] / self.seconds[OURS]

    @property
    def of_bare(self) -> float | None:
        """The share of the bare stream's rate, if that was measured."""
        return self.seconds[BARE] / self.seconds[OURS] if BARE in self.seconds else None

    def of_rate(self, link: Link) -> float | None:
        """The share of the link's rate, if it is held to one."""
        if link.goodput is None:
            return None
        return self.bytes / self.seconds[OURS] / link.goodput


# ------------------------------------------------------------------------------
# A rank's part.


class Bare(Socket):
    """Blocking sockets: a `stream` one way; beside an all_reduce, as many bytes both ways at once.

    What each of two ranks gives and gets is then an all_gather of twice the bytes.
    """

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        if self.size != 2:
            raise ValueError(f"{self.size} ranks: bare sockets join two")
        self.beside = MappingProxyType({})
        self.does = {**self.does, "all_gather": self._exchange}

    def prepare(
        self, operation: BenchOperation, count: int, kind: str = "ordinary", algorithm: str = "auto"
    ) -> PreparedCall:
        """A call that moves what the operation has to move."""
        if operation.name == "all_reduce":
            operation, count = OPERATIONS["all_gather"], 2 * count
        return super().prepare(operation, count, kind, algorithm)

    def _exchange(self, call: PreparedCall) -> Callable[[], object]:
        parts = call.out.view(2, -1)
        own, theirs = parts[self.rank], parts[1 - self.rank]
        call.store = partial(own.copy_, call.source)
        return partial(both_ways, self._socket, tensor_bytes(call.source), tensor_bytes(theirs))


def both_ways(sock: socket.socket, out: memoryview, into: memoryview) -> None:
    """Send all of `out` and fill `into`, each as soon as the socket takes or has anything."""
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLOUT)
    while len(out) or len(into):
        wanted = (select.POLLIN if len(into) else 0) | (select.POLLOUT if len(out) else 0)
        poll.modify(sock, wanted)
        ((_, ready),) = poll.poll()
        if ready & select.POLLOUT:
            out = out[sock.send(out, socket.MSG_DONTWAIT) :]
        if ready & ~select.POLLOUT:
            count = sock.recv_into(into, 0, socket.MSG_DONTWAIT)
            if not count:
                raise ConnectionError("the other rank has closed the bare socket")
            into = into[count:]


Spent = dict[tuple[str, str, int], list[float]]
"""Processor seconds of each call: of whom, of which operation, of how many bytes."""


def counted(name: str, row: PeerRow, spent: Spent) -> PeerRow:
    """The same peer, but the processor's time of its calls is kept."""

    def make(context: RankContext) -> Peer:
        peer = row.make(context)
        prepare = peer.prepare

        def prepare_counted(
            operation: BenchOperation, count: int, kind: str = "ordinary", algorithm: str = "auto"
        ) -> PreparedCall:
            call = prepare(operation, count, kind, algorithm)
            once, kept = call.call, spent[name, operation.name, count]

            def timed() -> object:
                before = process_time()
                result = once()
                kept.append(process_time() - before)
                return result

            call.call = timed
            return call

        peer.prepare = prepare_counted  # type: ignore[method-assign]
        return peer

    return row._replace(make=make)


def work(asked: argparse.Namespace) -> None:
    """One rank's part. Rank 0 writes what it has found."""
    die_with_parent(os.getppid())
    lines: list[ResultLine] = []
    left_out: list[str] = []
    spent: Spent = defaultdict(list)
    rows = {OURS: PEERS["tcp"], GLOO: PEERS["gloo"], BARE: PeerRow(Bare)}
    operations = ["all_reduce", "stream"]
    if asked.ranks > 1:
        rows = {OURS: PEERS["hybrid"], GLOO: PEERS["gloo"]}
        del operations[1:]
    peers = {name: counted(name, row, spent) for name, row in rows.items()}
    request = make_request(
        operations,
        backends=",".join(peers),
        sizes=asked.sizes,
        rounds=asked.rounds,
        memory="ordinary",
        machine=False,
        peers=peers,
    )
    with Console(stderr=True).status("") as status:

        def hear(message: Message) -> None:
            if isinstance(message, ResultLine):
                lines.append(message)
            elif isinstance(message, LeftOut):
                left_out.append(f"{message.peer} {message.operation}: {message.reason}")
            elif isinstance(message, str):
                status.update(f"{asked.link}: {message}")

        run_rank(request, peers, hear)
    if left_out:
        raise SystemExit("\n".join(left_out))
    if lines:
        asked.work.write_bytes(msgspec.json.encode(list(figures(lines, spent))))


def figures(lines: Sequence[ResultLine], spent: Spent) -> Iterator[Figure]:
    """What the ranks have found, by operation and size."""
    by_place: dict[tuple[str, int], list[ResultLine]] = defaultdict(list)
    for line in lines:
        by_place[line.operation, line.bytes].append(line)
    for (operation, count), found in by_place.items():
        yield Figure(
            operation,
            count,
            {line.entry.peer: line.median for line in found},
            {line.entry.peer: mean(spent[line.entry.peer, operation, count]) for line in found},
            sum(line.wrong or 0 for line in found),
        )


def mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


# ------------------------------------------------------------------------------
# The links, one after the other, and what is shown of them.


def measure(
    text: str, arguments: Sequence[str], *, control: str = "", ranks: int = 1
) -> list[Figure]:
    """What ranks with these arguments of a command line find on hosts joined by one link."""
    link = Link.parse(text)
    where = LinkedHosts(link.megabits, delay=link.delay / 1e3, control=control, ranks=ranks)
    with tempfile.TemporaryDirectory() as folder, where as hosts:
        result = Path(folder) / "figures.json"
        command = (sys.executable, __file__, *arguments, "--link", text, "--work", str(result))
        with hosts.job(*command) as processes:
            codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}: what they say is above")
        return msgspec.json.decode(result.read_bytes(), type=list[Figure])


Found = Mapping[Link, Sequence[Figure]]
Cell = Callable[[Figure, Link], str]


def _shares(figure: Figure, link: Link) -> str:
    shares = (figure.of_bare, figure.of_rate(link))
    return ", ".join("-" if share is None else f"{share:.0%}" for share in shares)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


TABLES: Mapping[str, Cell] = {
    "Gloo's time / Phalanx's (milliseconds)": lambda figure, _: (
        f"{figure.times_gloo:.2f} ({_milliseconds(figure.seconds[OURS])})"
    ),
    "Share of the bare stream, of the rate": _shares,
    "Processor milliseconds of a call: Phalanx, Gloo, bare": lambda figure, _: ", ".join(
        map(_milliseconds, figure.busy.values())
    ),
}


def tables(found: Found) -> Iterator[tuple[str, Table]]:
    """Each with its title: a row for each operation and size, a column for each link."""
    for title, cell in TABLES.items():
        table = Table(box=box.MARKDOWN)
        for heading in ("", "bytes", *map(str, found)):
            table.add_column(heading, justify="right" if heading else "left")
        for row in zip(*found.values(), strict=True):
            cells = [cell(figure, link) for figure, link in zip(row, found, strict=True)]
            table.add_row(row[0].operation, show_size(row[0].bytes), *cells)
        yield title, table


def complaints(found: Found) -> Iterator[str]:
    """What is wrong, and what is missed."""
    for link, row in found.items():
        for figure in row:
            where = f"{link}: {figure.operation} of {show_size(figure.bytes)}"
            if figure.wrong:
                yield f"WRONG: {where}: {figure.wrong} elements"
            share = figure.of_bare or 1.0
            if link.megabits and figure.bytes >= LARGE and share < DUE:
                yield f"MISSED: {where}: {share:.1%} of the bare stream"
            if figure.times_gloo < DUE:
                yield f"MISSED: {where}: Gloo takes {figure.times_gloo:.2f} of its time"


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rates",
        default="1G,10G,any,1G+10ms",
        metavar="RATE,...",
        help="bits a second out of each host, 100M, 10G or any; with milliseconds that each packet "
        "takes, as in 1G+10ms (default: %(default)s)",
    )
    parser.add_argument(
        "--sizes", default="8,64K,1M,4M,16M,64M", help="bytes (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="that count")
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument(
        "--control", default="", help="of congestion, such as reno (default: the machine's)"
    )
    parser.add_argument("--json", type=Path, help="also write all figures there")
    parser.add_argument("--link", help=argparse.SUPPRESS)  # this is a rank
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work is not None:
        work(asked)
        return 0
    try:
        links = {Link.parse(text): text for text in asked.rates.split(",")}
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the hosts would stay
    try:
        how = {"control": asked.control, "ranks": asked.ranks}
        found = {link: measure(text, sys.argv[1:], **how) for link, text in links.items()}
    except NoLinkError as error:
        print(f"no hosts can be joined here: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    console = Console(width=max(120, Console().width))
    for title, table in tables(found):
        console.print(title, table, sep="\n", highlight=False)
    if asked.json:
        kept = {str(link): msgspec.to_builtins(row) for link, row in found.items()}
        asked.json.write_text(json.dumps(kept, indent=1) + "\n")
    missed = list(complaints(found))
    for text in missed:
        print(text, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
