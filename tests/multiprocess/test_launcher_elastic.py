"""`phalanx run --min`: failed ranks are replaced alone, and ranks that leave are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import RUN, Launch, environ_without_launcher, finish, run_of_warm_ranks
from waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
TOKEN = "a token of many letters"
AGAIN = "the ranks have left; exit code 75: start the job again"


def start(folder: Path, text: str, *options: str, **environ: str) -> Launch:
    script = folder / "script.py"
    script.write_text(text)
    run = run_of_warm_ranks() if "phalanx" in text else RUN
    words = [*run, *options, str(script), str(folder)]
    return Launch(words, folder, {**environ_without_launcher(), **environ})


DIES_ONCE = """
import os, signal, sys
import phalanx
from phalanx.elastic.stores import open_store
from phalanx.launch.environment import read_elastic_environment
job = read_elastic_environment(os.environ)
store = open_store(job.store, os.environ["PHALANX_TOKEN"], job=job.job, launch=job.launch).store
if job.local_rank == 1 and not store.get("died"):
    store.set("died", "once")
    sys.stdout.write("half a line")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
if job.local_rank == 1:
    try:
        phalanx.init()
    except phalanx.MisuseError as error:
        print("refused:", str(error).partition(" in the place of")[0])
    store.set("again", str(os.getpid()))
else:
    for _ in store.pauses(60.0):
        if store.get("again"):
            break
    print("went on", job.min_ranks, job.max_ranks, os.environ.get("RANK"))
"""


def test_a_killed_rank_is_replaced_while_the_others_go_on(tmp_path: Path) -> None:
    options = ["-n", "2", "--min", "1", "--max-restarts", "5", "--job", "night"]
    with start(tmp_path, DIES_ONCE, *options, RANK="4") as launcher:
        code, lines, errors = finish(launcher)
    assert (code, lines) == (
        0,
        [
            "[rank 0] went on 1 2 None",
            "[rank 1] half a line",
            "[rank 1] refused: this process belongs to the elastic job night (PHALANX_JOB), where "
            "ranks come and go: call phalanx.Elastic()",
        ],
    )
    (line,) = errors
    assert line.startswith("rank 1 was killed by signal 9 (SIGKILL); process ")
    assert line.endswith(" is replaced in 1 s (restart 1 of 5)")


FAILS = "raise ValueError('a bug')"


def test_the_first_failure_is_told_last_when_nobody_is_left(tmp_path: Path) -> None:
    with start(tmp_path, FAILS, "-n", "1", "--min", "1", "--max-restarts", "1") as launcher:
        code, lines, errors = finish(launcher)
    assert (code, lines) == (1, [])
    told = [line for line in errors if line.startswith("rank 0 failed (exit code 1: ValueError")]
    assert [line.partition(" is ")[2] for line in told] == [
        "replaced in 1 s (restart 1 of 1)",
        "not replaced: no restart is left of --max-restarts 1",
    ]
    assert errors[-1] == "ValueError: a bug"


LEAVES = """
import os, pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
ready = pathlib.Path(sys.argv[1], "ready")
part = ready / (os.environ["LOCAL_RANK"] + ".part")
part.write_text(str(os.getpid()))
part.rename(part.with_suffix(".pid"))
signal.pause()
"""


def leave(folder: Path, code: int) -> Launch:
    """Start two ranks that end with this code when they are told to, and wait for them."""
    ready = folder / "ready"
    ready.mkdir()
    options = ["-n", "2", "--min", "1", "--max-restarts", "9"]
    launcher = start(folder, LEAVES.format(code=code), *options)
    wait_until(lambda: len(list(ready.glob("*.pid"))) == 2, "both ranks have come")
    return launcher


def test_ranks_that_leave_alone_or_together_are_not_replaced(tmp_path: Path) -> None:
    with leave(tmp_path, 75) as launcher:
        leaving = int((tmp_path / "ready" / "1.pid").read_text())
        os.kill(leaving, signal.SIGTERM)
        wait_until(lambda: leaving not in launcher.alive(), "it has left")
        launcher.process.send_signal(signal.SIGTERM)
        assert finish(launcher) == (75, [], [AGAIN])
        launcher.seconds_until_all_have_ended()


def test_a_training_that_comes_to_its_end_after_a_signal_has_ended_well(tmp_path: Path) -> None:
    with leave(tmp_path, 0) as launcher:
        launcher.process.send_signal(signal.SIGTERM)
        assert finish(launcher) == (0, [], [])


SHOWS = """
import os
names = ("RANK", "PHALANX_STORE", "PHALANX_JOB", "PHALANX_LAUNCH", "PHALANX_MAX_RANKS")
print(*(os.environ.get(name) for name in names), bool(os.environ["PHALANX_TOKEN"]))
"""
ETCD = ["--min", "3", "--store", "etcd://127.0.0.1:1", "--job", "night"]


@pytest.mark.parametrize("token", [TOKEN, ""])
def test_hosts_meet_in_etcd_with_a_token_of_their_own(tmp_path: Path, token: str) -> None:
    options = ["-n", "1", *ETCD, *([] if token else ["--insecure"])]
    with start(tmp_path, SHOWS, *options, PHALANX_TOKEN=token) as launcher:
        code, lines, errors = finish(launcher)
    assert (code, lines) == (0, ["[rank 0] None etcd://127.0.0.1:1 night None None True"])
    assert [line.partition(": everybody")[0] for line in errors] == (
        [] if token else ["phalanx: --insecure"]
    )


def test_a_job_without_min_has_nothing_of_an_elastic_one_above_it(tmp_path: Path) -> None:
    above = {"PHALANX_JOB": "night", "PHALANX_LAUNCH": "x", "PHALANX_MAX_RANKS": "8"}
    with start(tmp_path, SHOWS, "-n", "1", PHALANX_STORE="etcd://a:1", **above) as launcher:
        code, (line,), errors = finish(launcher)
    rank, store, *elastic, _ = line.removeprefix("[rank 0] ").split()
    assert (code, rank, elastic, errors) == (0, "0", ["None"] * 3, [])
    assert store.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--min", "3"], "phalanx: --min 3 is above -n 2, and without --store"),
        (["--max", "3"], "phalanx: --max is for elastic jobs: add --min N"),
        (ETCD, "phalanx: --store needs a token"),
        (["--min", "1", "--master", "a:1"], "phalanx: --min goes without --nnodes and --master"),
    ],
)
def test_options_that_cannot_be_are_refused_in_words(
    tmp_path: Path, options: list[str], words: str
) -> None:
    script = tmp_path / "script.py"
    script.touch()
    ended = subprocess.run(
        [*RUN, "-n", "2", *options, str(script)],
        env=environ_without_launcher(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(words)
