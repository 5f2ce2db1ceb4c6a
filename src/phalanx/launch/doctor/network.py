"""Names and addresses of this host, as the ranks of a job would use them."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from types import MappingProxyType

from phalanx.launch.address import address_toward
from phalanx.launch.doctor.finding import Checks, Finding, fail, info, ok, warn
from phalanx.wire.address import is_loopback

__all__ = ["NETWORK", "judge_name"]

SLOW_LOOKUP = 1.0  # seconds


def _name() -> Finding:
    name = socket.gethostname()
    begin = time.perf_counter()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return judge_name(name, [], time.perf_counter() - begin, str(error))
    addresses = sorted({str(address[0]) for _, _, _, _, address in found})
    return judge_name(name, addresses, time.perf_counter() - begin)


def judge_name(name: str, addresses: list[str], seconds: float, error: str = "") -> Finding:
    """Return whether other hosts could find this one by its own name."""
    words = f"{name} is {', '.join(addresses)}" if addresses else f"{name}: {error}"
    words += f" ({seconds * 1e3:.0f} ms)"
    if not addresses:
        return warn(words, "add the name to /etc/hosts, or give --master an address")
    if seconds > SLOW_LOOKUP:
        return warn(words, "name lookups are slow: add the name to /etc/hosts, or use addresses")
    if all(is_loopback(address) for address in addresses):
        return info(words, "for several hosts, give --master a name that means no loopback address")
    return ok(words)


def _route() -> Finding:
    try:
        address = address_toward(socket.gethostname(), 9, one_host=False)
    except OSError as error:
        return info(f"no way to other hosts ({error}): only ranks of this host can meet")
    return ok(f"other hosts reach this one at {address}")


def _loopback() -> Finding:
    return _listen(socket.AF_INET, "127.0.0.1") or ok("127.0.0.1 accepts connections")


def _ipv6() -> Finding:
    missing = _listen(socket.AF_INET6, "::1") if socket.has_ipv6 else fail("no IPv6", "")
    return info(f"not here ({missing.what}); IPv4 will do") if missing else ok("::1, too")


def _listen(family: int, host: str) -> Finding | None:
    """Connect to ourselves; return what is wrong, or None."""
    try:
        with socket.create_server((host, 0), family=family) as listener:
            listener.settimeout(5)
            with (
                socket.create_connection(listener.getsockname()[:2], 5) as client,
                listener.accept()[0] as server,
            ):
                client.sendall(b"?")
                server.settimeout(5)
                if server.recv(1) == b"?":
                    return None
                return fail(f"{host}: what was sent did not come", "a firewall changes packets?")
    except OSError as error:
        return fail(f"{host}: {error}", "no ranks can meet: is the interface lo up? (ip link)")


def _ports() -> Finding:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return info("which ports the system gives away is not known here")
    return info(f"the system gives away ports {low} to {high}: choose another for --master")


NETWORK: Checks = MappingProxyType(
    {
        "host name": _name,
        "loopback": _loopback,
        "IPv6": _ipv6,
        "route": _route,
        "ports": _ports,
    }
)
