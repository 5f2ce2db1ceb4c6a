"""The peak of memory of a training step, on one rank.

Each library is measured in fresh processes. Those that are timed hold all libraries, and what one
has freed another uses again.

    a small step       what is loaded, connected and started once is not counted
    the model is made  -> `building`: whole on each rank, as users do, then wrapped
    some steps         -> `training`

How much memory a process has, and had at most, is read from Linux's /proc:

    peak       VmHWM: the most pages that were resident at the same time since the last reset,
               which is a 5 written to /proc/self/clear_refs (proc(5)). Nothing is missed between
               two looks, since the kernel keeps it
    pages that processes share
               RssShmem counts those that this process has touched, wholly, in each process. Of
               /proc/self/smaps_rollup, Pss_Shmem divides each page by the processes that have it,
               so that the sum over all ranks is what the host has given

A rank's share of a peak is what it has for itself, and its part of what is shared:

    peak - RssShmem + Pss_Shmem

with the last two as they are when it is read: pages stay when they have been touched once.
"""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from phalanx.tools.bench.operations import BenchOperation, MessageBuffers
from phalanx.tools.bench.peer import Control, Peer
from phalanx.tools.bench.request import BenchRequest
from phalanx.tools.bench.results import LeftOut, Peak, RankPeak

_SMALL = 8
"""The width of layers that count for nothing."""


def measure_peak(
    name: str, peer: Peer, operation: BenchOperation, request: BenchRequest, control: Control
) -> Peak | LeftOut:
    """What the peer's steps take on each rank. Every rank calls it, and gets the same."""
    found: list[int] = []
    phases = _phases(peer, operation, request.steps, found)
    over: str | None = ""
    while not over:  # all ranks begin each phase together
        over, problem = control.attempt(lambda: next(phases, "over"))
        if problem:
            return LeftOut(name, control.size, problem, operation.name)
    return Peak(
        operation=operation.name,
        ranks=control.size,
        peer=name,
        gives_back=request.gives_back,
        steps=request.steps,
        by_rank=[RankPeak(*values) for values in control.gather(found)],
    )


def _phases(peer: Peer, operation: BenchOperation, steps: int, found: list[int]) -> Iterator[None]:
    """What a rank does, phase by phase; appends the fields of `RankPeak`."""
    width, peer.width = peer.width, _SMALL
    step = peer.prepare(operation, 0, "ordinary", "auto", MessageBuffers())
    step.call()
    step.call()
    peer.width = width
    del step
    yield
    meter = Meter()
    yield
    step = peer.prepare(operation, 0, "ordinary", "auto", MessageBuffers())
    yield  # what is shared by two counts half for each, once both have it
    found.append(meter.peak())
    yield  # where ranks are threads, they have one peak
    meter.reset()
    yield
    for _ in range(steps):
        step.call()
    yield
    found += [meter.peak(), meter.shared()]


# ------------------------------------------------------------------------------
# The meter.

_STATUS, _CLEAR, _ROLLUP = (
    Path("/proc/self/status"),
    Path("/proc/self/clear_refs"),
    Path("/proc/self/smaps_rollup"),
)

GIVES_BACK: Mapping[str, str] = MappingProxyType({"MALLOC_MMAP_THRESHOLD_": "65536"})
"""The environment in which glibc's malloc gives the memory of a tensor back as soon as it is freed.

Else it raises that threshold by itself, up to 32 MiB, and keeps what is freed below it: what is
resident is then what was ever needed, and what lies unused between (mallopt(3))."""


def gives_back() -> bool:
    """Whether `GIVES_BACK` means something here."""
    return platform.libc_ver()[0] == "glibc"


def lacks_peaks() -> str:
    """Why peaks cannot be measured here; empty if they can."""
    try:
        _reset()
        _read()
    except (OSError, KeyError) as error:
        return (
            "the peak of a process is read from /proc/self/status and smaps_rollup, and reset by "
            f"/proc/self/clear_refs, of Linux: {type(error).__name__}: {error}"
        )
    return ""


class Meter:
    """What this process has taken since it was made, in bytes."""

    def __init__(self) -> None:
        gc.collect()
        if gives_back():  # what was freed, too: it would hide what comes
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
        _reset()
        before = _read()
        self._before = before._replace(most=before.now)

    def reset(self) -> None:
        """Forget the peak: from now on it is that of what follows."""
        _reset()

    def peak(self) -> int:
        """This rank's share of the most that it had since the last reset."""
        now, before = _read(), self._before
        private = (now.most - before.most) - (now.touched - before.touched)
        return private + now.part - before.part

    def shared(self) -> int:
        """Its part of what it shares with others now. The sum over the ranks is the host's."""
        return _read().part - self._before.part


class _Pages(NamedTuple):
    """Bytes: resident now and at most, those of them that are shared, and this process's part."""

    now: int
    most: int
    touched: int
    part: int


def _reset() -> None:
    _CLEAR.write_text("5")


def _read() -> _Pages:
    found = {}
    for path in (_STATUS, _ROLLUP):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            words = value.split()
            if len(words) == 2 and words[1] == "kB":
                found[name] = int(words[0]) << 10
    return _Pages(found["VmRSS"], found["VmHWM"], found["RssShmem"], found["Pss_Shmem"])
