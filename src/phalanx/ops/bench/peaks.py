"""The peak of memory of a training step, as the kernel counts it. Needs Linux.

A peer is measured in fresh processes: those that are timed hold all libraries, and what one has
freed another uses again. And it is measured twice: as it is, and with all freed memory given back,
which the C library else keeps.

    a small step       what is loaded, connected and started once is not counted
    the model is made  -> building: whole on each rank, as users do, then wrapped
    some steps         -> training
"""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from phalanx.ops.bench.operations import BenchOperation
from phalanx.ops.bench.peers import Peer, RankContext
from phalanx.ops.machine import read_sizes

SMALL = 8  # the width of layers that count for nothing
STEPS_OF_A_PEAK = 10


class Peak(msgspec.Struct, kw_only=True, tag="peak"):
    """Bytes that each rank had besides what it began with."""

    building: list[int]  # at most, until the model was ready to be trained
    training: list[int]  # at most, from then on
    # In the end: its part of memory that ranks share, which is in the other two. The sum over the
    # ranks is what there is of it on the host.
    shared: list[int]


def measure_peak(
    peer: Peer, context: RankContext, operation: BenchOperation, algorithm: str = "auto"
) -> Peak | str:
    """Return what the peer's steps take on each rank, or why it cannot do them.

    Every rank calls it, and gets the same.
    """
    found: list[int] = []

    def phases() -> Iterator[None]:
        """What a rank does, phase by phase; appends what it has at most, and shares."""
        width, peer.width = peer.width, SMALL
        step = peer.prepare(operation, 0, algorithm=algorithm)
        step.call()
        step.call()
        peer.width = width
        del step
        yield
        meter = Meter()
        yield
        step = peer.prepare(operation, 0, algorithm=algorithm)
        yield  # what is shared by two counts half for each, once both have it
        found.append(meter.peak())
        yield  # where ranks are threads, they have one peak
        meter.reset()
        yield
        for _ in range(STEPS_OF_A_PEAK):
            step.call()
        yield
        found.extend([meter.peak(), meter.shared()])

    over: str | None = ""
    phase = phases()
    while not over:  # all ranks begin each phase together
        over, problem = context.attempt(lambda: next(phase, "over"))
        if problem:
            return problem
    building, training, shared = map(list, zip(*context.gather(found), strict=True))
    return Peak(building=building, training=training, shared=shared)


# ------------------------------------------------------------------------------
# How much memory a process has, and had at most, is read from Linux's /proc:
#
#     peak       VmHWM: the most pages that were resident at the same time since the last reset,
#                which is a 5 written to /proc/self/clear_refs (proc(5)). Nothing is missed between
#                two looks, since the kernel keeps it
#     pages that processes share
#                RssShmem counts those that this process has touched, wholly, in each process. Of
#                /proc/self/smaps_rollup, Pss_Shmem divides each page by the processes that have it,
#                so that the sum over all ranks is what the host has given

GIVES_BACK: Mapping[str, str] = MappingProxyType({"MALLOC_MMAP_THRESHOLD_": "65536"})
"""The environment in which glibc's malloc gives the memory of a tensor back as soon as it is freed.

Else it raises that threshold by itself, up to 32 MiB, and keeps what is freed below it: what is
resident is then what was ever needed, and what lies unused between (mallopt(3))."""


def gives_back() -> bool:
    """Return whether `GIVES_BACK` means something here."""
    return platform.libc_ver()[0] == "glibc"


def environments() -> Mapping[str, Mapping[str, str]]:
    """Return the ways to measure a peak here: what each adds to the environment of the ranks."""
    return {"peak": {}} | ({"held": GIVES_BACK} if gives_back() else {})


def lacks_peaks() -> str:
    """Return why peaks cannot be measured here; empty if they can."""
    try:
        Meter()
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
        self.reset()
        before = _read_pages()
        self._before = before | {"VmHWM": before["VmRSS"]}

    def reset(self) -> None:
        """Forget the peak: from now on it is that of what follows."""
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """This rank's share of the most that it had since the last reset.

        That is what it has for itself, and its part of what is shared, peak - RssShmem + Pss_Shmem,
        with the last two as they are now: pages stay when they have been touched once.
        """
        grown = {name: now - self._before[name] for name, now in _read_pages().items()}
        return grown["VmHWM"] - grown["RssShmem"] + grown["Pss_Shmem"]

    def shared(self) -> int:
        """Its part of what it shares with others now. The sum over the ranks is the host's."""
        return _read_pages()["Pss_Shmem"] - self._before["Pss_Shmem"]


def _read_pages() -> dict[str, int]:
    """Bytes that are resident now and at most, and the shared ones of them, by Linux's names."""
    found = read_sizes("/proc/self/status") | read_sizes("/proc/self/smaps_rollup")
    return {name: found[name] for name in ("VmRSS", "VmHWM", "RssShmem", "Pss_Shmem")}
