"""All checks, in order, and what they found."""

from __future__ import annotations

import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING

from phalanx.errors import BackendUnavailableError, DistributedError
from phalanx.launch.init import BACKENDS
from phalanx.launch.spawn import spawn
from phalanx.tools.doctor.checks import Checks, Finding, fail, info, ok
from phalanx.tools.doctor.machine import MACHINE, NETWORK
from phalanx.tools.doctor.software import SOFTWARE, VARIABLES

if TYPE_CHECKING:
    from phalanx.core.backend import Backend


# ------------------------------------------------------------------------------
# Which backends there are, whether they work here, and how fast two ranks of this host are.
#
# Each backend is tried as a user would: `spawn` starts two ranks, which meet, and what an
# all_reduce gives them is checked.

_SMALL, _LARGE = 2, 4 << 20  # float32 elements: 8 B, 16 MiB
_TIMEOUT = 20.0
_PROCESS_GROUPS = ("gloo", "nccl", "ucc", "mpi")


def _two_ranks(backend: Backend) -> list[float]:
    """One rank's part: median seconds of a barrier, and of a small and a large all_reduce."""
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
    times = []
    for _ in range(calls):
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
    return statistics.median(times)


def try_backend(name: str) -> Finding:
    """Return whether two ranks of this host can work with the backend `name`, and how fast."""
    try:
        results = spawn(_two_ranks, 2, name, timeout=_TIMEOUT)
    except BackendUnavailableError as error:
        return info(f"cannot run here: {error}")
    except (DistributedError, ArithmeticError, OSError) as error:
        return fail(
            f"{type(error).__name__}: {error}",
            "a bug, or something between two processes of this host: please report it with all "
            "of this",
        )
    barrier, small, large = (max(times) for times in zip(*results, strict=True))
    rate = 4 * _LARGE / large / 1e9
    return ok(
        f"2 ranks: barrier {barrier * 1e6:.0f} us, all_reduce of 8 B {small * 1e6:.0f} us, of "
        f"16 MiB {large * 1e3:.1f} ms ({rate:.1f} GB/s)"
    )


def _process_groups() -> Finding:
    import torch.distributed as dist  # noqa: PLC0415

    if not dist.is_available():
        return info("this build of torch has no torch.distributed: torchrun does not work")
    has = [name for name in _PROCESS_GROUPS if getattr(dist, f"is_{name}_available")()]
    lacks = [name for name in _PROCESS_GROUPS if name not in has]
    return info(f"torch has {', '.join(has) or 'none'}; it lacks {', '.join(lacks) or 'none'}")


def _tried() -> dict[str, Callable[[], Finding]]:
    """Return a check for each backend; `auto` is one of the others."""
    return {name: partial(try_backend, name) for name in sorted(BACKENDS) if name != "auto"}


BACKEND_CHECKS: Checks = MappingProxyType({**_tried(), "process groups": _process_groups})


# ------------------------------------------------------------------------------
# Whether two processes of this host can share memory: made, written, read, answered, removed.

SIZE = 16 << 20
_OTHER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
    assert memory[:5] == memory[-5:] == b"hello", memory[:5]
    memory[:5] = b"world"
"""
"""What the second process does."""


def share_memory(folder: Path) -> Finding:
    """Return whether a second process sees what this one writes to memory in `folder`."""
    hint = f"is {folder} full, or mounted noexec or read-only? Ranks of one host can use tcp"
    path = ""
    try:
        descriptor, path = tempfile.mkstemp(prefix="phalanx-doctor-", dir=folder)
        with os.fdopen(descriptor, "r+b") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, SIZE)  # a full disk is an error, no SIGBUS
            else:
                os.ftruncate(file.fileno(), SIZE)
            with mmap.mmap(file.fileno(), SIZE) as memory:
                data = b"hello" + bytes(SIZE - 10) + b"hello"
                begin = perf_counter()
                memory[:] = data
                seconds = perf_counter() - begin
                words = [sys.executable, "-I", "-S", "-c", _OTHER, path]
                other = subprocess.run(words, capture_output=True, timeout=30, check=False)
                if other.returncode != 0:
                    said = other.stderr.decode(errors="replace").strip().rpartition("\n")[2]
                    return fail(f"a second process cannot read {folder}: {said}", hint)
                if memory[:5] != b"world":
                    return fail(f"a second process's answer in {folder} is not seen", hint)
    except (OSError, subprocess.SubprocessError) as error:
        return fail(f"{folder}: {error}", hint)
    finally:
        if path:
            Path(path).unlink(missing_ok=True)
    return ok(
        f"two processes share memory in {folder}; {SIZE / seconds / 1e9:.1f} GB/s to new pages"
    )


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return info("there is no /dev/shm here: ranks of one host talk over TCP")
    return share_memory(folder)


SHARING: Checks = MappingProxyType({"shared memory": _shared_memory})


# ------------------------------------------------------------------------------

SUBJECTS: Mapping[str, Checks] = MappingProxyType(
    {
        "Software": SOFTWARE,
        "Machine": MACHINE,
        "Environment": VARIABLES,
        "Network": NETWORK,
        "Memory between processes": SHARING,
        "Backends": BACKEND_CHECKS,
    }
)


@dataclass(frozen=True)
class Line:
    """One line of the report."""

    subject: str
    check: str
    finding: Finding


def examine(subjects: Mapping[str, Checks] = SUBJECTS) -> Iterator[Line]:
    """Run all checks, one after the other; yield each line when its check is done.

    Takes some seconds: two ranks are started for every backend. A check that raises has failed.
    """
    for subject, checks in subjects.items():
        for name, check in checks.items():
            try:
                finding = check()
            except Exception as error:
                said = traceback.format_exception_only(error)[-1].strip()
                finding = fail(f"the check failed: {said}", "please report it with all of this")
            yield Line(subject, name, finding)


def as_markdown(lines: list[Line]) -> Iterator[str]:
    """Yield the report as Markdown, to paste into a bug report, a line each."""
    subject = ""
    for line in lines:
        if line.subject != subject:
            subject = line.subject
            yield f"\n### {subject}\n"
        finding = line.finding
        mark = f"**{finding.status.upper()}** " if finding.status in ("warn", "fail") else ""
        hint = f" -- {finding.hint}" if finding.hint else ""
        yield f"- {mark}{line.check}: {finding.what}{hint}"
