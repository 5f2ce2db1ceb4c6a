"""An elastic job that faults hit for half an hour: `make soak`, or ARGS="--seconds 300".

Every 30 s a random rank is killed, stopped for some seconds, or told to leave; who is gone is
replaced, so that all four train again before the next fault. One process is never killed, but
stopped like the others. In the end these have to hold:

    results      no step lost or done again, equal replicas (elastic_job.py)
    steps        at least 90 % of those that would have been taken at the speed between the faults
    process      the one that was there all the time: descriptors and threads as after the first
                 fault, but for those few that only rank 0 has, and at most 16 MiB more of memory
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

from elastic_job import Job, Process, Training, running, warm_up

EVERY = 30.0  # seconds between two faults
LONGEST_STOP = 5.0
SETTLES = 1.0  # seconds after a fault that say nothing of the speed without one
LEAST_STEPS, MOST_MEMORY = 0.9, 16.0  # of the steps without faults; MiB
FEW = 2  # descriptors or threads that only rank 0 has
HEARTBEAT = 1.0  # seconds


class Held(NamedTuple):
    """What a process holds."""

    descriptors: int
    threads: int
    memory: float  # MiB

    @classmethod
    def by(cls, pid: int) -> Held:
        """Look at a process."""
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        told = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        memory = int(told["VmRSS"][0]) / 1024
        return cls(len(os.listdir(f"/proc/{pid}/fd")), int(told["Threads"][0]), memory)

    def __str__(self) -> str:
        return f"{self.descriptors} descriptors, {self.threads} threads, {self.memory:.1f} MiB"


def steps_of(job: Job) -> int:
    """Return how many steps have counted."""
    return max(process.steps[-1].number for process in job.living if process.steps) + 1


def hit(job: Job, ranks: list[Process], always: Process, draw: random.Random) -> str:
    """Let a fault hit a rank, and replace who is gone; return which."""
    generation = max(process.generation for process in ranks)
    fault = draw.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
    stops = fault == signal.SIGSTOP
    victim = draw.choice([each for each in ranks if stops or each is not always])
    os.kill(victim.pid, fault)
    if stops:
        job.pause(draw.uniform(0.0, LONGEST_STOP))
        os.kill(victim.pid, signal.SIGCONT)
        job.pause(SETTLES)  # until a rank that was stopped for too long knows it
    else:
        job.until(lambda: not victim.open, f"process {victim.pid} has ended")
        job.start()
        job.until_all_train(generation + 1)
    return f"{fault.name} to process {victim.pid}, rank {ranks.index(victim)}"


def soak(job: Job, seconds: float, draw: random.Random) -> tuple[int, float]:
    """Let faults hit the job for so long.

    Return their number, and the steps beside those that the speed between them would have given.
    """
    always, *_ = job.until_all_train()
    hit(job, job.until_all_train(), always, draw)
    job.until_all_train()
    job.pause(SETTLES)
    began, first = time.monotonic(), steps_of(job)
    before, faults, quiet_steps, quiet_seconds = Held.by(always.pid), 0, 0, 0.0
    print(f"process {always.pid} after the first fault: {before}", flush=True)
    while (now := time.monotonic()) < began + seconds:
        since = steps_of(job)
        job.pause(draw.uniform(0.2, 1.8) * (EVERY - LONGEST_STOP))
        quiet_steps += steps_of(job) - since
        quiet_seconds += time.monotonic() - now
        what = hit(job, job.until_all_train(), always, draw)
        faults += 1
        job.until_all_train()
        job.pause(SETTLES)
        print(f"{time.monotonic() - began:7.1f} s, step {steps_of(job)}: {what}", flush=True)
    took = time.monotonic() - began
    after = Held.by(always.pid)
    print(f"process {always.pid} at the end: {after}")
    assert after.descriptors <= before.descriptors + FEW, (before, after)
    assert after.threads <= before.threads + FEW, (before, after)
    assert after.memory <= before.memory + MOST_MEMORY, (before, after)
    return faults, (steps_of(job) - first) / (took * quiet_steps / quiet_seconds)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--way", default="full_shard", help="as in elastic_job.py, such as ddp")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left behind
    warm_up()
    with running(Training(options.way, heartbeat=HEARTBEAT)) as job:
        faults, share = soak(job, options.seconds, random.Random(options.seed))
        steps = job.check()
    print(f"{steps} steps, {faults} faults: {share:.1%} of the steps at the speed between them")
    assert share >= LEAST_STEPS, share


if __name__ == "__main__":
    main()
