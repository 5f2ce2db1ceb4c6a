"""One of four ranks never calls, and the others time out."""

from __future__ import annotations

import re
from collections.abc import Callable
from multiprocessing.connection import Connection
from random import Random
from time import monotonic
from typing import Any

import torch
from blame_acts import error_of, hold_the_interpreter
from blame_cast import Report, Verdict, cast
from waiting import wait_until

import phalanx
from phalanx import Backend

RANKS = 4
WITHIN = 1.0  # seconds after the deadline
WAYS = ("collective", "asynchronous", "messages", "groups")


def never_calls(
    way: str,
    seed: int,
    *,
    holding: bool = False,
    timeout: float = 1.0,
    within: float = WITHIN,
) -> Verdict:
    """All others name the one that has not called, within a second of their deadline.

    holding   it holds its interpreter, so that it does not even say that it waits for nobody
    """
    last = way in ("messages", "groups")  # a chain has its end
    culprit = RANKS - 1 if last else Random(seed).randrange(RANKS)
    with cast(RANKS) as company:
        company.start_all(wait_for_one, way, culprit, timeout)
        company.tell("hold" if holding else "sleep", culprit)
        company.tell("begin", *company.others(culprit))
        reports = {rank: company.hear(rank) for rank in company.others(culprit)}
        company.tell("end")
    seconds = [report.moment - timeout for report in reports.values()]
    wrong = [_wrong(rank, report, culprit) for rank, report in reports.items()]
    # Ranks do not begin at the same moment, and the first whose deadline passes tells the others.
    wrong += [f"{late:.2f} s" for late in seconds if not -timeout / 2 <= late <= within]
    return Verdict("; ".join(filter(None, wrong)), max(seconds))


def _wrong(rank: int, report: Report, culprit: int) -> str:
    named = rf"rank (\d \(rank )?{culprit}( of the job\)?)?, which (does not answer|has made no)"
    if report.error == "CollectiveTimeoutError" and re.search(named, report.text):
        return ""
    return f"rank {rank} got {report.error}, peer {report.peer}: {report.text}"


def wait_for_one(
    backend: Backend, wire: Connection, how: str, culprit: int, seconds: float
) -> None:
    """All but the culprit call, with a timeout. It is busy elsewhere until it is told.

    how   collective | asynchronous | messages (a chain: each receives from the next rank) |
          groups (a chain: each pair of neighbours is a group)
    """
    calls: dict[str, Callable[[], Any]] = {
        "collective": lambda: phalanx.all_reduce(torch.ones(10), backend, timeout=seconds),
        "asynchronous": lambda: _forget_for_a_while(backend, seconds),
        "messages": lambda: backend.recv(bytearray(1), backend.rank + 1, timeout=seconds),
        "groups": lambda: _in_pairs(backend, seconds),
    }
    backend.barrier()
    wire.send("met")
    if backend.rank == culprit:
        if wire.recv() == "hold":
            hold_the_interpreter(seconds + 2)
        wire.recv()
        return
    wire.recv()
    began = monotonic()
    report = error_of(calls[how])
    assert report is not None
    wire.send(report._replace(moment=report.moment - began))
    wire.recv()


def _forget_for_a_while(backend: Backend, seconds: float) -> None:
    pending = phalanx.async_all_reduce(torch.ones(10), backend, timeout=seconds)
    wait_until(pending.done, pause=0.02)
    pending.wait()


def _in_pairs(backend: Backend, seconds: float) -> None:
    """Rank k waits in the group of k and k+1, in which that one is not yet: it is in the next."""
    lower, upper = backend.rank, backend.rank + 1
    backend.subgroup([lower, upper]).barrier(timeout=seconds)
