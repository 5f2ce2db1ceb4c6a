"""A whole benchmark: on ranks that are started here, or as one rank of a launcher's job."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import msgspec

from phalanx.bench.machine import describe_machine
from phalanx.bench.operations import OPERATIONS
from phalanx.bench.peers.table import PEERS
from phalanx.bench.records import PEAK, TIME, Ask, LeftOut, Message, Progress, Report
from phalanx.bench.resident import gives_back, lacks_peaks
from phalanx.bench.start import run_ranks
from phalanx.errors import MisuseError
from phalanx.launch.environment import read_environment

__all__ = ["new_report", "run_bench"]

_PEAKS = "the peak of memory"
_PEAKS_GIVEN_BACK = f"{_PEAKS} with all freed memory given back"


def new_report(ask: Ask, ranks: Sequence[int]) -> Report:
    """A report without figures. Under a launcher the number of ranks is the launcher's."""
    world = read_environment(os.environ)
    return Report(
        ask=ask,
        ranks=list(ranks) if world is None else [world.world_size],
        machine=describe_machine(),
    )


def run_bench(report: Report, heard: Callable[[Message], None]) -> bool:
    """Measure what the report asks; it fills up, and `heard` gets every message as it comes.

    Under a launcher this process is one of its ranks. Returns whether the report is this
    process's: on every rank but 0 it stays empty. Raises what `run_ranks` does, and `MisuseError`
    if nothing but peaks of memory is asked for under a launcher.
    """

    def hear(message: Message) -> None:
        report.add(message)
        heard(message)

    ask = report.ask
    held = [name for name in ask.operations if OPERATIONS[name].held and PEAK in ask.measure]
    world = read_environment(os.environ)
    if world is not None:
        from phalanx.bench.rank import run_rank  # noqa: PLC0415 -- only if this is one

        reason = "it takes fresh processes for each library, and these are a launcher's"
        if TIME not in ask.measure:
            raise MisuseError(f"--measure {PEAK}: {reason}; run it without one")
        run_rank(msgspec.structs.replace(ask, measure=(TIME,)), hear)
        for name in held if world.rank == 0 else ():
            hear(LeftOut(_PEAKS, world.world_size, reason, name))
        return world.rank == 0
    for number in report.ranks:
        if TIME in ask.measure:
            for message in run_ranks(msgspec.structs.replace(ask, measure=(TIME,)), number):
                hear(message)
        for name in held:
            for message in _run_peaks(report, name, number):
                hear(message)
    return True


def _run_peaks(report: Report, operation: str, ranks: int) -> Iterator[Message]:
    """One library after the other, each with ranks of its own that have nothing else to do."""
    if reason := lacks_peaks():
        yield LeftOut(_PEAKS, ranks, reason, operation)
        return
    if not gives_back():
        reason = "it takes the malloc of glibc (mallopt(3))"
        yield LeftOut(_PEAKS_GIVEN_BACK, ranks, reason, operation)
    for name in report.ask.backends:
        row = PEERS[name]
        if report.lacks(name, operation, ranks) or (row.machine and not row.trains):
            continue
        if problem := row.lacks() or ("" if row.trains else "it has no such operation"):
            yield LeftOut(name, ranks, problem, operation)
            continue
        for given_back in (False, True)[: 1 + gives_back()]:
            yield Progress(f"{operation}, {ranks} ranks: the peak of {name}'s memory")
            ask = msgspec.structs.replace(
                report.ask,
                backends=(name,),
                operations=(operation,),
                measure=(PEAK,),
                gives_back=given_back,
            )
            yield from run_ranks(ask, ranks)
