"""What `phalanx watch` makes of the states of all ranks: who is slowest, who waits for whom."""

from __future__ import annotations

import io
import os
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.errors import MisuseError
from phalanx.ops.observe.watch.folder import WatchFolder
from phalanx.ops.observe.watch.gather import (
    Gatherer,
    choose,
    describe_chain,
    find_job,
    follow,
    ranks_in_words,
    stalled,
)
from phalanx.ops.observe.watch.state import JobState, RankState
from phalanx.ops.observe.watch.terminal import picture


def waits(rank: int, *for_: int, seconds: float = 5.0) -> RankState:
    return RankState(
        rank=rank,
        operation="all_reduce",
        signature="float32 [32], sum",
        sequence=41,
        where="train.py:57",
        seconds_in=seconds,
        waits_for=list(for_),
        waiting=0.9,
        step=117,
        pid=1000 + rank,
        host="node1",
        sent=12.3e6,
        received=12.3e6,
        memory=300 << 20,
    )


def computes(rank: int) -> RankState:
    return RankState(rank=rank, last_call="all_reduce #40", waiting=0.1, step=116)


def stopped(rank: int) -> RankState:
    return RankState(rank=rank, status="stopped", reason="process 7 is stopped (SIGSTOP)")


def job(*ranks: RankState, **more: object) -> JobState:
    fields = {"name": "train.py", "world_size": len(ranks), "time": 1.0} | more
    return JobState(ranks=list(ranks), **fields)  # type: ignore[arg-type]


def chain_of(*ranks: RankState) -> list[str]:
    return describe_chain(ranks, stalled(ranks))


# ------------------------------------------------------------------------------
# The chain of waits.


def test_the_chain_begins_with_its_cause_and_ends_with_the_rank_that_computes() -> None:
    assert chain_of(waits(0, 1), waits(1, 2), computes(2)) == [
        "rank 2 computes: it is in no call; its last was all_reduce #40",
        "rank 0 has waited 5.0 s in all_reduce #41 (float32 [32], sum) at train.py:57",
        "-> for rank 1, which has waited 5.0 s in all_reduce #41 (float32 [32], sum) at "
        "train.py:57",
        "-> for rank 2",
    ]


def test_a_stopped_rank_is_named_at_once_whatever_it_said_before() -> None:
    last_words = waits(1, 0)
    last_words.status, last_words.reason = "stopped", "process 7 is stopped (SIGSTOP)"
    chain = chain_of(waits(0, 1, seconds=0.1), last_words, waits(2, 1, seconds=0.1))
    assert chain[0] == "rank 1 is stopped: process 7 is stopped (SIGSTOP)"
    assert chain[2:] == ["-> for rank 1", "rank 2 waits, too"]


def test_short_waits_are_no_stall() -> None:
    assert chain_of(waits(0, 1, seconds=0.3), computes(1)) == []


def test_ranks_that_wait_for_each_other_are_a_circle() -> None:
    chain = chain_of(waits(0, 1, seconds=9.0), waits(1, 2), waits(2, 1))
    assert chain[0] == "ranks 1 to 2 wait for each other"
    assert chain[-1] == "-> for rank 1"


def test_a_rank_that_is_in_no_call_has_published_nothing() -> None:
    chain = chain_of(waits(0, 1), RankState(rank=1, status="starting"))
    assert chain[0] == "rank 1 has published nothing: it is in no call of Phalanx"


def test_waits_for_ranks_that_there_are_not_do_no_harm() -> None:
    state = Gatherer().complete(job(waits(0, 99, -1), computes(1)))
    assert (state.ranks[0].waits_for, state.chain) == ([], [])


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([3], "rank 3"), ([3, 5], "ranks 3, 5"), ([1, 2, 3, 4, 7], "ranks 1 to 4, 7")],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words


# ------------------------------------------------------------------------------
# The slowest, the silent, the unknown.


def test_the_slowest_is_at_the_end_of_the_chain_or_waits_least() -> None:
    assert Gatherer().complete(job(waits(0, 1), stopped(1))).slowest == 1
    quick = [waits(rank, 2, seconds=0.1) for rank in (0, 1)]
    assert Gatherer().complete(job(*quick, computes(2))).slowest == 2
    assert Gatherer().complete(job(*quick)).slowest is None


def test_a_rank_that_publishes_nothing_any_more_is_said_to_be_silent() -> None:
    times = iter([0.0, 0.0, 2.0, 4.0])
    gatherer = Gatherer(lambda: next(times))
    states = [gatherer.complete(job(computes(0), computes(1))) for _ in range(3)]
    reasons = [state.ranks[1].reason for state in states]
    assert reasons == ["", "", "it has published nothing for 4 s"]


def test_ranks_of_which_nothing_is_known_are_there() -> None:
    state = Gatherer().complete(job(computes(1), world_size=3))
    assert [rank.rank for rank in state.ranks] == [0, 1, 2]
    assert [rank.status for rank in state.ranks] == ["starting", "running", "starting"]


# ------------------------------------------------------------------------------
# The states, one after the other, and the end.


def states(folder: Path) -> list[JobState]:
    return list(follow(find_job(str(folder)), sleep=lambda _: None))


def test_the_last_state_says_how_the_job_has_ended(tmp_path: Path) -> None:
    WatchFolder(tmp_path).write("node-0.json", job(stopped(0), ended="rank 0 was killed"))
    assert [state.ended for state in states(tmp_path)] == ["rank 0 was killed"]


def test_a_job_whose_folder_goes_has_lost_its_launcher(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    WatchFolder(folder).write("node-0.json", job(computes(0)))

    def remove(_: float) -> None:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()

    first, last = follow(find_job(str(folder)), sleep=remove)
    assert not first.ended or first is last
    assert last.ended == "its launcher has gone without a word: it was killed, perhaps"


def test_a_job_without_a_launcher_ends_with_its_ranks(tmp_path: Path) -> None:
    left = RankState(rank=0, status="ended", pid=os.getpid())
    WatchFolder(tmp_path).write("rank-0.json", job(left))
    assert [state.ended for state in states(tmp_path)] == ["its ranks have left it"]


def test_of_several_jobs_one_has_to_be_chosen(tmp_path: Path) -> None:
    one, two = (WatchFolder(tmp_path / name) for name in ("one", "two"))
    a, b = job(computes(0), name="a.py"), job(computes(0), name="b.py", time=2.0)
    assert choose([(one, a)]) is one
    with pytest.raises(MisuseError, match=r"2 jobs run(.|\n)*phalanx watch .*two   # b.py on 1"):
        choose([(one, a), (two, b)])
    a.ended = b.ended = "it has ended well"
    assert choose([(one, a), (two, b)]) is two
    with pytest.raises(MisuseError, match="no job of yours runs on this host"):
        choose([])


# ------------------------------------------------------------------------------
# The terminal.


def shown(state: JobState, width: int, height: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(picture(state, width, height))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def crowd(size: int) -> JobState:
    ranks = [waits(rank, size - 2) for rank in range(size)]
    ranks[size - 2] = stopped(size - 2)
    for rank in ranks:
        rank.values = {"loss": 2.5 + rank.rank}
    return Gatherer().complete(job(*ranks, name="train.py --lr 3"))


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("size", [2, 64])
@pytest.mark.parametrize("height", [24, None])
def test_the_picture_fits_and_shows_what_matters(width: int, size: int, height: int | None) -> None:
    lines = shown(crowd(size), width, height)
    assert max(map(len, lines)) <= width
    assert height is None or len(lines) <= height - 1
    text = " ".join(lines)
    assert f"slowest: rank {size - 2}" in lines[0]
    assert "loss 2.5 (2.5 to" in lines[0]
    (row,) = [line for line in lines if line.lstrip().startswith(f"> {size - 2}")]
    assert "stopped" in row
    assert f"rank {size - 2} is stopped: process 7 is stopped" in text
    if size == 64 and height:
        assert any(line.startswith("and ") and "more, at step 117" in line for line in lines)
    if width == 200:
        assert "node1" in text
        assert "300M" in text


def test_once_and_json_are_for_programs(tmp_path: Path) -> None:
    ended = job(stopped(0), computes(1), ended="rank 0 was killed")
    WatchFolder(tmp_path).write("node-0.json", ended)
    runner = CliRunner()
    once = runner.invoke(app, ["watch", str(tmp_path), "--once"])
    assert once.exit_code == 0, once.output
    assert "the job has ended: rank 0 was killed" in once.output
    lines = runner.invoke(app, ["watch", str(tmp_path), "--json"]).output.splitlines()
    (state,) = [msgspec.json.decode(line, type=JobState) for line in lines]
    assert [rank.status for rank in state.ranks] == ["stopped", "running"]


def test_what_is_no_folder_of_a_job_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="there is no folder"):
        find_job(str(tmp_path / "none"))
    with pytest.raises(MisuseError, match="one folder, or a list of host:port"):
        find_job(str(tmp_path), "node1:9500")
    for how in ("--once", "--json"):
        empty = CliRunner().invoke(app, ["watch", str(tmp_path), how])
        assert isinstance(empty.exception, MisuseError)
        assert "nothing is published in" in str(empty.exception)
