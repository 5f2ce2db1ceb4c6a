"""Networks to break: hosts that are network namespaces, joined by a switch in another one.

    host 0 --- eth0 ---+
    host 1 --- eth0 ---+--- switch          each host is 10.77.0.(1 + its number)
    host 2 --- eth0 ---+

Packet filters on a host's eth0 lose what comes in, what goes out, or some of it. Nothing outside
the namespaces is touched, and nothing there can be reached. Needs root; `why_not()` says what is
missing. The names hold this process's number, and all are deleted again, whatever happens.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from functools import cache
from pathlib import Path

NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000

# Classic packet filters, as `tc` reads them: instructions of (code, jump if true, if false, value).
# A filter that returns 2 drops the packet (TC_ACT_SHOT), 0 passes it on (TC_ACT_OK), and -1 asks
# the next filter (TC_ACT_UNSPEC).
DROP_ALL = "1,6 0 0 2,"
_RANDOM, _SOURCE = 4294963256, 26  # the ancillary word of random bits; an IPv4 source's offset


def drop_some(share: float) -> str:
    """Drop that share of the packets: those whose random word is at least the threshold."""
    return f"4,32 0 0 {_RANDOM},53 0 1 {int((1 - share) * 2**32)},6 0 0 2,6 0 0 0,"


def drop_from(address: str) -> str:
    """Drop what comes from one host."""
    value = int.from_bytes(bytes(int(part) for part in address.split(".")), "big")
    return f"4,32 0 0 {_SOURCE},21 0 1 {value},6 0 0 2,6 0 0 {2**32 - 1},"


class Network:
    """A number of hosts. Use it in a `with` statement."""

    _serial = itertools.count()

    def __init__(self, hosts: int) -> None:
        name = f"phalanx-{os.getpid()}-{next(self._serial)}"
        self._switch = f"{name}-switch"
        self._hosts = [f"{name}-{number}" for number in range(hosts)]

    def host(self, number: int) -> str:
        """The name of a host's namespace."""
        return self._hosts[number]

    @staticmethod
    def address(number: int) -> str:
        """A host's address."""
        return f"10.77.0.{1 + number}"

    def cut(self, number: int, *, come_in: bool = True, go_out: bool = True) -> None:
        """Lose what comes into a host, what goes out of it, or both."""
        self._filter(number, DROP_ALL, come_in=come_in, go_out=go_out)

    def cut_between(self, number: int, other: int) -> None:
        """Lose everything between two hosts, both ways; each can still be reached by others."""
        self._filter(number, drop_from(self.address(other)), come_in=True, go_out=False)
        self._filter(other, drop_from(self.address(number)), come_in=True, go_out=False)

    def lose(self, number: int, share: float) -> None:
        """Lose that share of a host's packets, at random, in either direction."""
        self._filter(number, drop_some(share), come_in=True, go_out=True)

    def slow_down(self, number: int, megabits: int, *, burst: str = "64k") -> None:
        """Let so many megabits a second out of a host, and no more, but `burst` at once."""
        shape = ("tbf", "rate", f"{megabits}mbit", "burst", burst, "latency", "200ms")
        _run("tc", "-n", self._hosts[number], "qdisc", "add", "dev", "eth0", "root", *shape)

    def heal(self, number: int) -> None:
        """Lose nothing any more."""
        for direction in ("ingress", "egress"):
            _run("tc", "-n", self._hosts[number], "filter", "del", "dev", "eth0", direction)

    def _filter(self, number: int, code: str, *, come_in: bool, go_out: bool) -> None:
        for direction, wanted in (("ingress", come_in), ("egress", go_out)):
            if wanted:
                where = ("tc", "-n", self._hosts[number], "filter", "add", "dev", "eth0", direction)
                _run(*where, "bpf", "da", "bytecode", code)

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "switch", "up")
        for number, host in enumerate(self._hosts):
            port = f"port{number}"
            _run("ip", "netns", "add", host)
            _run("ip", "-n", host, "link", "set", "lo", "up")
            peer = ("type", "veth", "peer", "name", port, "netns", self._switch)
            _run("ip", "link", "add", "eth0", "netns", host, *peer)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "switch", "up")
            _run("ip", "-n", host, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _run("ip", "-n", host, "link", "set", "eth0", "up")
            _run("tc", "-n", host, "qdisc", "add", "dev", "eth0", "clsact")

    def __exit__(self, *_: object) -> None:
        for name in (*self._hosts, self._switch):
            if (NAMESPACES / name).exists():
                _run("ip", "netns", "del", name)


def enter(host: str) -> None:
    """Move this process, which has one thread, to a host."""
    descriptor = os.open(NAMESPACES / host, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"this process cannot move to {host}")
    finally:
        os.close(descriptor)


@cache
def why_not() -> str:
    """Why networks cannot be made here, or ""."""
    try:
        with Network(1) as network:
            network.cut(0)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip()
        return f"network namespaces with packet filters are not allowed here: {said}"
    return ""


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
