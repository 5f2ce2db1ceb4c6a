"""A slow link: two hosts that are network namespaces, joined by a pair of interfaces.

    host 0   10.78.0.1   eth0 ----- a token bucket each way ----- eth0   10.78.0.2   host 1

What a host sends is held to a rate (`tc`, tbf). Nothing outside the namespaces is touched, and both
are deleted again, whatever happens. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

BUCKET = "16kb"
"""What may go at once: ten packets. More would let a small message through as if there were no
limit."""


class NoLinkError(Exception):
    """There can be no such link here; the message says why."""


class SlowLink:
    """Two hosts, each of which sends so many megabits a second at most. For a `with` statement.

    Entering raises `NoLinkError` where that is not allowed.
    """

    def __init__(self, megabits: float) -> None:
        self._megabits = megabits
        self.hosts = [f"phalanx-{os.getpid()}-slow-{number}" for number in range(2)]

    @staticmethod
    def address(number: int) -> str:
        """A host's address."""
        return f"10.78.0.{1 + number}"

    def command(self, number: int, *words: str) -> list[str]:
        """What runs a command on a host."""
        return ["ip", "netns", "exec", self.hosts[number], *words]

    def __enter__(self) -> SlowLink:
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            raise NoLinkError(f"{' and '.join(missing)} not found: install iproute2")
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            root = "" if os.geteuid() == 0 else " (this takes root)"
            said = error.stderr.strip()
            raise NoLinkError(f"{' '.join(error.cmd)}: {said}{root}") from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        first, second = self.hosts
        for host in self.hosts:
            _run("ip", "netns", "add", host)
            _run("ip", "-n", host, "link", "set", "lo", "up")
        peer = ("type", "veth", "peer", "name", "eth0", "netns", second)
        _run("ip", "link", "add", "eth0", "netns", first, *peer)
        rate = ("tbf", "rate", f"{self._megabits}mbit", "burst", BUCKET, "latency", "200ms")
        for number, host in enumerate(self.hosts):
            _run("ip", "-n", host, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _run("ip", "-n", host, "link", "set", "eth0", "up")
            _run("tc", "-n", host, "qdisc", "add", "dev", "eth0", "root", *rate)

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            if Path("/run/netns", host).exists():
                _run("ip", "netns", "del", host)


def bytes_out() -> int:
    """What has left this process's host so far, headers and all, as the kernel counts it."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise OSError("this host has no eth0")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
