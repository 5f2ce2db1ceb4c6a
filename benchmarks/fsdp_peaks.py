"""The peak of memory of a training step of FSDP, beside torch's `fully_shard`. Needs Linux.

    python benchmarks/fsdp_peaks.py --backends shm,tcp,gloo

Each library is measured in fresh processes: those that are timed (`phalanx bench fsdp`) hold all
libraries, and what one has freed another uses again. And each is measured twice: as it is, and with
all freed memory given back, which the C library else keeps. The training is that of `phalanx bench
fsdp`; `alone` is one rank's, with the whole model and no communication.

    a small step       what is loaded, connected and started once is not counted
    the model is made  -> building: whole on each rank, as users do, then wrapped
    some steps         -> training
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from unittest.mock import patch

import msgspec
import torch
from other_libraries import PEERS as OTHERS
from rich.console import Console
from rich.table import Table

import phalanx
from phalanx import Backend
from phalanx.core.backend import DEFAULT_TIMEOUT
from phalanx.core.recorder import LOG_VARIABLE
from phalanx.ops.bench.operations import OPERATIONS, TrainingTask, task_of
from phalanx.ops.bench.peers import PEERS, Peer, Phalanx, RankContext
from phalanx.ops.machine import describe_machine, read_sizes

OURS = ("shm", "hybrid", "tcp")
NAMES = (*OURS, "stock", "stock+group-memory", "gloo", "alone")
BASELINE = "gloo"
TABLE = {**PEERS, **OTHERS}


def layer_bytes(task: TrainingTask) -> int:
    """Bytes of one layer's weight and bias."""
    return 4 * task.width * (task.width + 1)


def model_bytes(task: TrainingTask) -> int:
    """Bytes of all parameters, and of all gradients."""
    return task.depth * layer_bytes(task)


SMALL = 8
"""The width of layers that count for nothing."""


class Peak(msgspec.Struct, kw_only=True):
    """One library's peaks of memory, in processes that had nothing else to do.

    Bytes that each rank had besides what it began with:

    building  at most, until the model was ready to be trained
    training  at most, from then on
    shared    in the end: its part of memory that ranks share, which is in the other two. The sum
              over the ranks is what there is of it on the host
    """

    peer: str = ""
    gives_back: bool = False
    building: list[int]
    training: list[int]
    shared: list[int]


def measure_peak(peer: Peer, context: RankContext, steps: int) -> Peak | str:
    """What the peer's steps take on each rank, or why it cannot do them.

    Every rank calls it, and gets the same.
    """
    found: list[int] = []

    def phases() -> Iterator[None]:
        """What a rank does, phase by phase; appends what it has at most, and shares."""
        width, peer.width = peer.width, SMALL
        step = peer.prepare(OPERATIONS["fsdp"], 0)
        step.call()
        step.call()
        peer.width = width
        del step
        yield
        meter = Meter()
        yield
        step = peer.prepare(OPERATIONS["fsdp"], 0)
        yield  # what is shared by two counts half for each, once both have it
        found.append(meter.peak())
        yield  # where ranks are threads, they have one peak
        meter.reset()
        yield
        for _ in range(steps):
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


def benchmark_rank(backend: Backend, *, name: str, width: int, steps: int) -> Peak | str:
    """What each spawned process runs: one library's steps."""
    torch.set_num_threads(1)
    context = RankContext(backend, "127.0.0.1", DEFAULT_TIMEOUT, width)
    if name in OURS:
        return measure_peak(Phalanx(backend, context), context, steps)
    peer, problem = context.attempt(partial(TABLE[name].make, context))
    if peer is None or problem:
        return problem
    found = measure_peak(peer, context, steps)
    peer.close()
    return found


def measure(names: Sequence[str], ranks: int, width: int, steps: int) -> Iterator[Peak]:
    """Each library's peaks, in ranks of its own; says who is left out, and why."""
    for name in names:
        problem = TABLE[name].lacks()
        rank = partial(benchmark_rank, name=name, width=width, steps=steps)
        for given_back in (False, True)[: 1 + gives_back()]:
            if not problem:
                environ = {"OMP_NUM_THREADS": "1", LOG_VARIABLE: "warning"}
                environ |= GIVES_BACK if given_back else {}
                with patch.dict(os.environ, environ):
                    found = phalanx.spawn(rank, ranks, name if name in OURS else "tcp")[0]
                if isinstance(found, Peak):
                    yield msgspec.structs.replace(found, peer=name, gives_back=given_back)
                else:
                    problem = found
        if problem:
            print(f"{name} is left out: {problem}")


# ------------------------------------------------------------------------------
# What is shown of them.


def tables(peaks: Iterable[Peak], ranks: int) -> Iterator[Table]:
    """A table for each way of freeing."""
    modes: dict[bool, list[Peak]] = {}
    for peak in peaks:
        modes.setdefault(peak.gives_back, []).append(peak)
    for given_back, rows in modes.items():
        mode = ", freed memory given back" if given_back else ""
        table = Table(title=f"fsdp, {ranks} ranks: peak MiB of a rank{mode}", title_justify="left")
        for heading in ("", "building", "training", "all ranks", "of it shared", f"x {BASELINE}"):
            table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        base = next((peak for peak in rows if peak.peer == BASELINE), None)
        for peak in rows:
            largest = max(peak.training)
            compared = base is not None and peak is not base and peak.peer != "alone" and largest
            table.add_row(
                peak.peer,
                *(mib(max(peak.building)), mib(largest), mib(sum(peak.training))),
                mib(sum(peak.shared)),
                f"{max(base.training) / largest:.2f}" if base is not None and compared else "",
            )
        yield table


def mib(count: float) -> str:
    return f"{count / (1 << 20):,.1f}"


def theory(task: TrainingTask, ranks: int, steps: int) -> Iterator[str]:
    """What there has to be, and what the figures are."""
    yield (
        f"parameters are {mib(model_bytes(task))} MiB, gradients as much; shared out, both are "
        f"{mib(2 * model_bytes(task) / ranks)} a rank, and {mib(layer_bytes(task))} more for each "
        "layer that is whole, or whose gradients are"
    )
    yield (
        "peaks of memory are beyond what a process had before the model, on the rank that had "
        f"most; of building and wrapping it, and of {steps} steps; what ranks share counts once, "
        "divided among them"
    )


def as_json(peaks: Sequence[Peak], task: TrainingTask, ranks: int, steps: int) -> str:
    """What every rank had, in bytes, beside the plain theory."""
    figures = {
        "machine": describe_machine(),
        "ranks": ranks,
        "steps": steps,
        "parameter_bytes": model_bytes(task),
        "layer_bytes": layer_bytes(task),
        "peaks": [msgspec.to_builtins(peak) for peak in peaks],
    }
    return json.dumps(figures, indent=1) + "\n"


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
    """Whether `GIVES_BACK` means something here."""
    return platform.libc_ver()[0] == "glibc"


def lacks_peaks() -> str:
    """Why peaks cannot be measured here; empty if they can."""
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


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", default="shm,tcp,gloo,alone", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=0, help="of a layer (default: 2048)")
    parser.add_argument("--steps", type=int, default=10, help="of training")
    parser.add_argument("--json", type=Path, help="also write the figures of each rank there")
    asked = parser.parse_args()
    names = asked.backends.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"there is no backend {unknown[0]!r}; there are: {', '.join(NAMES)}")
    if asked.ranks < 2 or asked.steps < 1:
        parser.error("it takes two ranks and a step, or more")
    if reason := lacks_peaks():
        raise SystemExit(reason)
    peaks = list(measure(names, asked.ranks, asked.width, asked.steps))
    console, task = Console(highlight=False), task_of("fsdp", asked.width)
    for table in tables(peaks, asked.ranks):
        console.print(table)
    for text in theory(task, asked.ranks, asked.steps) if peaks else ():
        console.print(text, markup=False, soft_wrap=True)
    if asked.json:
        asked.json.write_text(as_json(peaks, task, asked.ranks, asked.steps))


if __name__ == "__main__":
    main()
