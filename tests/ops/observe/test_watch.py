"""`phalanx watch` during a run in which a rank is slow, then stopped, then killed; on two hosts, of
which one is cut off; and of `phalanx.spawn`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from commands import PHALANX
from launchers import Launch, environ_without_launcher
from networks import Network, why_not
from ports import unused_port
from waiting import wait_until

from phalanx import DDP, Backend, spawn
from phalanx.ops.observe.watch.folder import WatchFolder, private_folders
from phalanx.ops.observe.watch.gather import find_job, follow
from phalanx.ops.observe.watch.state import JobState, RankState

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
def watched(
    folder: Path, environ: dict[str, str], host: Sequence[str] = ()
) -> Iterator[Iterator[JobState]]:
    """The states of a job, as `phalanx watch --json` prints them on that host."""
    words = [*host, *PHALANX, "watch", str(folder), "--json"]
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        try:
            yield (msgspec.json.decode(line, type=JobState) for line in watch.stdout)
        finally:
            watch.kill()


def wait_for_launcher(folder: Path) -> None:
    """Wait until a launcher publishes there: in an empty folder there is nothing to watch."""
    wait_until(WatchFolder(folder).has_launcher, "the launcher publishes something")


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
    stack = ExitStack()
    stack.enter_context(job)
    wait_for_launcher(folder)
    states = stack.enter_context(watched(folder, environ))
    with stack:
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
        assert stopped.chain[0] == f"rank 1 is stopped: {reason}"
        assert stopped.chain[1].startswith("rank 0 has waited ")
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
        *_, last = [killed, *states]
        assert last.ended == "rank 1 was killed by signal 9 (SIGKILL)"
        job.process.communicate()
    assert list(folder.glob("node-*")), "the last word is kept for those who watch"


WAIT = """
import os, signal
print(f"the line of rank {os.environ['RANK']}")
signal.pause()
"""


def folder_of(launcher: int) -> Path:
    """Where a job of that process publishes, once it does."""

    def found() -> Path | None:
        places = (each for each in private_folders() if each.launcher() == launcher)
        return next((each.path for each in places if each.has_launcher()), None)

    return wait_until(found, f"process {launcher} publishes something")


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_each_host_shows_all_ranks_and_names_the_one_that_is_cut_off(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WAIT)
    environ = environ_without_launcher() | {"PHALANX_TOKEN": "the token of two hosts"}
    with ExitStack() as stack:
        network = stack.enter_context(Network(2))
        master = f"{network.address(0)}:{unused_port()}"
        common = ["-n", "1", "--nnodes", "2", "--master", master]
        hosts = [["ip", "netns", "exec", network.host(node)] for node in (0, 1)]
        launches = [
            stack.enter_context(
                Launch(
                    [*host, *PHALANX, "run", *common, "--node-rank", str(node), str(script)],
                    tmp_path,
                    environ,
                )
            )
            for node, host in enumerate(hosts)
        ]
        folder = folder_of(launches[1].process.pid)
        states = stack.enter_context(watched(folder, environ, hosts[1]))
        both = ["the line of rank 0", "the line of rank 1"]
        next(state for state in states if [rank.log for rank in state.ranks] == both)
        network.cut(0)
        cut_off = next(state for state in states if state.ranks[0].status == "unreachable")
        assert cut_off.ranks[0].reason.startswith("node 0 (")
        assert rank_1(cut_off).log == both[1]
        network.heal(0)
        next(state for state in states if state.ranks[0].status == "starting")


def train(backend: Backend, end: str) -> None:
    """Until there is that file."""
    model = DDP(torch.nn.Linear(4, 1), backend)
    while not Path(end).exists():
        model(torch.ones(2, 4)).mean().backward()
        time.sleep(0.05)  # or it would take the processor


def test_a_job_of_spawn_is_watched_and_its_steps_are_counted(tmp_path: Path) -> None:
    end = tmp_path / "end"
    with ThreadPoolExecutor(1) as other:
        running = other.submit(spawn, partial(train, end=str(end)), 1)
        try:
            states = follow(find_job(str(folder_of(os.getpid()))))
            name = f"{os.path.basename(sys.argv[0])} spawn(train)"
            seen = next(state for state in states if state.ranks[0].step is not None)
            later = next(state for state in states if state.ranks[0].step != seen.ranks[0].step)
            assert (later.name, later.world_size) == (name, 1)
            assert later.ranks[0].step_seconds > 0
        finally:
            end.touch()
        running.result()
        *_, last = states
    assert last.ended == "it has ended well"
