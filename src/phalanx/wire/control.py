"""Control messages: addresses, failures, questions about waits; as MessagePack, never pickle."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from phalanx.wire.frame import FrameError


class Address(msgspec.Struct, frozen=True, gc=False):
    """From each rank to rank 0: its address, its host and its process."""

    host: str
    port: int
    host_id: str
    process: int = 0  # 0: other ranks of its host cannot see it in /proc
    # File descriptors of that process, which ranks of its host open: its shared memory, and the
    # writing end of its wakeup pipe. -1: it has none.
    memory: int = -1
    wakeup: int = -1


class Table(msgspec.Struct, frozen=True):
    """From rank 0 to each rank: every rank's address, in rank order."""

    addresses: list[Address]


class Host(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The common part of the addresses of several ranks."""

    address: str
    host_id: str


class Listener(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The rest of a rank's address; `host` counts in the list of hosts."""

    host: int
    port: int
    process: int
    memory: int
    wakeup: int


class CompactTable(msgspec.Struct, frozen=True, array_like=True):
    """`Table` in some 15 bytes a rank, for a sparse mesh: common parts stand once."""

    hosts: list[Host]
    listeners: list[Listener]

    @classmethod
    def of(cls, addresses: list[Address]) -> CompactTable:
        """Return the table of these addresses, in rank order."""
        hosts = {Host(each.host, each.host_id): None for each in addresses}
        number = {host: at for at, host in enumerate(hosts)}
        listeners = [
            Listener(number[Host(a.host, a.host_id)], a.port, a.process, a.memory, a.wakeup)
            for a in addresses
        ]
        return cls(list(hosts), listeners)

    def addresses(self) -> list[Address]:
        """Return every rank's address, in rank order. Raise `FrameError` if a host is missing."""
        found = []
        for number, port, *rest in map(msgspec.structs.astuple, self.listeners):
            if not 0 <= number < len(self.hosts):
                raise FrameError(f"a table of {len(self.hosts)} hosts without number {number}")
            host = self.hosts[number]
            found.append(Address(host.address, port, host.host_id, *rest))
        return found


class Attached(msgspec.Struct, frozen=True):
    """From each rank to all, after the table: whether it has attached its local peers' memory."""

    problem: str  # "" if there is none


class AllAttached(msgspec.Struct, frozen=True):
    """From rank 0 to each rank of a sparse mesh, which has told only rank 0: the sum of reports."""

    rank: int  # the first that has a problem, or 0
    problem: str


class FailureNotice(msgspec.Struct, frozen=True):
    """A group is broken. Ranks are those of the whole job."""

    error: str  # name of the error's class
    culprit: int
    reporter: int
    reason: str
    # If ranks disagree: the reporter's operation, and its sequence number.
    signature: str = ""
    sequence: int = -1
    met: str = ""  # the culprit's operation, if it is known


LONGEST_TEXT = 20_000  # characters; three such texts fit into a control frame in any script


def shortened(text: str) -> str:
    """Return the text, or its beginning if it is too long for a control frame."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."


class Ask(msgspec.Struct, frozen=True):
    """A question to a rank about the group of the frame: its current call, or its wait."""

    sequence: int  # of the collective; -1: this is not about one
    fingerprint: int
    what: str  # that collective in words
    query: int = 0  # not 0: the number of a question about waits, answered by `Answer`
    rolling_hash: int = 0  # not 0: of all collectives of the group up to this one


class Answer(msgspec.Struct, frozen=True):
    """A rank's wait, in words (`what`); its last call if it waits in none."""

    waits_for: list[int]  # global ranks
    what: str
    kept: int = 0  # bytes of the asking rank's unexpected messages that are kept here
    query: int = 0  # the number of the `Ask`
    group: int = 0  # of the call in which it waits,
    sequence: int = -1  # and its sequence number, if it is a collective


def chain_of_waits(
    first: Iterable[int], answers: Mapping[int, Answer | None]
) -> tuple[list[int], bool]:
    """Return the shortest chain of ranks that wait for each other, and whether it ends.

    `answers` holds the answers of the ranks that were asked: None for nothing. A chain ends with a
    rank that waits for nobody. If none does, it is the first steps of a circle.
    """
    chains = [[rank] for rank in first]
    seen: set[int] = set()
    for chain in chains:  # grows while it is walked: breadth first
        last = chain[-1]
        if last in seen:
            continue
        seen.add(last)
        answer = answers.get(last)
        if answer is None or not answer.waits_for:
            return chain, True
        chains.extend([*chain, rank] for rank in answer.waits_for)
    return (chains[0] if chains else []), False


# News for every rank of a sparse mesh (`transport/tcp/flooding.py`).


class RankLeft(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A rank has closed, in good order."""

    rank: int


class RankLost(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A rank is gone without closing."""

    rank: int
    reason: str


class GroupLeft(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A rank has closed one group."""

    rank: int
    group: int


class GroupFailed(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A report that a group is broken."""

    group: int
    failure: FailureNotice


Word: TypeAlias = "RankLeft | RankLost | GroupLeft | GroupFailed"


class News(msgspec.Struct, frozen=True, array_like=True):
    """Reports, in the order in which the sender heard them."""

    words: list[RankLeft | RankLost | GroupLeft | GroupFailed]


_K = TypeVar("_K")
_T = TypeVar("_T", bound=msgspec.Struct)

encode = msgspec.msgpack.Encoder().encode
_learning = threading.Lock()


def learned(kind: _K) -> _K:
    """Return `kind`, a type that msgspec is to read, after msgspec has learned its fields.

    By itself it learns them in the first read. A second thread that reads the same type meanwhile
    crashes the process (msgspec 0.22). So every reader wraps its type in this.
    """
    _learn(kind)
    return kind


@cache
def _learn(kind: object) -> None:
    with _learning:
        msgspec.msgpack.Decoder(kind)


def decode(payload: bytes, kind: type[_T]) -> _T:
    """Return the message in `payload`. Raise `FrameError` if it is not one of this kind."""
    try:
        return msgspec.msgpack.decode(payload, type=learned(kind))
    # msgspec has no error of its own for text that is not UTF-8, and for too deep nesting.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a {kind.__name__} message that cannot be read: {error}") from None


# ------------------------------------------------------------------------------
# Addresses as text: `host:port`, with an IPv6 number in brackets: `[fd00::1]:29500`.


class Endpoint(NamedTuple):
    """A host, as a name or a number, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Endpoint:
    """Return the address in `text`. Raise ValueError unless it is `host:port` or `[host]:port`."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    wrong_host = not bare or (":" in bare and bare == host) or bare.strip() != bare
    wrong_port = not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536
    if not colon or wrong_host or wrong_port:
        raise ValueError(
            f'"{text}" is not an address: an address is host:port, such as node1:29500, '
            "192.0.2.7:29500 or [fd00::1]:29500"
        )
    return Endpoint(bare, int(port))


def is_loopback(host: str) -> bool:
    """Return whether `host` is written as one that only this machine can reach."""
    try:
        number = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    # How a socket of both families shows a caller over IPv4: ::ffff:127.0.0.1.
    mapped = getattr(number, "ipv4_mapped", None)
    return (mapped or number).is_loopback
