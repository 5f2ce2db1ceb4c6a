"""A benchmark's figures as tables, notes, JSON, and a file for `auto`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.collectives.tuning import read_tuning
from phalanx.errors import MisuseError
from phalanx.ops.bench.peaks import Peak
from phalanx.ops.bench.report import BenchReport, as_json, as_tuning, legend, notes, tables
from phalanx.ops.bench.request import (
    BackendInfo,
    Entry,
    LeftOut,
    Message,
    ResultLine,
    make_request,
)

US = 1e-6
MIB = 1 << 20


def line(entry: Entry, *us: float, size: int = 1 << 20, **changes: object) -> ResultLine:
    seconds = [value * US for value in us]
    plain = ResultLine(
        operation="all_reduce",
        ranks=4,
        bytes=size,
        entry=entry,
        calls=3,
        seconds=seconds,
        bus=1.5,
    )
    return msgspec.structs.replace(plain, **changes)


def report(*messages: Message) -> BenchReport:
    request = make_request(["all_reduce"], backends="tcp,gloo", sizes="1M", rounds=3)
    made = BenchReport(request, [4], {"load": 0.1, "cores": 2})
    for message in messages:
        made.add(message)
    return made


TCP, GLOO, COPY = Entry("tcp"), Entry("gloo"), Entry("copy")


def text_of_table(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return "\n".join(row.rstrip() for row in out.getvalue().splitlines())


def cells(text: str, name: str) -> list[str]:
    """The cells of the first row with this name in one of its first two."""
    rows = [[cell.strip() for cell in row.strip("│").split("│")] for row in text.splitlines()]
    return next(row for row in rows if len(row) > 1 and name in row[:2])


def row_of(made: BenchReport, name: str) -> list[str]:
    """The cells of an entry's first row."""
    return cells("\n".join(text_of_table(table) for table in tables(made)), name)


def test_a_row_is_the_median_round_with_quartiles_bandwidths_and_the_ratio_to_gloo() -> None:
    made = report(line(TCP, 1000, 900, 1100), line(GLOO, 3000, 2500, 2000))
    assert row_of(made, "tcp") == [
        *("1M", "tcp", "1,000", "900", "950 - 1,050", "1.049", "1.573", "2.50", "0")
    ]
    assert row_of(made, "gloo")[-2] == ""  # beside itself


def test_each_kind_of_memory_is_compared_with_glooss_own_of_that_kind() -> None:
    fresh = Entry("gloo", "fresh")
    tcp_fresh, registered = Entry("tcp", "fresh"), Entry("tcp", "registered")
    made = report(line(tcp_fresh, 10), line(registered, 10), line(GLOO, 20), line(fresh, 40))
    assert row_of(made, "tcp fresh")[-2] == "4.00"
    assert row_of(made, "tcp registered")[-2] == "2.00"


def test_what_the_machine_can_do_is_not_compared_with_gloo() -> None:
    assert row_of(report(line(COPY, 10), line(GLOO, 20)), "copy")[-2] == ""


def test_a_training_step_is_compared_with_the_same_step_alone() -> None:
    step = {"operation": "ddp", "size": 0}
    alone = line(Entry("alone"), 100, **step)  # type: ignore[arg-type]
    made = report(line(TCP, 115, **step), line(GLOO, 180, **step), alone)  # type: ignore[arg-type]
    assert row_of(made, "tcp")[5:7] == ["1.15", "1.57"]


def test_the_time_of_an_optimizer_has_a_column_where_it_was_taken() -> None:
    step = {"operation": "ddp", "size": 0, "optimizer": 5e-6}
    made = report(line(Entry("tcp", algorithm="sharded"), 100, **step))  # type: ignore[arg-type]
    assert row_of(made, "tcp sharded")[5] == "5.0"
    assert json.loads(as_json(made))["lines"][0]["optimizer_us"] == pytest.approx(5)


def test_peaks_of_memory_have_columns_where_they_were_measured() -> None:
    step = {"operation": "fsdp", "size": 0}
    peak = Peak(building=[20 * MIB] * 2, training=[100 * MIB, 110 * MIB], shared=[32 * MIB] * 2)
    tcp = line(TCP, 100, peaks={"peak": peak}, **step)  # type: ignore[arg-type]
    held = msgspec.structs.replace(peak, training=[60 * MIB, 50 * MIB])
    made = report(tcp, line(GLOO, 120, peaks={"peak": peak, "held": held}, **step))  # type: ignore[arg-type]
    assert row_of(made, "tcp")[-3:] == ["110.0", "", "0"]
    assert row_of(made, "gloo")[-3:] == ["110.0", "60.0", "0"]
    explained = [text[:10].strip() for text in legend(tables(made))]
    assert explained[-3:] == ["peak MiB", "given back", "wrong"]
    first, second = json.loads(as_json(made))["lines"]
    assert "held_bytes" not in first
    assert second["held_bytes"] == msgspec.structs.asdict(held)


def test_ways_to_train_are_no_algorithms_that_auto_picks_from() -> None:
    step = {"operation": "ddp", "size": 0}
    sharded = Entry("tcp", algorithm="sharded")
    made = report(line(TCP, 120, **step), line(sharded, 100, **step))  # type: ignore[arg-type]
    assert not [text for text in notes(made) if "auto" in text]


def test_steps_are_compared_round_by_round_since_a_busy_moment_meets_all_alike() -> None:
    step = {"operation": "fsdp", "size": 0}
    alone = line(Entry("alone"), 100, 300, 100, **step)  # type: ignore[arg-type]
    made = report(line(TCP, 240, 330, 120, **step), alone)  # type: ignore[arg-type]
    assert row_of(made, "tcp")[5] == "1.20"
    assert json.loads(as_json(made))["lines"][0]["of_alone"] == pytest.approx(1.2)


def test_who_is_left_out_is_said_with_the_reason_once() -> None:
    made = report(
        LeftOut("mlx", 4, "mlx is not installed"),
        LeftOut("mpi", 2, "no mpirun"),
        LeftOut("deepspeed", 4, "it has no such operation", "all_gather"),
        LeftOut("deepspeed", 4, "it has no such operation", "barrier"),
    )
    assert list(notes(made)) == [
        "mlx is left out: mlx is not installed",
        "mpi is left out with 2 ranks: no mpirun",
        "deepspeed is left out of all_gather, barrier: it has no such operation",
    ]


def test_wrong_results_are_shouted() -> None:
    made = report(line(TCP, 10), line(GLOO, 10, wrong=3))
    assert made.wrong == [made.lines[1]]
    said = list(notes(made))
    assert said == ["WRONG: all_reduce 1M x 4 ranks, gloo: 3 elements were not what they had to be"]
    assert row_of(made, "gloo")[-1] == "3"


def test_results_that_mean_nothing_are_neither_right_nor_wrong() -> None:
    made = report(line(COPY, 10, wrong=None), line(GLOO, 20))
    assert made.wrong == []
    assert row_of(made, "copy")[-1] == ""
    said = list(notes(made))
    assert said[-1].endswith("every result is right but that of copy, which has none")


def test_a_busy_machine_is_mentioned() -> None:
    made = report(line(TCP, 10))
    assert not any("busy" in note for note in notes(made))
    made.machine["load"] = 1.7
    assert any("busy: 1.7 other processes ran on its 2 cores" in note for note in notes(made))


def test_each_column_is_explained_once() -> None:
    made = report(line(TCP, 10), line(GLOO, 20), line(GLOO, 20, size=8))
    shown = list(tables(made))
    names = [str(column.header) for column in shown[0].columns]
    said = list(legend(shown))
    assert [name for name in names if not any(text.startswith(name) for text in said)] == ["bytes"]
    assert "x gloo     the time of gloo, divided by this one: above 1, it is faster" in said
    assert len(said) == len(set(said)) == len(names) - 2


def test_how_far_auto_is_from_the_best_fixed_algorithm_is_said() -> None:
    ring, star = Entry("tcp", algorithm="ring"), Entry("tcp", algorithm="star")
    made = report(
        *(line(TCP, 11, size=8), line(ring, 20, size=8), line(star, 10, size=8)),
        *(line(TCP, 60), line(ring, 50), line(star, 90)),
    )
    (said,) = [note for note in notes(made) if "auto" in note]
    assert "tcp: auto takes 1.20 of the best" in said
    assert "at 1M, beside ring" in said


def test_json_has_every_round() -> None:
    made = report(
        "warming up",
        LeftOut("mpi", 4, "no mpirun"),
        line(TCP, 10, 30, 20),
        line(GLOO, 40),
    )
    read = json.loads(as_json(made))
    assert read["left_out"] == [{"peer": "mpi", "ranks": 4, "operation": "", "reason": "no mpirun"}]
    first = read["lines"][0]
    assert first["rounds_us"] == pytest.approx([10, 30, 20])
    assert (first["bytes"], first["wrong"], first["calls"]) == (1 << 20, 0, 3)
    assert first["median_us"] == pytest.approx(20)
    assert first["times_gloo"] == pytest.approx(2)
    assert first["bus_GBps"] == pytest.approx(1.5 * (1 << 20) / 20e-6 / 1e9)


@pytest.mark.parametrize("option", ["--json", "--tune"])
def test_a_file_in_no_folder_is_refused_before_anything_is_measured(
    option: str, tmp_path: Path
) -> None:
    path = tmp_path / "nowhere" / "file"
    result = CliRunner().invoke(app, ["bench", option, str(path), "--backends", "tcp"])
    assert isinstance(result.exception, MisuseError)
    assert "there is no folder" in str(result.exception)
    result = CliRunner().invoke(app, ["bench", option, "/dev/null", "--backends", "tcp"])
    assert isinstance(result.exception, MisuseError)
    assert "/dev/null is there, and no regular file" in str(result.exception)


def test_the_help_says_what_the_figures_are() -> None:
    result = CliRunner().invoke(app, ["bench", "--help"])
    assert result.exit_code == 0
    for word in ("NCCL tests", "--tune", "OMP_NUM_THREADS=1", "slowest rank"):
        assert word in " ".join(result.output.split())


def test_what_algorithms_took_becomes_a_file_for_auto() -> None:
    ring, star = Entry("tcp", algorithm="ring"), Entry("tcp", algorithm="star")
    made = report(
        BackendInfo("tcp", "TcpBackend", (0, 0, 1, 1)),
        *(line(ring, 20, size=8), line(star, 10, size=8), line(ring, 50), line(star, 90)),
        line(ring, 70, size=1 << 24),  # where the other has no figure
        *(line(TCP, 1), line(GLOO, 1)),
        line(Entry("tcp", "registered", "ring"), 1),
    )
    (table,) = read_tuning(as_tuning(made), "it").tables
    assert (table.backend, table.hosts, table.collective) == (
        "TcpBackend",
        (0, 0, 1, 1),
        "all_reduce",
    )
    assert table.sizes == (8, 1 << 20)
    assert table.seconds == {
        "ring": pytest.approx((20 * US, 50 * US)),
        "star": pytest.approx((10 * US, 90 * US)),
    }
