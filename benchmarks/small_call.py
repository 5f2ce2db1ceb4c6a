"""Where the time of a small call goes: `phalanx run -n 2 benchmarks/small_call.py`.

An all_reduce in place of 8 bytes, in shared memory, whose path is stamped with the clock at five
places. Beside it, in the same rounds:

    whole     the call without stamps
    by hand   its least in Python: copy the input to shared memory, raise a flag, wait for the
              other's, add. Nothing is checked, compared, counted or remembered
    sum       `torch.add(out=)` of two such tensors, which both of them need

Each row is the median of rank 0's calls. The stamps themselves take some 0.1 us each.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from time import perf_counter
from typing import Any

import torch
import typer
from rich import print as show

import phalanx
from phalanx import Backend, all_reduce_
from phalanx.core.checker import Checker
from phalanx.transport.shm.epoch import ShmEpoch

# Where the path is stamped: the function, whether at its end, and what the time since the stamp
# before was for.
STAMPS: tuple[tuple[type, str, bool, str], ...] = (
    (Backend, "run", False, "check the tensor, find the kept program"),
    (Checker, "next_call", True, "take the lock, find the caller's line, number and hash the call"),
    (ShmEpoch, "begin", False, "make the step, copy the input to shared memory"),
    (ShmEpoch, "begin", True, "show the hash, raise the flag, look who sleeps"),
    (ShmEpoch, "ready", True, "wait for the other rank, compare its hash"),
)
LAST = "add, remember the call, return"


@contextmanager
def stamped(stamps: list[float]) -> Iterator[None]:
    """Stamp the path of calls in here."""
    before = {(of, name): getattr(of, name) for of, name, *_ in STAMPS}

    def stamping(function: Callable[..., Any], starts: bool, ends: bool) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if starts:
                stamps.append(perf_counter())
            result = function(*args, **options)
            if ends:
                stamps.append(perf_counter())
            return result

        return call

    try:
        for (of, name), function in before.items():
            places = {end for one, called, end, _ in STAMPS if (one, called) == (of, name)}
            setattr(of, name, stamping(function, False in places, True in places))
        yield
    finally:
        for (of, name), function in before.items():
            setattr(of, name, function)


def by_hand(backend: Backend) -> Callable[[torch.Tensor], None]:
    """Return the least that does it, for two ranks and 8 bytes."""
    memory = backend.common(64, torch.int64)
    assert memory is not None
    words = memoryview((ctypes.c_int64 * 64).from_address(memory.data_ptr())).cast("B").cast("q")
    me, other = 8 * backend.rank, 8 * (1 - backend.rank)
    slots = memory.view(torch.float32)  # two of each rank, taken in turn, beside its flag
    views = [(slots[2 * me + at :][:2], slots[2 * other + at :][:2]) for at in (4, 8)]
    mine = [view.data_ptr() for view, _ in views]
    turn = 0

    def reduce(tensor: torch.Tensor, memory: torch.Tensor = memory) -> None:
        nonlocal turn
        turn += 1
        ctypes.memmove(mine[turn % 2], tensor.data_ptr(), 8)
        words[me] = turn
        while words[other] < turn:
            pass
        torch.add(*views[turn % 2], out=tensor)

    return reduce


def main(calls: int = 2000, rounds: int = 15) -> None:
    """Print the table."""
    with phalanx.init("shm") as backend:
        if backend.world_size != 2:
            raise typer.BadParameter("it takes two ranks: phalanx run -n 2")
        tensor, plain = torch.ones(2), by_hand(backend)
        one, two = torch.ones(2), torch.ones(2)
        kinds: dict[str, Callable[[], object]] = {
            "whole": lambda: all_reduce_(tensor, backend),
            "by hand": lambda: plain(tensor),
            "sum": lambda: torch.add(one, two, out=tensor),
        }
        times: dict[str, list[float]] = {name: [] for name in [*kinds, *(s[3] for s in STAMPS)]}
        times[LAST] = []
        for _ in range(rounds):
            for name, call in kinds.items():
                backend.barrier()
                for _ in range(calls):
                    tensor.fill_(1.0)
                    began = perf_counter()
                    call()
                    times[name].append(perf_counter() - began)
                assert tensor.tolist() == [2.0, 2.0]
            stamps: list[float] = []
            with stamped(stamps):
                backend.barrier()
                for _ in range(calls):
                    tensor.fill_(1.0)
                    stamps.clear()
                    began = perf_counter()
                    all_reduce_(tensor, backend)
                    ends = [*stamps, perf_counter()]
                    if len(ends) == len(STAMPS) + 1:  # it took the usual path
                        for what, at in zip([*(s[3] for s in STAMPS), LAST], ends, strict=True):
                            times[what].append(at - began)
                            began = at
        if backend.rank == 0:
            table(times)


def table(times: dict[str, list[float]]) -> None:
    """Print the medians."""
    show("all_reduce_ of 8 bytes, 2 ranks, shared memory")
    show("| part | us |")
    show("|---|---:|")
    for what, its in times.items():
        show(f"| {what} | {1e6 * statistics.median(its):.1f} |")


if __name__ == "__main__":
    typer.run(main)
