"""Two hosts and the link between them: network namespaces, joined by a pair of interfaces.

    host 0   10.78.0.1   eth0 ----- a token bucket each way ----- eth0   10.78.0.2   host 1

What a host sends is held to a rate (`tc`, tbf), and can be delayed: where the kernel has no netem,
this process carries the packets and holds each of them for a while. Nothing outside the namespaces
is touched, and both are deleted again, whatever happens. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import shutil
import struct
import subprocess
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from time import monotonic

HOSTS = 2
PORT = 29500  # every port is free on a host of one's own


class NoLinkError(Exception):
    """There can be no such link here; the message says why."""


class LinkedHosts:
    """Two hosts, and some ranks on each. For a `with` statement.

    megabits   a second, that each sends at most; None: as fast as it goes
    delay      seconds that each packet takes
    control    of congestion, the kernel's name of it; "": the machine's own
    ranks      on each host, which follow each other

    Entering raises `NoLinkError` where that is not allowed.
    """

    def __init__(
        self, megabits: float | None, *, delay: float = 0.0, control: str = "", ranks: int = 1
    ) -> None:
        self._megabits = megabits
        self._delay = delay
        self._control = control
        self._ranks = ranks
        self._line: DelayLine | None = None
        self._hosts = [f"phalanx-{os.getpid()}-link-{number}" for number in range(HOSTS)]

    @staticmethod
    def address(number: int) -> str:
        """A host's address."""
        return f"10.78.0.{1 + number}"

    @contextmanager
    def job(self, *words: str) -> Iterator[list[subprocess.Popen[bytes]]]:
        """The ranks of a job, each a process on its host that runs this command."""
        common = {
            "WORLD_SIZE": str(HOSTS * self._ranks),
            "LOCAL_WORLD_SIZE": str(self._ranks),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(PORT),
            "PHALANX_TOKEN": secrets.token_hex(),
            "PHALANX_HEARTBEAT": "30",  # seconds: where ranks share a busy machine nobody is dead
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # it would warn that addresses have no names here
        }
        processes = []
        try:
            for rank in range(HOSTS * self._ranks):
                host, local_rank = divmod(rank, self._ranks)
                command = ["ip", "netns", "exec", self._hosts[host], *words]
                place = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
                variables = {**os.environ, **common, **place}
                # In a session of their own: an interrupt is for this process, which ends them.
                process = subprocess.Popen(command, env=variables, start_new_session=True)
                processes.append(process)
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def __enter__(self) -> LinkedHosts:
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            raise NoLinkError(f"{' and '.join(missing)} not found: install iproute2")
        root = "" if os.geteuid() == 0 else " (this takes root)"
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            said = error.stderr.strip()
            raise NoLinkError(f"{' '.join(error.cmd)}: {said}{root}") from None
        except OSError as error:
            self.__exit__()
            raise NoLinkError(f"{error}{root}") from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        first, second = self._hosts
        for host in self._hosts:
            _run("ip", "netns", "add", host)
            _run("ip", "-n", host, "link", "set", "lo", "up")
        if self._delay:
            self._line = DelayLine(self._delay, self._hosts)
        else:
            peer = ("type", "veth", "peer", "name", "eth0", "netns", second)
            _run("ip", "link", "add", "eth0", "netns", first, *peer)
        for number, host in enumerate(self._hosts):
            _run("ip", "-n", host, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _run("ip", "-n", host, "link", "set", "eth0", "up")
            if self._megabits is not None:
                rate = ("rate", f"{self._megabits}mbit", "burst", bucket(self._megabits))
                where = ("dev", "eth0", "root", "tbf")
                _run("tc", "-n", host, "qdisc", "add", *where, *rate, "latency", "200ms")
            if self._control:
                setting = f"net.ipv4.tcp_congestion_control={self._control}"
                _run("ip", "netns", "exec", host, "sysctl", "-q", "-w", setting)

    def __exit__(self, *_: object) -> None:
        if self._line is not None:
            self._line.close()
        for host in self._hosts:
            if Path("/run/netns", host).exists():
                _run("ip", "netns", "del", host)


def bucket(megabits: float) -> str:
    """What may go at once, for `tc`.

    Ten packets where the rate is low: more would let a small message through as if there were no
    limit. Else a large packet, as TCP hands them to an interface, has to fit, or the kernel cuts it
    before it counts it, which takes a processor from 1 Gbit/s on; and timers are a little late.
    """
    return "16kb" if megabits < 500 else f"{max(128, round(megabits / 20))}kb"


def bytes_out() -> int:
    """What has left this process's host so far, headers and all, as the kernel counts it."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise OSError("this host has no eth0")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


# ------------------------------------------------------------------------------
# A delay, without netem: two tunnels' ends (Documentation/networking/tuntap.rst in Linux), between
# which a thread of this process carries the packets. With the header of virtio they are as large as
# TCP makes them, up to 64 KiB, and without checksums: 2,000 packets a second are 1 Gbit/s. Nothing
# is lost here: what is under way waits in this process, what may not go yet in the token bucket.

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # uapi/linux/if_tun.h
_TUN, _NO_INFORMATION, _VIRTIO_HEADER = 0x0001, 0x1000, 0x4000
_NO_CHECKSUM, _LARGE_IPV4 = 0x01, 0x02
_LARGEST = (1 << 16) + 64  # bytes of a packet and its virtio header, rounded up


class DelayLine:
    """Hosts' interfaces eth0; what one of the two sends arrives at the other `seconds` later."""

    def __init__(self, seconds: float, hosts: list[str]) -> None:
        self._seconds = seconds
        self._end, self._ended = os.pipe()
        self._files: list[int] = []
        self._thread = Thread(target=self._carry, daemon=True)
        try:
            for number, host in enumerate(hosts):
                name = f"phx{os.getpid()}-{number}"
                file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                self._files.append(file)
                flags = _TUN | _NO_INFORMATION | _VIRTIO_HEADER
                fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
                fcntl.ioctl(file, _TUNSETOFFLOAD, _NO_CHECKSUM | _LARGE_IPV4)
                _run("ip", "link", "set", name, "netns", host, "name", "eth0")
        except BaseException:
            self.close()
            raise
        self._thread.start()

    def _carry(self) -> None:
        lines: dict[int, deque[tuple[float, bytes]]] = {file: deque() for file in self._files}
        other = dict(zip(self._files, reversed(self._files), strict=True))
        while True:
            due = min((line[0][0] for line in lines.values() if line), default=None)
            seconds = None if due is None else max(0.0, due - monotonic())
            ready, _, _ = select.select([self._end, *self._files], [], [], seconds)
            if self._end in ready:
                return
            for file in ready:
                with suppress(BlockingIOError):
                    while True:
                        packet = os.read(file, _LARGEST)
                        lines[file].append((monotonic() + self._seconds, packet))
            now = monotonic()
            for file, line in lines.items():
                while line and line[0][0] <= now:
                    with suppress(OSError):  # an interface that is not up yet gets nothing
                        os.write(other[file], line.popleft()[1])

    def close(self) -> None:
        """Carry nothing any more; the interfaces are gone."""
        os.close(self._ended)
        if self._thread.is_alive():
            self._thread.join()
        for file in (self._end, *self._files):
            os.close(file)
