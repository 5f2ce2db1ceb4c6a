"""What is installed: Python, Phalanx, torch, and the packages that they need or can use."""

from __future__ import annotations

import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import MappingProxyType

from phalanx.launch.doctor.finding import Checks, Finding, fail, info, ok

__all__ = ["SOFTWARE", "below", "judge_packages"]

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
    where = Path(__file__).parent.parent.parent
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
