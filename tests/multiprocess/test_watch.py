"""`phalanx watch` during a run in which a rank is slow, then stopped, then killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from launchers import PHALANX, Launch, environ_without_launcher

from phalanx.launch.state import JobState, RankState

SLOW = """
import time, torch, phalanx

with phalanx.init() as backend:
    for step in range(100_000):
        time.sleep(0.1 if backend.rank == 1 else 0.0)
        phalanx.all_reduce(torch.ones(1 << 12), backend)
        backend.progress.log(step, loss=1 / (step + 1))
        print(f"step {step}")
"""


@contextmanager
def watched(folder: Path, environ: dict[str, str]) -> Iterator[Iterator[JobState]]:
    """The states of a job, as `phalanx watch --json` prints them."""
    words = [*PHALANX, "watch", str(folder), "--json"]
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        try:
            yield (msgspec.json.decode(line, type=JobState) for line in watch.stdout)
        finally:
            watch.kill()


def rank_1(state: JobState) -> RankState:
    return state.ranks[1]


def test_a_rank_that_is_slow_then_stopped_then_killed_is_seen_to_be(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "watch"
    script.write_text(SLOW)
    folder.mkdir(mode=0o700)
    environ = environ_without_launcher() | {
        "PHALANX_WATCH": str(folder),
        "PHALANX_HEARTBEAT": "60",  # a stopped rank does not end the job in this test
    }
    job = Launch([*PHALANX, "run", "-n", "2", str(script)], tmp_path, environ)
    with job, watched(folder, environ) as states:
        # Its first line is the start line, of rank 0; a rate is that of half a second.
        slow = next(
            state
            for state in states
            if state.slowest == 1
            and all(rank.log.startswith("step ") for rank in state.ranks)
            and state.ranks[0].sent > 0
            and state.ranks[0].waiting > rank_1(state).waiting
        )
        assert slow.name == str(script)
        assert all(rank.step is not None and rank.values["loss"] for rank in slow.ranks)

        os.kill(rank_1(slow).pid, signal.SIGSTOP)
        stopped = next(
            state
            for state in states
            if rank_1(state).status == "stopped" and state.ranks[0].waits_for == [1] and state.chain
        )
        reason = f"process {rank_1(slow).pid} is stopped (SIGSTOP, or a debugger holds it)"
        assert rank_1(stopped).reason == reason
        assert stopped.chain[0].startswith("rank 0 has waited ")
        assert stopped.chain[1] == f"-> for rank 1, which is stopped: {reason}"
        assert stopped.slowest == 1
        once = subprocess.run(
            [*PHALANX, "watch", str(folder), "--once"],
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        )
        assert reason in " ".join(once.stdout.split())  # however wide COLUMNS says it is

        os.kill(rank_1(slow).pid, signal.SIGKILL)
        killed = next(state for state in states if rank_1(state).status == "dead")
        assert rank_1(killed).reason == "rank 1 was killed by signal 9 (SIGKILL)"
        *_, last = states
        assert last.ended == "rank 1 was killed by signal 9 (SIGKILL)"
        job.process.communicate()
    assert list(folder.glob("node-*")), "the last word is kept for those who watch"
