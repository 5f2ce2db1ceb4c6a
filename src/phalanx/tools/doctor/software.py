"""What is installed: Python, Phalanx, torch, and the packages that they need or can use."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import MappingProxyType

from phalanx.errors import AuthenticationError, DistributedError
from phalanx.launch.environment import read_environment
from phalanx.tools.doctor.checks import Checks, Finding, fail, info, ok, warn

_REQUIREMENT = re.compile(r"([\w.-]+)(?:>=([\d.]+))?(?:.*extra == ['\"](\w+)['\"])?")
_FOR_USERS = ("plot", "mpi", "ray")
"""The extras that are not for those who work on Phalanx itself."""


def _python() -> Finding:
    words = f"{platform.python_implementation()} {platform.python_version()}"
    words += " (debug build)" if hasattr(sys, "gettotalrefcount") else ""
    threaded = getattr(sys, "_is_gil_enabled", lambda: True)()
    words += "" if threaded else " (without the global lock: not tested)"
    return ok(f"{words} at {sys.executable}")


def _phalanx() -> Finding:
    where = Path(__file__).parents[3]
    try:
        return ok(f"{version('phalanx')} at {where}")
    except PackageNotFoundError:
        return info(f"at {where}, not installed as a package", "pip install phalanx, to be sure")


def _torch() -> Finding:
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


def _packages() -> Finding:
    return judge_packages(requires("phalanx") or [])


def judge_packages(requirements: list[str]) -> Finding:
    """Return whether the packages that Phalanx needs are there, in versions that will do."""
    found: list[str] = []
    wrong: list[str] = []
    for name, least, extra in map(_parse, requirements):
        if extra:
            continue
        has = _version(name)
        found.append(f"{name} {has or 'missing'}")
        if has is None or below(has, least):
            wrong.append(f"{name} {has or 'is missing'}, and {least} is the least")
    if wrong:
        return fail("; ".join(wrong), "pip install --upgrade phalanx")
    return ok(", ".join(found) or "nothing is known of them")


def _extras() -> Finding:
    found: list[str] = []
    missing: list[str] = []
    for name, _, extra in map(_parse, requires("phalanx") or []):
        if extra in _FOR_USERS:
            has = _version(name)
            (missing if has is None else found).append(f"{name} {has or f'[{extra}]'}")
    words = [*found, *([f"not installed: {', '.join(missing)}"] if missing else [])]
    return info("; ".join(words) or "nothing is known of them")


def _parse(requirement: str) -> tuple[str, str, str]:
    """Return the name, the least version and the extra of a requirement, "" where unsaid."""
    match = _REQUIREMENT.match(requirement.replace(" ;", ";"))
    assert match is not None
    return match[1], match[2] or "0", match[3] or ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def below(has: str, least: str) -> bool:
    """Return whether version `has` is older than `least`; only their numbers count."""
    numbers = [
        [int(n) for n in re.findall(r"\d+", text.partition("+")[0])] for text in (has, least)
    ]
    return numbers[0] < numbers[1]


SOFTWARE: Checks = MappingProxyType(
    {
        "phalanx": _phalanx,
        "python": _python,
        "torch": _torch,
        "packages": _packages,
        "extras": _extras,
    }
)


# ------------------------------------------------------------------------------
# The environment variables that change what Phalanx, torch and their libraries do.

_PREFIXES = (
    "PHALANX_",
    "MASTER_",
    "LOCAL_",
    "GROUP_",
    "TORCH",
    "NCCL_",
    "GLOO_",
    "UCX_",
    "UCC_",
    "OMPI_COMM_WORLD_",
    "PMI_",
    "PMIX_",
    "MPI_",
    "KMP_",
    "MKL_",
    "GOMP_",
    "MALLOC_",
    "PYTORCH_",
    "PYTHON",
)
_NAMES = frozenset(
    {"RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "OMP_PROC_BIND", "CUDA_VISIBLE_DEVICES", "TMPDIR"}
    | {"LD_PRELOAD", "LD_LIBRARY_PATH", "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "LANG"}
    | {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_LOCALID", "VIRTUAL_ENV", "LOGLEVEL"}
)
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "KEY", "AUTH")
_NO_SECRET = frozenset({"PHALANX_TOKEN_FILE"})


def shown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables that matter as NAME=value; of a secret only that it is set."""
    return [
        f"{name}: set, {len(value)} characters" if _is_secret(name) else f"{name}={value}"
        for name, value in sorted(environ.items())
        if name in _NAMES or name.startswith(_PREFIXES)
    ]


def _is_secret(name: str) -> bool:
    return name not in _NO_SECRET and any(word in name.upper() for word in _SECRET)


def _shown() -> Finding:
    return info("; ".join(shown_variables(os.environ)) or "none that matters is set")


def _token() -> Finding:
    from phalanx.transport.tcp.admission import find_token  # noqa: PLC0415 -- torch comes with it

    try:
        token = find_token(os.environ)
    except AuthenticationError as error:
        return fail(str(error), "unset it, or put it right: no job can start like this")
    if not token:
        return info("none is set: the launcher makes one")
    return ok(f"one is set, {len(token)} characters")


def _launcher() -> Finding:
    try:
        world = read_environment(os.environ)
    except DistributedError as error:
        return fail(str(error), "unset it, or start the ranks with a launcher")
    if world is None:
        return ok("this process has no launcher: phalanx.init() gives a world of one")
    where = f"at {world.master_addr}:{world.master_port}" if world.master_port else "through MPI"
    return info(
        f"this is rank {world.rank} of {world.world_size} ({world.source}); they meet {where}"
    )


def _threads() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return judge_threads(os.environ.get("OMP_NUM_THREADS"), cores or 1)


def judge_threads(text: str | None, cores: int) -> Finding:
    """Return whether OMP_NUM_THREADS fits a host of so many cores."""
    if text is None:
        return ok("OMP_NUM_THREADS is not set: the launcher shares the cores among the ranks")
    if not text.isdigit() or int(text) < 1:
        return warn(f"OMP_NUM_THREADS={text} is no number of threads", "unset OMP_NUM_THREADS")
    if int(text) > cores:
        return warn(f"OMP_NUM_THREADS={text} for {cores} cores", "unset OMP_NUM_THREADS")
    return ok(f"OMP_NUM_THREADS={text} for {cores} cores")


VARIABLES: Checks = MappingProxyType(
    {"launcher": _launcher, "token": _token, "threads": _threads, "all that matter": _shown}
)
