from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forms import sizes
from hypothesis import given
from hypothesis import strategies as st
from trace_files import Rank
from typer.testing import CliRunner

from phalanx import Backend, all_reduce, barrier, simulate
from phalanx.cli.app import app
from phalanx.cli.main import main
from phalanx.errors import MisuseError
from phalanx.ops.observe.trace.merged import merge


def events(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())["traceEvents"]
    assert isinstance(found, list)
    return found


def slices(path: Path) -> list[tuple[int, float, float]]:
    return [(e["pid"], e["ts"], e["dur"]) for e in events(path) if e["ph"] == "X"]


def test_the_earliest_operation_starts_at_zero_and_all_are_in_order(tmp_path: Path) -> None:
    first, second = Rank(tmp_path, 0), Rank(tmp_path, 1)
    second.did(1, 50, for_=5)  # written by their ends: not in the order of their starts
    second.did(0, 7)
    first.did(0, 20)
    merged = merge(tmp_path)
    assert merged.path == tmp_path / "merged.json"
    assert slices(merged.path) == [(1, 0.0, 10.0), (0, 13.0, 10.0), (1, 43.0, 5.0)]
    names = {
        e["pid"]: e["args"]["name"] for e in events(merged.path) if e["name"] == "process_name"
    }
    assert names == {0: "rank 0 (a)", 1: "rank 1 (a)"}


def test_each_rank_is_summed_up(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, of=1)
    for sequence in range(3):
        rank.did(sequence, 20 * sequence)
    rank.did(3, 90, args={"error": "rank 1 was lost"})
    (summary,) = merge(tmp_path).ranks
    assert (summary.operations, summary.bytes, summary.errors) == (4, 4 << 20, 1)


def test_the_straggler_is_who_came_last_by_the_time_to_the_one_before(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, rank, of=3) for rank in range(3)]
    for sequence, starts in enumerate([(0, 5, 100), (200, 210, 205), (400, 401, 500)]):
        for rank, start in zip(ranks, starts, strict=True):
            rank.did(sequence, start)
    ranks[0].did(3, 900)  # nobody else came: a collective without a last one
    ranks[0].did(4, 950, cat="message", name="send")
    merged = merge(tmp_path)
    assert [rank.last for rank in merged.ranks] == [0, 1, 2]
    assert [round(rank.late * 1e6) for rank in merged.ranks] == [0, 5, 95 + 99]
    assert merged.profile.collectives == 3


def test_groups_of_the_same_members_are_told_apart(tmp_path: Path) -> None:
    pair = {"group": "ranks [0, 2]"}
    for rank, (early, late) in ((0, (0, 100)), (2, (10, 130))):
        trace = Rank(tmp_path, rank, of=3)
        trace.did(0, early, tid=1 + rank, args=pair)  # each rank numbers its groups by itself
        trace.did(0, late, tid=5 + rank, args=pair)
    merged = merge(tmp_path)
    assert merged.profile.collectives == 2
    assert round(merged.ranks[1].late * 1e6) == 10 + 30


def test_a_restarted_rank_has_two_runs_on_one_line_of_ranks(tmp_path: Path) -> None:
    for run in range(2):
        for rank in range(2):
            Rank(tmp_path, rank, run=run).did(0, run * 1e6 + 10 * rank)
    merged = merge(tmp_path)
    assert [rank.runs for rank in merged.ranks] == [2, 2]
    assert merged.profile.collectives == 2
    lines = [e["args"]["name"] for e in events(merged.path) if e["name"] == "thread_name"]
    assert sorted(lines) == ["world", "world", "world, run 1", "world, run 1"]


def test_operations_that_overlap_are_on_lines_of_their_own(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, of=1)
    for sequence, start in enumerate((0, 4, 8, 10)):
        rank.did(sequence, start)
    lines = [e["tid"] for e in events(merge(tmp_path).path) if e["ph"] == "X"]
    assert lines == [1, 2, 3, 1]


def test_what_a_killed_rank_left_unwritten_is_no_error(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0)
    rank.did(0, 0)
    rank.did(1, 20)
    whole = rank.path.read_bytes()
    for size in (*range(0, len(whole), sizes(7, 1)), len(whole)):
        rank.path.write_bytes(whole[:size])
        merged = merge(tmp_path)
        complete = [line for line in whole[:size].split(b"\n") if line.strip(b",").endswith(b"}}")]
        assert merged.ranks[0].operations == max(0, len(complete) - 2)
        assert not any("no events" in note for note in merged.notes)


def test_lines_that_are_no_events_are_counted_and_left_out(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0)
    with rank.path.open("ab") as file:
        file.write(b'{"ph":"X","ts":"soon"},\n\x00\n[1,2],\n{"ph":"X","name":"a","args":3},\n')
        file.write(b'{"ph":"X","name":"a","args":{"more":"\xff"}},\n' + 5000 * b"[" + b"\n")
    rank.did(0, 0)
    merged = merge(tmp_path)
    assert merged.ranks[0].operations == 1
    assert any("6 lines that are no events" in note for note in merged.notes)


def test_an_event_without_times_is_one_that_took_none(tmp_path: Path) -> None:
    with Rank(tmp_path, 0).path.open("a") as file:
        file.write('{"ph":"X","name":"a"},\n')
    assert slices(merge(tmp_path).path) == [(0, 0.0, 0.0)]


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_no_file_is_too_strange(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("strange")
    (folder / "rank-0-1-0.json").write_bytes(b"\n".join(lines))
    json.loads(merge(folder).path.read_bytes())


def test_several_hosts_and_missing_ranks_are_noted(tmp_path: Path) -> None:
    Rank(tmp_path, 0, of=4).did(0, 0)
    Rank(tmp_path, 2, of=4, host="b").did(0, 0)
    notes = merge(tmp_path).notes
    assert any("not corrected" in note and "a, b" in note for note in notes)
    assert "there is no trace of ranks 1, 3 of 4" in notes


def test_a_merged_trace_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    Rank(tmp_path, 0).did(0, 0)
    merge(tmp_path)
    merge(tmp_path)
    mine = tmp_path / "mine.json"
    mine.write_text('{"traceEvents":[]}')
    with pytest.raises(MisuseError, match=r"mine\.json is there and no merged trace"):
        merge(tmp_path, mine)
    assert mine.read_text() == '{"traceEvents":[]}'
    with pytest.raises(MisuseError, match="cannot be written"):
        merge(tmp_path, tmp_path / "missing" / "out.json")


@pytest.mark.parametrize(
    ("name", "words"),
    [("missing", "there is no folder"), ("empty", "there is no trace in"), ("file", "no folder")],
)
def test_nothing_to_merge_is_said(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(MisuseError, match=words):
        merge(tmp_path / name)


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "rank-0-1-0.json").mkdir()
    with pytest.raises(MisuseError, match="a trace cannot be read"):
        merge(tmp_path)


def test_the_command_shows_a_row_a_rank(tmp_path: Path) -> None:
    for rank in range(2):
        Rank(tmp_path, rank).did(0, 2e6 * rank, for_=3e6)
    result = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines()]
    assert ["0", "1", "1.0", "2.000", "1.000", "0", "0", "0.000"] in rows
    assert ["1", "1", "1.0", "0.000", "3.000", "0", "1", "2.000"] in rows
    assert "Rank 1 (a) held the others up: it was last to begin 1 of 1 collectives" in result.output
    assert f"{tmp_path}/merged.json" in result.output.replace("\n", "")


def test_the_command_ends_with_2_where_there_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["phalanx", "trace", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("phalanx: there is no trace in")


def test_what_ranks_write_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TRACE", str(tmp_path))
    simulate(communicate, 3)
    merged = merge(tmp_path)
    assert [rank.operations for rank in merged.ranks] == [3, 3, 2]
    assert merged.profile.collectives == 3
    assert merged.notes == []
    lines = [e for e in events(merged.path) if e["name"] == "thread_name"]
    named = {(line["pid"], line["args"]["name"]) for line in lines}
    assert {(2, "world"), (0, "ranks [0, 1]"), (1, "ranks [0, 1]")} <= named


def test_what_ranks_add_to_an_event_is_passed_on(tmp_path: Path) -> None:
    Rank(tmp_path, 0, of=1).did(0, 0, args={"more": [1, "\N{SNOWMAN}"], "sequence": 7})
    (event,) = [event for event in events(merge(tmp_path).path) if event["ph"] == "X"]
    assert event["args"]["more"] == [1, "\N{SNOWMAN}"]
    assert event["args"]["sequence"] == 7


def communicate(backend: Backend) -> None:
    all_reduce(torch.ones(10), backend)
    barrier(backend)
    if backend.rank < 2:
        barrier(backend.subgroup([0, 1]))


def test_a_trace_says_nothing_to_a_terminal_but_plain_text(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, of=1, host="\x1b]0;owned\x07")
    rank.did(0, 0)
    ended = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert ended.exit_code == 0
    assert ended.stdout.replace("\n", "").isprintable()
    assert merge(tmp_path).ranks[0].host.strip() == "]0;owned"


def test_what_lies_where_a_merged_trace_is_written_is_not_written_into(tmp_path: Path) -> None:
    traces, victim = tmp_path / "traces", tmp_path / "victim"
    traces.mkdir()
    Rank(traces, 0, of=1).did(0, 0)
    victim.write_text("my only key")
    (traces / "merged.json.part").symlink_to(victim)
    merge(traces)
    (traces / "merged.json").unlink()
    (traces / "merged.json").symlink_to(victim)
    with pytest.raises(MisuseError, match="it is a link"):
        merge(traces)
    assert victim.read_text() == "my only key"


def test_the_folder_of_traces_may_be_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "traces").symlink_to("elsewhere")
    monkeypatch.setenv("PHALANX_TRACE", str(tmp_path / "traces"))
    simulate(barrier, 2)
    assert len(list((tmp_path / "elsewhere").glob("rank-*.json"))) == 2
