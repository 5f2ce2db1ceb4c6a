"""A failed process of an elastic job is started again alone; here small programs, not ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import (
    BackendUnavailableError,
    DistributedError,
    InvalidWorldSizeError,
    MisuseError,
)
from phalanx.launch import elastic_run
from phalanx.launch.elastic_run import (
    ElasticOptions,
    Replacements,
    elastic_options,
    exit_code,
    pause_before_restart,
)
from phalanx.launch.environment import ElasticJob, read_elastic_environment
from phalanx.launch.reaper import Reaper
from phalanx.launch.report import RankExit, RankReport, root_cause
from phalanx.launch.signals import Signals
from phalanx.launch.supervisor import Supervisor

PAUSE = "import signal; signal.pause()"
TOKEN = "a token of many letters"
ETCD = "etcd://a:2379,b:2379"


def waits_for(path: Path, lives: int, then: str) -> str:
    """A program that waits until the file has so many bytes."""
    look = f"while os.stat({str(path)!r}).st_size < {lives}: time.sleep(0.01)"
    return f"import os, time\n{look}\n{then}"


def adds_to(path: Path, then: str) -> str:
    """A program that adds a byte to the file, which has `lives` bytes before."""
    return (
        f"import os, signal\nlives = os.stat({str(path)!r}).st_size\n"
        f"with open({str(path)!r}, 'a') as file: file.write('!')\n{then}"
    )


class Places:
    """The programs of an elastic job's places, and how often each was started."""

    def __init__(self, reaper: Reaper, *programs: str) -> None:
        self.ranks = Supervisor(reaper)
        self.starts: list[int] = []
        self.signals = Signals()
        self._programs = programs

    def start(self, rank: int) -> None:
        program = self._programs[rank]
        self.ranks.start(rank, program, environ=os.environ, options=["-I", "-S"])
        self.starts.append(rank)

    def watch(self, most: int = 9, look: Callable[[], object] = lambda: None) -> list[RankExit]:
        with self.ranks:
            for rank in range(len(self._programs)):
                self.start(rank)
            Replacements(self.ranks, self.start, most).watch(self.signals, lambda **_: look())
            return self.ranks.exits()


@pytest.fixture
def reaper() -> Iterator[Reaper]:
    with Reaper() as held:
        yield held


@pytest.fixture
def lives(tmp_path: Path) -> Path:
    path = tmp_path / "lives"
    path.touch()
    return path


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_run, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(elastic_run, "_LONGEST_PAUSE", 0.0)


def test_a_failed_process_is_replaced_and_the_others_go_on(
    reaper: Reaper, lives: Path, at_once: None, capfd: pytest.CaptureFixture[str]
) -> None:
    dies = adds_to(lives, "lives or os.kill(os.getpid(), signal.SIGKILL)")
    places = Places(reaper, waits_for(lives, 2, ""), dies)
    assert exit_code(places.watch(most=3)) == 0
    assert places.starts == [0, 1, 1]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("rank 1 was killed by signal 9 (SIGKILL); process ")
    assert line.endswith(" is replaced in 0 s (restart 1 of 3)")


@pytest.mark.parametrize("code", [0, 75])
def test_one_that_ends_or_leaves_is_not_replaced(
    reaper: Reaper, lives: Path, at_once: None, code: int
) -> None:
    ends = f"raise SystemExit({code})"
    places = Places(reaper, adds_to(lives, ends), waits_for(lives, 1, ends))
    assert exit_code(places.watch()) == code
    assert places.starts == [0, 1]


def test_when_restarts_are_used_up_the_others_go_on_as_long_as_they_live(
    reaper: Reaper, lives: Path, at_once: None, capfd: pytest.CaptureFixture[str]
) -> None:
    fails = adds_to(lives, "raise SystemExit(7)")
    exits = Places(reaper, waits_for(lives, 3, "raise SystemExit(75)"), fails).watch(most=2)
    root = root_cause(exits)
    assert root is not None
    assert (root.rank, root.code, exit_code(exits)) == (1, 7, None)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[1].endswith("(restart 2 of 2)")
    assert lines[2].endswith("is not replaced: no restart is left of --max-restarts 2")


def test_it_is_over_when_all_have_failed_and_no_restart_is_left(reaper: Reaper) -> None:
    (ended,) = Places(reaper, "raise SystemExit(7)").watch(most=0)
    assert (ended.code, ended.failed) == (7, True)


def test_each_pause_is_twice_the_one_before(
    reaper: Reaper, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elastic_run, "_FIRST_PAUSE", 0.001)
    Places(reaper, "raise SystemExit(7)").watch(most=3)
    *lines, _ = capfd.readouterr().err.splitlines()
    said = [line.partition(" is replaced in ")[2].split()[0] for line in lines]
    assert said == ["0.001", "0.002", "0.004"]


@pytest.mark.parametrize("code", [0, 75])
def test_nobody_waits_for_a_replacement_that_would_be_alone(
    reaper: Reaper, lives: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(elastic_run, "_FIRST_PAUSE", 1e9)
    ends = waits_for(lives, 1, f"raise SystemExit({code})")
    places = Places(reaper, ends, adds_to(lives, "raise SystemExit(7)"))
    assert exit_code(places.watch()) == code
    assert places.starts == [0, 1]


def test_the_only_process_is_replaced_again_and_again(
    reaper: Reaper, lives: Path, at_once: None
) -> None:
    places = Places(reaper, adds_to(lives, "lives < 2 and os.kill(os.getpid(), signal.SIGKILL)"))
    assert exit_code(places.watch()) == 0
    assert places.starts == [0, 0, 0]


def test_after_a_signal_failures_of_before_are_forgotten(reaper: Reaper) -> None:
    places = Places(reaper, PAUSE, "raise SystemExit(7)", "raise SystemExit(75)")

    def look() -> None:
        if {7, 75} <= {rank.code for rank in places.ranks.ranks}:
            places.signals.received.append(signal.SIGTERM)

    assert [(one.rank, one.code) for one in places.watch(0, look)] == [(2, 75)]
    assert [rank.rank for rank in places.ranks.ranks] == [0, 2]


def test_a_process_that_has_reported_and_does_not_end_is_killed_and_replaced(
    reaper: Reaper, lives: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_run, "_TIME_TO_END", 0.0)
    report = RankReport(0, True, summary="ValueError: a bug").encode()
    stays = f"import sys; open(int(sys.argv[2]), 'wb').write({report!r}); signal.pause()"
    places = Places(reaper, adds_to(lives, f"if not lives: {stays}"))
    assert exit_code(places.watch()) == 0
    assert places.starts == [0, 0]


def test_a_process_that_cannot_be_started_is_tried_again(
    reaper: Reaper, lives: Path, at_once: None, capfd: pytest.CaptureFixture[str]
) -> None:
    places = Places(reaper, adds_to(lives, "lives or os.kill(os.getpid(), signal.SIGKILL)"))
    refused = []

    def start(rank: int) -> None:
        if not refused:
            refused.append(rank)
            raise BackendUnavailableError("no more processes")
        places.start(rank)

    with places.ranks:
        places.start(0)
        Replacements(places.ranks, start, 2).watch(places.signals, lambda **_: None)
        assert exit_code(places.ranks.exits()) == 0
    said = capfd.readouterr().err.splitlines()[-1]
    assert said == "no more processes; rank 0 is replaced in 0 s (restart 2 of 2)"


# ------------------------------------------------------------------------------
# The pauses, and the exit code.


def test_pauses_double_up_to_half_a_minute() -> None:
    pauses = [0.0]
    for _ in range(7):
        pauses.append(pause_before_restart(pauses[-1], lived=3.0))
    assert pauses[1:] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


@given(st.floats(0.0, 30.0))
def test_after_a_long_life_they_begin_anew(last: float) -> None:
    assert pause_before_restart(last, lived=60.0) == 1.0


def exits(*codes: int, told: bool = False) -> list[RankExit]:
    return [RankExit(rank, code, time=rank, told_to_stop=told) for rank, code in enumerate(codes)]


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([75, 0, 75], 0),
        ([7, 0, -signal.SIGKILL], 0),
        ([75, 75], 75),
        ([75, 7], None),
        ([7, 143], None),
    ],
)
def test_one_end_of_the_training_is_enough_and_one_failure_is_not_leaving(
    codes: list[int], code: int | None
) -> None:
    assert exit_code(exits(*codes)) == code


def test_who_was_told_to_stop_before_it_could_leave_has_not_failed() -> None:
    assert exit_code(exits(75, 143, -signal.SIGTERM, told=True)) == 75
    assert exit_code(exits(143, told=True)) is None


# ------------------------------------------------------------------------------
# The options, and what the processes read of them.


WRONG: list[tuple[ElasticOptions, type[DistributedError], str]] = [
    (ElasticOptions(0), InvalidWorldSizeError, "--min 0: it takes at least one rank"),
    (ElasticOptions(5), InvalidWorldSizeError, "--min 5 is above -n 4"),
    (ElasticOptions(3, 2), InvalidWorldSizeError, "--min 3 is above --max 2"),
    (ElasticOptions(2, job="a b"), MisuseError, "--job a b: a job's name is"),
    (ElasticOptions(2, store="a:2379"), MisuseError, "--store a:2379: it is etcd://host:port"),
    (ElasticOptions(2, store="etcd://a"), MisuseError, "--store etcd://a: .* is not an address"),
    (ElasticOptions(2, store=ETCD), MisuseError, "--store needs --job NAME"),
]


@pytest.mark.parametrize(("options", "error", "words"), WRONG)
def test_what_cannot_be_is_refused(
    options: ElasticOptions, error: type[DistributedError], words: str
) -> None:
    with pytest.raises(error, match=words):
        options.check(4, nodes=1, master="", token=TOKEN)


def test_hosts_need_a_token_and_no_numbers() -> None:
    options = ElasticOptions(8, store=ETCD, job="a")
    options.check(4, nodes=1, master="", token=TOKEN)
    with pytest.raises(MisuseError, match="--store needs a token"):
        options.check(4, nodes=1, master="", token="")
    for where in ({"nodes": 2, "master": "a:1"}, {"nodes": 1, "master": "a:1"}):
        with pytest.raises(MisuseError, match="--min goes without --nnodes and --master"):
            options.check(4, token=TOKEN, **where)  # type: ignore[arg-type]


def test_options_of_elastic_jobs_need_min() -> None:
    assert elastic_options(None, None, "", "") is None
    assert elastic_options(2, 8, ETCD, "a") == ElasticOptions(2, 8, ETCD, "a")
    for name, given_ in {"--max": (8, "", ""), "--store": (None, ETCD, "")}.items():
        with pytest.raises(MisuseError, match=f"{name} is for elastic jobs: add --min"):
            elastic_options(None, *given_)


OF_A_LAUNCHER_ABOVE = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "x",
    "PHALANX_STORE": "b:1",
    "PHALANX_MAX_RANKS": "3",
    "PHALANX_LAUNCH": "y",
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (ElasticOptions(2), ElasticJob("h:1", "launch", "launch", 2, 4)),
        (ElasticOptions(2, 3, job="launch"), ElasticJob("h:1", "launch", "launch", 2, 3)),
        (ElasticOptions(5, store=ETCD, job="a"), ElasticJob(ETCD, "a", "a", 5)),
    ],
)
def test_processes_read_the_job_and_no_rank_of_a_launcher_above(
    options: ElasticOptions, expected: ElasticJob
) -> None:
    environ = options.environment({**OF_A_LAUNCHER_ABOVE, "HOME": "/"}, 4, "h:1", "launch")
    assert read_elastic_environment(environ) == expected
    assert {name for name in environ if not name.startswith("PHALANX_")} == {"HOME"}
