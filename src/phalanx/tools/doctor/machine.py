"""The machine: cores, memory, limits, room for files, and its clocks."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from types import MappingProxyType

from phalanx.launch.environment import address_toward
from phalanx.tools.doctor.checks import Checks, Finding, fail, info, ok, warn
from phalanx.wire.control import is_loopback

MIB, GIB = 1 << 20, 1 << 30
FEW_FILES = 1024
LITTLE_SHARED_MEMORY = 256 * MIB
LITTLE_ROOM = 64 * MIB
BEFORE_THIS = 1_735_689_600  # 2025-01-01: a clock that says less was never set


def _system() -> Finding:
    libc = " ".join(platform.libc_ver()) or "unknown libc"
    container = " (in a container)" if Path("/.dockerenv").exists() else ""
    return ok(f"{platform.system()} {platform.release()}, {platform.machine()}, {libc}{container}")


def _cores() -> Finding:
    there = os.cpu_count() or 1
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    words = f"{ours} of {there} cores"
    quota = cpu_quota(Path("/sys/fs/cgroup"))
    if quota is None:
        return ok(words)
    words += f", and a quota of {quota:g} (cgroup)"
    if quota < ours:
        return warn(
            words, f"start no more than {max(1, int(quota))} ranks, or set OMP_NUM_THREADS=1"
        )
    return ok(words)


def cpu_quota(folder: Path) -> float | None:
    """Return how many cores' time the control group at `folder` allows, or None for all."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:  # control groups, version 1
        quota_us = int((folder / "cpu" / "cpu.cfs_quota_us").read_text())
        return (
            quota_us / int((folder / "cpu" / "cpu.cfs_period_us").read_text())
            if quota_us > 0
            else None
        )
    except (OSError, ValueError):
        return None


def _memory() -> Finding:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return info("not known on this system")
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    words = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB available"
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        words += "" if limit == "max" else f", limit {int(limit) / GIB:.1f} GiB (cgroup)"
    except (OSError, ValueError):
        pass
    if free < GIB:
        return warn(words, "a rank with torch takes about 0.3 GiB before it has any data")
    return ok(words)


def _open_files() -> Finding:
    try:
        import resource  # noqa: PLC0415 -- not everywhere
    except ImportError:
        return info("no limits on this system")
    return judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge_open_files(soft: int, hard: int) -> Finding:
    """Return what a limit on open files means: each rank holds a connection to every other."""
    words = f"{_limit(soft)} open files (hard limit {_limit(hard)})"
    if 0 <= soft < FEW_FILES:
        return warn(words, f"ulimit -n {FEW_FILES}, or more than ranks in the job by 100")
    return ok(words)


def _limits() -> Finding:
    try:
        import resource  # noqa: PLC0415
    except ImportError:
        return info("no limits on this system")
    kinds = {
        "locked memory": resource.RLIMIT_MEMLOCK,
        "processes": resource.RLIMIT_NPROC,
        "address space": resource.RLIMIT_AS,
        "core file": resource.RLIMIT_CORE,
    }
    return info(
        ", ".join(f"{name} {_limit(resource.getrlimit(k)[0])}" for name, k in kinds.items())
    )


def _limit(value: int) -> str:
    return "unlimited" if value < 0 or value >= (1 << 62) else str(value)


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return info("there is no /dev/shm: ranks of one host talk over TCP")
    usage = shutil.disk_usage(folder)
    return judge_shared_memory(usage.total, usage.free)


def judge_shared_memory(total: int, free: int) -> Finding:
    """Return whether tensors of some size fit where ranks of one host share memory."""
    words = f"/dev/shm: {total / MIB:.0f} MiB, {free / MIB:.0f} MiB free"
    if free >= LITTLE_SHARED_MEMORY:
        return ok(words)
    return warn(
        words,
        "docker run --shm-size=2g, or remove what other programs have left there (ls -l /dev/shm)",
    )


def _temporary() -> Finding:
    hint = "set TMPDIR to a folder of yours that is not full"
    try:
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile() as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return fail(f"no file can be written: {error}", hint)
    words = f"{folder}, {free / MIB:.0f} MiB free"
    asked = os.environ.get("TMPDIR")
    if asked and Path(asked).resolve() != Path(folder).resolve():
        return warn(f"{words}; TMPDIR={asked} cannot be used", hint)
    return ok(words) if free > LITTLE_ROOM else warn(words, hint)


def _clock() -> Finding:
    steady = time.get_clock_info("monotonic")
    return judge_clock(time.time(), steady.resolution, steady.adjustable)


def judge_clock(now: float, resolution: float, adjustable: bool) -> Finding:
    """Return whether timeouts can be trusted, and times of several hosts compared."""
    date = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    words = f"{date}; steady clock in steps of {resolution * 1e9:.0f} ns"
    if adjustable or resolution > 1e-3:
        return warn(f"{words}; it can jump" * adjustable or words, "timeouts will be inexact")
    if now < BEFORE_THIS:
        return warn(
            words, "set this host's clock (NTP): traces and logs of hosts are compared by it"
        )
    return ok(words)


def _start_of_processes() -> Finding:
    """Python itself, without torch: everything that a rank does comes on top."""
    import subprocess  # noqa: PLC0415

    begin = time.perf_counter()
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True, timeout=30)
    seconds = time.perf_counter() - begin
    words = f"a Python process starts in {seconds * 1e3:.0f} ms"
    return ok(words) if seconds < 1 else warn(words, "the machine is busy, or its disk is slow")


MACHINE: Checks = MappingProxyType(
    {
        "system": _system,
        "cores": _cores,
        "memory": _memory,
        "open files": _open_files,
        "other limits": _limits,
        "shared memory": _shared_memory,
        "temporary files": _temporary,
        "processes": _start_of_processes,
        "clock": _clock,
    }
)


# ------------------------------------------------------------------------------
# Names and addresses of this host, as the ranks of a job would use them.

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
