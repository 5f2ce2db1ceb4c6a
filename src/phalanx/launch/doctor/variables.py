"""The environment variables that change what Phalanx, torch and their libraries do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

from phalanx.errors import AuthenticationError, DistributedError
from phalanx.launch.doctor.finding import Checks, Finding, fail, info, ok, warn
from phalanx.launch.environment import read_environment

__all__ = ["VARIABLES", "judge_threads", "shown_variables"]

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
    from phalanx.backends.tcp.token import find_token  # noqa: PLC0415 -- torch comes with it

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
