"""A rank is killed or stopped: whom do the others name, how soon, and in the step after?

`python tests/torch_backend/torch_blame.py [--times N]` tries each many times.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import jobs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from phalanx import DistributedError

Step = Callable[[], object]
CULPRIT, SIZE = 1, 3


def all_reduce() -> Step:
    tensor = torch.ones(1000)
    return lambda: dist.all_reduce(tensor)


def ddp() -> Step:
    model = DistributedDataParallel(_layers(), bucket_cap_mb=0.05)
    return lambda: model(torch.ones(8, 64)).sum().backward()


def fsdp2() -> Step:
    model = _layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return lambda: model(torch.ones(8, 64)).sum().backward()


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


STEPS: Mapping[str, Callable[[], Step]] = MappingProxyType(
    {"all_reduce": all_reduce, "ddp": ddp, "fsdp2": fsdp2}
)
SIGNALS = MappingProxyType({"killed": signal.SIGKILL, "stopped": signal.SIGSTOP})


class Heard(NamedTuple):
    """What a survivor caught, twice: the type, the peer that it names, the text; when, first."""

    caught: list[tuple[str, int | None, str]]
    at: float


def act(rank: int, what: str, how: str, steps: int, note: str) -> Heard:
    step = STEPS[what]()
    for _ in range(steps):
        step()
    if rank == CULPRIT:
        Path(note).write_text(str(time.monotonic()))
        os.kill(os.getpid(), SIGNALS[how])
        time.sleep(60)
    caught: list[tuple[str, int | None, str]] = []
    at = 0.0
    for _ in range(2):
        try:
            while True:
                step()
        except RuntimeError as error:
            at = at or time.monotonic()
            peer = error.peer if isinstance(error, DistributedError) else None
            caught.append((type(error).__name__, peer, str(error).splitlines()[0]))
    return Heard(caught, at)


class Verdict(NamedTuple):
    """What was wrong, if anything, and seconds until the last survivor knew."""

    wrong: str
    seconds: float


def once(what: str, how: str, *, steps: int = 3, heartbeat: str = "3") -> Verdict:
    """One job; all survivors have to name the rank, in the step that fails and in the one after."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = jobs.run(
            act,
            SIZE,
            what,
            how,
            steps,
            f"{folder}/note",
            lost=CULPRIT,
            PHALANX_HEARTBEAT=heartbeat,
        )
        began = float(Path(f"{folder}/note").read_text())
    problems, latest = [], began
    for rank, outcome in outcomes.items():
        if outcome.how != "returned":
            problems.append(f"rank {rank}: {outcome.how} {outcome.value}")
            continue
        heard: Heard = outcome.value
        latest = max(latest, heard.at)
        first, then = heard.caught
        named = then[:2] == ("PeerLostError", CULPRIT)
        if not named or f"rank {CULPRIT} " not in first[2]:  # out of C++ only the text comes
            problems.append(f"rank {rank}: {heard.caught}")
    return Verdict("; ".join(problems), latest - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20)
    times = parser.parse_args().times
    good = True
    for how, within in (("killed", 1.0), ("stopped", 3.5)):
        for what in STEPS:
            verdicts = [once(what, how, steps=3 + n % 5) for n in range(times)]
            right = [each for each in verdicts if not each.wrong and each.seconds <= within]
            slowest = max(each.seconds for each in verdicts)
            print(
                f"{how:8} {what:11} {len(right)} of {times}, the slowest {slowest:.2f} s",
                flush=True,
            )
            for wrong in [each for each in verdicts if each not in right]:
                print(f"    {wrong}")
            good = good and len(right) == times
    sys.exit(not good)


if __name__ == "__main__":
    main()
