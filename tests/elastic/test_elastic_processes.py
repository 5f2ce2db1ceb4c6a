"""Elastic jobs of real processes: killed, stopped, told to leave, replaced, and at their end.

The job of these processes is that of the benchmark (benchmarks/elastic_job.py). It checks what they
say: no step lost or done again, each rank's part of the samples, equal replicas.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from launchers import Launch, environ_without_launcher, finish, run_of_warm_ranks
from processes import fork_server
from waiting import wait_until

from phalanx.elastic.site import ProcessSite
from phalanx.elastic.stores import open_store
from phalanx.wire.control import Endpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from elastic_job import Job, Process, Training, running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SIGSTOP is seen in /proc")
start = partial(running, context=fork_server())


def others_train(job: Job, gone: Process, after: int) -> Callable[[], list[Process]]:
    """Return what returns the ranks of a generation that has all others, once it trains."""

    def look() -> list[Process]:
        there = job.training_since(after)
        return there if gone not in there and len(there) == len(job.processes) - 1 else []

    return look


def memory_files(process: Process) -> int:
    """Return how many descriptors of shared memory a process has."""
    folder = Path(f"/proc/{process.pid}/fd")
    return sum("memfd:" in os.readlink(path) for path in folder.iterdir())


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("way", ["ddp", "full_shard"])
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_rank_is_killed_and_the_others_train_on(backend: str, way: str, victim: int) -> None:
    with start(Training(way, backend, ranks=3)) as job:
        killed = job.until_all_train()[victim]
        os.kill(killed.pid, signal.SIGKILL)
        rest = job.until(others_train(job, killed, 1), "the others train")
        assert [process.ranks[2][1].lost for process in rest] == [(victim,)] * 2
        job.check()


def test_if_all_are_killed_at_once_those_who_come_begin_anew() -> None:
    with start(Training("full_shard", ranks=3, steps=200)) as job:
        for process in job.until_all_train():
            os.kill(process.pid, signal.SIGKILL)
        others = job.start(3)
        job.until(lambda: all(process.end for process in others), "the end")
        for process in others:
            assert process.ranks.keys() == {2}
            assert [step.number for step in process.steps] == list(range(200))


def test_a_process_sees_which_others_of_its_host_have_ended() -> None:
    site = ProcessSite("tcp", None, Endpoint("127.0.0.1", 1), "", "")
    host, own, name = site.process.split("/")
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    assert not site.has_ended(f"{host}/{own}/{name}")
    assert not site.has_ended(f"{host}/{child.pid}/{name}")
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert site.has_ended(f"{host}/{child.pid}/{name}")
    child.communicate()
    assert site.has_ended(f"{host}/{child.pid}/{name}")
    assert not site.has_ended(f"{host}/{child.pid}/another-{name}")
    site.close()


def test_a_replacement_joins_and_is_not_invited_again_when_it_dies_at_once() -> None:
    with start(Training("full_shard", ranks=3)) as job:
        *others, last = job.until_all_train()
        os.kill(last.pid, signal.SIGKILL)
        job.until(others_train(job, last, 1), "the others train")
        (replacement,) = job.start()
        assert job.until_all_train(2)[2] is replacement
        assert others[0].ranks[3][1].joined == (2,)
        os.kill(replacement.pid, signal.SIGKILL)

        def steps() -> list[list[int]]:
            return [[s.generation for s in each.steps if s.generation > 3][:3] for each in others]

        job.until(lambda: all(len(each) == 3 for each in steps()), "the others train")
        assert steps() == [[4, 4, 4]] * 2
        job.check()


def test_a_second_rank_dies_while_the_next_generation_waits_for_it() -> None:
    with start(Training("full_shard", ranks=4)) as job:
        ranks = job.until_all_train()
        store = open_store(job.where, job.token, job=job.name, launch=job.name)
        os.kill(ranks[2].pid, signal.SIGSTOP)
        os.kill(ranks[1].pid, signal.SIGKILL)
        wait_until(lambda: store.report(1, 0), "rank 0 has reported")
        os.kill(ranks[2].pid, signal.SIGKILL)
        rest = job.until(lambda: job.training_since(1), "the others train")
        assert rest == [ranks[0], ranks[3]]
        assert not store.decision(3)
        job.check()
        store.store.close()


def test_a_stopped_rank_comes_back_in_its_process_when_it_goes_on() -> None:
    with start(Training("full_shard", ranks=3, heartbeat=0.5)) as job:
        stopped = job.until_all_train()[1]
        files = memory_files(stopped)
        os.kill(stopped.pid, signal.SIGSTOP)
        job.until(others_train(job, stopped, 1), "the others train")
        os.kill(stopped.pid, signal.SIGCONT)
        assert job.until_all_train(2)[2] is stopped
        assert memory_files(stopped) == files, "those of the first group are closed"
        job.check()


def test_a_rank_that_is_told_leaves_with_75_and_another_one_joins() -> None:
    with start(Training("full_shard", ranks=3)) as job:
        told = job.until_all_train()[0]
        os.kill(told.pid, signal.SIGTERM)
        job.until(others_train(job, told, 1), "the others train")
        told.handle.join()
        assert told.handle.exitcode == 75
        job.start()
        assert [process.ranks[3][0] for process in job.until_all_train(2)] == [0, 1, 2]
        job.check()


def test_all_come_to_the_end_and_one_that_comes_later_leaves_with_0() -> None:
    with start(Training("full_shard", ranks=2, seconds=0.0, steps=5)) as job:
        job.until(lambda: not job.living, "all come to the end")
        assert [process.end is not None for process in job.processes] == [True, True]
        assert job.check() == 5
        (late,) = job.start()
        job.until(lambda: not late.open, "the late one ends")
        late.handle.join()
        assert (late.handle.exitcode, late.steps) == (0, [])


# Under the launcher ------------------------------------------------------------------------------

SCRIPT = """
import os, pathlib, signal, sys
import torch
import phalanx

job = phalanx.Elastic("shm")
model = phalanx.FSDP(torch.nn.Linear(8, 8), job.backend)
optimizer = torch.optim.Adam(model.parameters())
job.keep(model=model, optimizer=optimizer)
for step in job.steps({steps}):
    with step:
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        if job.generation == 1 and step.number == 5 and job.backend.rank == 1:
            {what}
    pathlib.Path(sys.argv[1], "ready", os.environ["LOCAL_RANK"]).touch()
print("the end", job.done, [each.world_size for each in job.history])
"""


def launch(folder: Path, what: str, *, steps: int = 20) -> Launch:
    (folder / "ready").mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT.format(what=what, steps=steps))
    words = [*run_of_warm_ranks(), "-n", "3", "--min", "2", str(script), str(folder)]
    return Launch(words, folder, environ_without_launcher())


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by signal 9 (SIGKILL)"),
        ("raise ValueError('of one rank alone')", "of one rank alone"),
    ],
)
def test_the_launcher_ends_with_0_if_the_others_come_to_the_end(
    tmp_path: Path, what: str, told: str
) -> None:
    with launch(tmp_path, what) as launcher:
        code, lines, errors = finish(launcher)
    ends = [line.partition("] ")[2] for line in lines]
    assert (code, ends) == (0, ["the end 20 [3, 2]"] * 2), errors
    assert any(told in line for line in errors), errors


def test_the_launcher_ends_with_75_if_it_is_told_and_all_leave(tmp_path: Path) -> None:
    with launch(tmp_path, "pass", steps=1 << 30) as launcher:
        launcher.wait_for(3)
        launcher.process.terminate()
        code, lines, errors = finish(launcher)
    assert (code, lines) == (75, []), errors


def test_a_process_listens_at_a_port_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_PORTS", "41200-41299")
    site = ProcessSite("tcp", None, Endpoint("127.0.0.1", 1), "", "")
    host, _, port = site.address().partition(":")
    site.close()
    assert host == "127.0.0.1"
    assert 41200 <= int(port) <= 41299
