"""The command of each manifest, run as its pods would run it: two pods with two ranks each."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "multiprocess"))

from networks import Network, why_not
from pods import Pods

from phalanx.ops.clusters.kubernetes import KINDS, KubernetesJob

JOB = KubernetesJob(
    target="train.py",
    name="train",
    image="i",
    nodes=2,
    ranks=2,
    volumes=("saved:/mnt",),
    user=1000,
)

BEGIN = """
import os, pathlib, sys, torch, phalanx

backend = phalanx.init(timeout=50.0)
total = phalanx.all_reduce(torch.ones(1 << 20), backend)
assert total.eq(4).all()
print("hosts", *backend.topology, "user", os.getuid(), *sys.argv[1:], flush=True)
saved = pathlib.Path("/mnt/step")
step = int(saved.read_text()) if saved.exists() else 0
backend.barrier()
"""

# Ends with "again" after a checkpoint, until it has made two steps.
TWO_STEPS = """
step += 1
if backend.rank == 0:
    saved.write_text(str(step))
backend.barrier()
print("step", step, flush=True)
backend.close()
sys.exit(0 if step == 2 else 75)
"""

WAITS_AT_FIRST = """
import time
if step == 0:
    if backend.rank == 0:
        saved.write_text("1")
    backend.barrier()
    print("trains", flush=True)
    while True:
        time.sleep(0.01)
        backend.barrier()
print("goes on", flush=True)
"""

LEAVES = """
import signal, time

with phalanx.Notice(backend) as notice:
    backend.barrier()  # a SIGTERM before the with statement would be no notice
    print("trains", flush=True)
    while not notice.given():
        step += 1
        time.sleep(0.01)
steps = phalanx.all_gather(torch.tensor([step]), backend)
assert steps.eq(step).all(), steps
print("left at the same step", flush=True)
backend.close()
sys.exit(notice.exit_code)
"""


@pytest.fixture(autouse=True)
def _networks_are_allowed() -> None:
    if why_not():
        pytest.skip(why_not())
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("there is no unshare or setpriv (util-linux) to make pods with")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def make_pods(stack: ExitStack, job: KubernetesJob, script: str) -> Pods:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-pods-")))
    folder.chmod(0o755)
    network = stack.enter_context(Network(job.nodes))
    return stack.enter_context(Pods(job, network, folder, script))


AGAIN = {"job": "Ignore", "jobset": "FailJob", "trainjob": "Restart"}


@pytest.mark.parametrize("kind", KINDS)
def test_pods_train_and_are_started_again_from_what_they_saved(kind: str, stack: ExitStack) -> None:
    """Of a JobSet and a TrainJob, only those pods that are started again."""
    job = replace(JOB, kind=kind, args=("$(HOME)", "$x"), shm="" if kind == "job" else "16Mi")
    pods = make_pods(stack, job, BEGIN + TWO_STEPS)
    pods.publish()
    steps = [1, 2]
    if kind != "job":
        steps = [2]
        pods.save("step", "1")
    for step in steps:
        for index in (0, 1):
            pods.start(index)
        codes = [pods.exit_code(index) for index in (0, 1)]
        assert codes == ([0, 0] if step == 2 else [75, 75]), pods.log(0) + pods.log(1)
    assert (pods.follows(0), pods.follows(75)) == ("Complete", AGAIN[kind])
    for index in (0, 1):
        for rank in (2 * index, 2 * index + 1):
            begin = f"[rank {rank}] hosts 0 0 2 2 user 1000 $(HOME) $x"
            wrote = pods.log(index).splitlines()
            lines = [line for line in wrote if re.match(rf"\[rank {rank}\] (hosts|step) ", line)]
            assert lines == [x for step in steps for x in (begin, f"[rank {rank}] step {step}")]


def test_names_that_come_late_are_waited_for(stack: ExitStack) -> None:
    pods = make_pods(stack, JOB, BEGIN)
    for index in (0, 1):
        pods.start(index)
    for index in (0, 1):
        pods.wait_for(index, "the host name cannot be resolved here")
    pods.publish()
    assert [pods.exit_code(index) for index in (0, 1)] == [0, 0], pods.log(0) + pods.log(1)


def test_a_pod_that_is_killed_ends_the_other_one_and_both_go_on(stack: ExitStack) -> None:
    """The dead one is there again before the other has ended, as it may be in a cluster."""
    pods = make_pods(stack, JOB, BEGIN + WAITS_AT_FIRST)
    pods.publish()
    for index in (0, 1):
        pods.start(index)
    for index in (0, 1):
        pods.wait_for(index, "trains")
    pods.signal(1, signal.SIGKILL)  # as when its memory runs out
    assert pods.exit_code(1) != 0
    pods.start(1)
    assert pods.follows(pods.exit_code(0)) == "Count"
    assert re.search("on another node, 1|rank [23] was lost", pods.log(0)), pods.log(0)
    pods.start(0)
    assert [pods.exit_code(index) for index in (0, 1)] == [0, 0], pods.log(0) + pods.log(1)
    assert pods.log(0).count("goes on") == pods.log(1).count("goes on") == 2


@pytest.mark.parametrize(("script", "code"), [(BEGIN + WAITS_AT_FIRST, 143), (BEGIN + LEAVES, 75)])
def test_a_pod_that_the_cluster_moves_ends_all_and_none_counts_as_a_failure(
    script: str, code: int, stack: ExitStack
) -> None:
    """With a `Notice` all ranks leave at one step; without one they are stopped."""
    pods = make_pods(stack, JOB, script)
    pods.publish()
    for index in (0, 1):
        pods.start(index)
    for index in (0, 1):
        pods.wait_for(index, "trains")
    pods.signal(1, signal.SIGTERM)
    codes = [pods.exit_code(index) for index in (0, 1)]
    assert codes == [code, code], pods.log(0) + pods.log(1)
    assert pods.follows(code) == "Ignore"
    left = [pods.log(index).count("left at the same step") for index in (0, 1)]
    assert left == ([2, 2] if code == 75 else [0, 0])
