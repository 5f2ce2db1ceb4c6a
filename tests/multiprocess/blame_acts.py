"""What a rank does in a scenario. An act is told to go on, or to end, over its wire."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from multiprocessing.connection import Connection
from random import Random
from time import monotonic, sleep
from typing import Any

import torch
from blame_cast import Cast, Report
from blame_traffic import TRAFFIC, check, total

import phalanx
from phalanx import Backend, DistributedError


def hold_the_interpreter(seconds: float) -> None:
    """No other thread of this process runs Python meanwhile."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def compute(seconds: float) -> None:
    """Plain Python, which leaves other threads their turns."""
    until = monotonic() + seconds
    while monotonic() < until:
        sum(range(10_000))


SOME = 20  # sums
RESTS: dict[str, Callable[[float], None]] = {"hold": hold_the_interpreter, "compute": compute}


def error_of(call: Callable[[], Any]) -> Report | None:
    """What a call raises."""
    try:
        call()
    except DistributedError as error:
        return Report.of(error)
    return None


def first_error(backend: Backend, name: str, seed: int) -> Report:
    """Traffic until an error comes; the error, with what a later call on the whole group says.

    In a subgroup without the culprit, the first that a rank hears may be that a neighbour, told
    sooner, has left.
    """
    try:
        for _ in TRAFFIC[name](backend, Random(seed)):
            pass
    except DistributedError as error:
        first = Report.of(error)
    later = error_of(backend.barrier)
    if later is None or later.error != first.error:
        raise AssertionError(f"first {first}, then {later}")
    if f"rank {later.peer} " not in first.text and not first.text.endswith(" left"):
        raise AssertionError(f"first {first}, then {later}")
    return later._replace(moment=first.moment, text=f"{first.text} / {later.text}")


def until_error(backend: Backend, wire: Connection, name: str, seed: int) -> Report:
    """Traffic until an error comes."""
    backend.barrier()
    wire.send("met")
    return first_error(backend, name, seed)


def until_told(backend: Backend, wire: Connection, name: str, seed: int) -> int:
    """Traffic until the director tells rank 0 that it is enough; the number of steps."""
    steps = TRAFFIC[name](backend, Random(seed))
    backend.barrier()
    wire.send("met")
    for number, _ in enumerate(steps, 1):
        over = torch.tensor([float(wire.poll())])
        if phalanx.all_reduce_(over, backend).item():
            return number
    raise AssertionError("traffic does not end by itself")


def until_told_resting(
    backend: Backend, wire: Connection, name: str, seed: int, seconds: float
) -> int:
    """The same, but a rank that is told to is busy with something else for so long."""
    steps = TRAFFIC[name](backend, Random(seed))
    backend.barrier()
    wire.send("met")
    for number, _ in enumerate(steps, 1):
        word = wire.recv() if wire.poll() else ""
        if word in RESTS:
            RESTS[word](seconds)
            wire.send("here again")
        over = torch.tensor([float(word == "end")])
        if phalanx.all_reduce_(over, backend).item():
            return number
    raise AssertionError("traffic does not end by itself")


def went_on(company: Cast, culprit: int, *, after: float = 0.0) -> str:
    """End what `then_go_on` does after so many seconds: what went wrong with it, or ""."""
    sleep(after)
    company.tell("end")
    wrong = []
    for rank in company.others(culprit):
        how, sums = company.outcomes[rank]()
        if how != "returned" or not sums:
            wrong.append(f"rank {rank}, going on: {how} {sums}")
    return "; ".join(wrong)


def then_go_on(backend: Backend, wire: Connection, name: str, seed: int, culprit: int) -> int:
    """Traffic until an error; those that are left go on without the culprit until told.

    Says what the error was; then, after some sums, that it goes on. Returns the number of sums that
    were right. The culprit, if it comes back, tries once more.
    """
    backend.barrier()
    wire.send("met")
    wire.send(first_error(backend, name, seed))
    if backend.rank == culprit:
        wire.send(error_of(backend.barrier))
        wire.recv()
        return 0
    rest = backend.subgroup([rank for rank in range(backend.world_size) if rank != culprit])
    sums = 0
    while True:
        check(phalanx.all_reduce(torch.full((5000,), rest.rank + 1.0), rest), total(rest))
        over = torch.tensor([float(rest.rank == 0 and wire.poll())])
        if phalanx.all_reduce_(over, rest).item():
            return sums
        sums += 1
        if sums == SOME:
            wire.send("goes on")
