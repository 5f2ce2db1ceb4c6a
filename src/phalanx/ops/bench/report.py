"""A benchmark's figures: tables to read, with notes; JSON for programs; and the file for `auto`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.table import Table

from phalanx.collectives.schedules import COLLECTIVES
from phalanx.collectives.tuning import FORMAT, Tuning, TuningTable
from phalanx.ops.bench.operations import OPERATIONS, task_of
from phalanx.ops.bench.peaks import Peak
from phalanx.ops.bench.peers import MACHINE, PEERS, PeerTable
from phalanx.ops.bench.request import (
    BackendInfo,
    BenchRequest,
    Entry,
    LeftOut,
    Message,
    ResultLine,
    show_size,
)

_ALONE = "alone"  # the peer without communication, whose training step is the measure of others
_BUSY = 0.25  # processes for each core, beyond which figures are doubtful


@dataclass
class BenchReport:
    """A benchmark's request, its peers, the machine, and the findings."""

    request: BenchRequest
    ranks: list[int]
    machine: dict[str, Any]
    peers: PeerTable = field(default_factory=lambda: PEERS, repr=False)
    lines: list[ResultLine] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    backends: list[BackendInfo] = field(default_factory=list)

    def add(self, message: Message) -> None:
        """Keep a finding, unless it is mere progress."""
        if isinstance(message, ResultLine):
            self.lines.append(message)
        elif isinstance(message, LeftOut):
            self.left_out.append(message)
        elif isinstance(message, BackendInfo):
            self.backends.append(message)

    @property
    def wrong(self) -> list[ResultLine]:
        return [line for line in self.lines if line.wrong]

    def beside(self, line: ResultLine, peer: str) -> ResultLine | None:
        """Return the same, measured with `peer`: in the same kind of memory, or else its own."""
        wanted = line.operation, line.ranks, line.bytes
        there = {
            other.entry: other
            for other in self.lines
            if (other.operation, other.ranks, other.bytes) == wanted
        }
        return there.get(Entry(peer, line.entry.memory)) or there.get(Entry(peer))


# ------------------------------------------------------------------------------
# Figures, and JSON of them.


def _indented(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def as_json(report: BenchReport) -> bytes:
    """Return the request, the machine, and for each line its figures and all rounds."""
    return _indented(
        {
            "ask": report.request,
            "machine": report.machine,
            "left_out": [msgspec.structs.asdict(left) for left in report.left_out],
            "lines": [_figures(report, line) for line in report.lines],
        }
    )


def _figures(report: BenchReport, line: ResultLine) -> dict[str, Any]:
    low, high = line.quartiles
    bandwidth = line.bytes / line.median / 1e9
    base, alone = (report.beside(line, peer) for peer in (report.request.baseline, _ALONE))
    return {
        "operation": line.operation,
        "ranks": line.ranks,
        "bytes": line.bytes,
        "contender": str(line.entry),
        **msgspec.structs.asdict(line.entry),
        "calls": line.calls,
        "median_us": line.median * 1e6,
        "quartiles_us": [low * 1e6, high * 1e6],
        "lowest_us": min(line.seconds) * 1e6,
        "highest_us": max(line.seconds) * 1e6,
        "algorithm_GBps": bandwidth,
        "bus_GBps": bandwidth * line.bus,  # comparable with the limit of one link
        f"of_{_ALONE}": line.times(alone) if alone else None,
        f"times_{report.request.baseline}": base.times(line) if base else None,
        "optimizer_us": None if line.optimizer is None else line.optimizer * 1e6,
        **{f"{name}_bytes": msgspec.structs.asdict(peak) for name, peak in line.peaks.items()},
        "wrong": line.wrong,
        "rounds_us": [seconds * 1e6 for seconds in line.seconds],
    }


# ------------------------------------------------------------------------------
# Tables.


def tables(report: BenchReport) -> Iterator[Table]:
    """Yield a table for each operation and number of ranks."""
    by_operation = itertools.groupby(report.lines, key=lambda line: (line.operation, line.ranks))
    for (operation, ranks), lines in by_operation:
        yield _table(report, operation, ranks, list(lines))


def _table(report: BenchReport, operation: str, ranks: int, lines: list[ResultLine]) -> Table:
    row, baseline = OPERATIONS[operation], report.request.baseline
    title = f"{operation}, {ranks} ranks{report.request.circumstances}"
    rates = {"alg GB/s": "algorithm_GBps", "bus GB/s": "bus_GBps"}
    if row.training:
        title += f": {task_of(operation, report.request.width, report.request.optimizer)}"
        rates = {f"of {_ALONE}": f"of_{_ALONE}"}
    table = Table(title=title, title_justify="left")
    inside = ["optimizer"] if any(line.optimizer is not None for line in lines) else []
    memory = {
        name: way
        for name, way in (("peak MiB", "peak"), ("given back", "held"))
        if any(way in line.peaks for line in lines)
    }
    names = ("bytes", "", "us", "lowest", "quartiles", *inside, *rates, f"x {baseline}", *memory)
    for name in (*names, "wrong"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    digits = 2 if row.training else 3
    for size, group in itertools.groupby(lines, lambda line: line.bytes):
        table.add_section()
        for number, line in enumerate(group):
            figures, is_machine = _figures(report, line), line.entry.peer in MACHINE
            is_base = report.beside(line, baseline) == line
            moved = row.training or row.moves  # of a barrier there is no bandwidth
            table.add_row(
                show_size(size) if number == 0 and row.moves else "",
                figures["contender"],
                _us(figures["median_us"]),
                _us(figures["lowest_us"]),
                " - ".join(map(_us, figures["quartiles_us"])),
                *(_us(figures[f"{name}_us"]) for name in inside),
                *(_ratio(figures[name], digits) if moved else "" for name in rates.values()),
                "" if is_base or is_machine else _ratio(figures[f"times_{baseline}"]),
                *(_mib(line.peaks.get(way)) for way in memory.values()),
                _wrong(line.wrong),
                style="dim" if is_machine else "",
            )
    return table


_COLUMNS = {
    "us": "microseconds of a call on the slowest rank, in the median round",
    "lowest": "the same, in the fastest round",
    "quartiles": "half of the rounds lie between these",
    "optimizer": "microseconds of the step that the optimizer took",
    "alg GB/s": "bytes divided by the time",
    "bus GB/s": "what each rank's link had to carry in that time",
    f"of {_ALONE}": "the time, divided by that of the same step without communication",
    "peak MiB": "the most memory that a rank had in steps, beyond what it had before the model",
    "given back": "the same, where the C library gives freed memory back at once",
    "wrong": "elements that were not what they had to be, in all rounds",
}


def legend(shown: Iterable[Table]) -> Iterator[str]:
    """Yield a line for each column of these tables."""
    for name in dict.fromkeys(str(column.header) for table in shown for column in table.columns):
        if name.startswith("x "):
            yield f"{name:11}the time of {name[2:]}, divided by this one: above 1, it is faster"
        elif name in _COLUMNS:
            yield f"{name:11}{_COLUMNS[name]}"


def _ratio(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _mib(peak: Peak | None) -> str:
    return "" if peak is None else f"{max(peak.training) / (1 << 20):,.1f}"


def _wrong(count: int | None) -> str:
    if count is None:
        return ""
    return f"[bold red]{count}[/bold red]" if count else "0"


def _us(us: float | None) -> str:
    return "" if us is None else f"{us:,.{1 if us < 100 else 0}f}"


# ------------------------------------------------------------------------------
# Notes.


def notes(report: BenchReport) -> Iterator[str]:
    """Yield notes: on peers left out, wrong results, and whether `auto` is right."""
    reasons: dict[tuple[str, str], list[LeftOut]] = {}
    for left in report.left_out:
        reasons.setdefault((left.peer, left.reason), []).append(left)
    for (peer, reason), all_left in reasons.items():
        ranks = [left.ranks for left in all_left]
        where = "" if set(ranks) == set(report.ranks) else f" with {_join(ranks)} ranks"
        what = _join(left.operation for left in all_left if left.operation)
        yield f"{peer} is left out{' of ' + what if what else ''}{where}: {reason}"
    load, cores = report.machine.get("load"), report.machine.get("cores")
    if load and cores and load > _BUSY * cores:
        yield (
            f"the machine was busy: {load:g} other processes ran on its {cores} cores before this "
            "began, so times are longer and less certain"
        )
    yield from _notes_on_auto(report.lines)
    for line in report.wrong:
        yield f"WRONG: {line}: {line.wrong} elements were not what they had to be"
    if report.lines and not report.wrong:
        rounds = len(report.lines[0].seconds)
        unchecked = [line.entry.peer for line in report.lines if line.wrong is None]
        but = f" but that of {_join(unchecked)}, which has none" if unchecked else ""
        yield (
            f"{len(report.lines)} lines, each the median of {rounds} rounds; every result is "
            f"right{but}"
        )


def _join(things: Iterable[object]) -> str:
    return ", ".join(str(thing) for thing in dict.fromkeys(things))


def _notes_on_auto(lines: list[ResultLine]) -> Iterator[str]:
    """Note the distance of `auto` from the best named algorithm, if both were measured."""
    collectives = [line for line in lines if not OPERATIONS[line.operation].training]
    for (operation, ranks, entry), by_size in sorted(_medians(collectives).items()):
        ratios: list[tuple[float, int, str]] = []
        for size, by_name in sorted(by_size.items()):
            auto = by_name.pop("auto", None)
            if auto is not None and by_name:
                best = min(by_name, key=by_name.__getitem__)
                ratios.append((auto / by_name[best], size, best))
        if ratios:
            ratio, size, best = max(ratios, key=lambda found: found[0])
            yield (
                f"{operation}, {ranks} ranks, {entry}: auto takes {ratio:.2f} of the best "
                f"algorithm's time at most (at {show_size(size)}, beside {best})"
            )


def _medians(lines: list[ResultLine]) -> dict[tuple[str, int, str], dict[int, dict[str, float]]]:
    """Return (operation, ranks, peer with its memory) -> bytes -> algorithm -> seconds."""
    medians: dict[tuple[str, int, str], dict[int, dict[str, float]]] = {}
    for line in lines:
        entry = str(Entry(line.entry.peer, line.entry.memory))
        by_size = medians.setdefault((line.operation, line.ranks, entry), {})
        by_size.setdefault(line.bytes, {})[line.entry.algorithm] = line.median
    return medians


# ------------------------------------------------------------------------------
# The file that `auto` picks algorithms by (PHALANX_TUNING).


def as_tuning(report: BenchReport) -> bytes:
    """Return a table for each backend, number of ranks and collective that was measured.

    From measurements in ordinary memory, with algorithms requested by name.
    """
    tables = []
    medians = _medians(report.lines)
    for info, collective in itertools.product(report.backends, COLLECTIVES):
        by_size = medians.get((collective, len(info.hosts), info.peer), {})
        measured = set().union(*by_size.values())
        names = [name for name in COLLECTIVES[collective] if name in measured]
        sizes = [size for size, by_name in sorted(by_size.items()) if by_name.keys() >= set(names)]
        if names and sizes:
            table = TuningTable(
                backend=info.backend,
                hosts=info.hosts,
                collective=collective,
                sizes=tuple(sizes),
                seconds={
                    name: tuple(round(by_size[size][name], 9) for size in sizes) for name in names
                },
            )
            tables.append(table)
    return _indented(Tuning(format=FORMAT, tables=tuple(tables)))
