"""What goes together: `python tests/combinations/run.py --help`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from features import FEATURES, Feature, fits
from job import Job, Note, State
from wrappers import EVERY, WAYS, Way, outer

import phalanx


@dataclass
class Outcome:
    """What came of a cell on one rank."""

    rank: int
    part: int
    states: dict[str, State] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    error: str = ""
    text: str = ""
    trace: str = ""
    unchanged: bool = True
    goes_on: str = ""


def on_rank(way: Way, features: Sequence[Feature], folder: Path, backend: Any) -> Outcome:
    job = Job(way, features, folder, backend=backend)
    outcome = Outcome(backend.rank, 0)
    try:
        for _ in job.train():
            pass
    except Exception as error:
        outcome.error, outcome.text = type(error).__name__, str(error)
        outcome.trace = traceback.format_exc()
    outcome.part, outcome.states, outcome.notes = job.part, job.states, job.notes
    if outcome.error:
        if job.before:
            now = job.values()
            outcome.unchanged = all(torch.equal(now[n], v) for n, v in job.before.items())
        try:
            total = phalanx.all_reduce(torch.ones(3), backend)
            assert total.tolist() == [backend.world_size] * 3
        except Exception as error:
            outcome.goes_on = f"{type(error).__name__}: {error}"
    return outcome


def simulated(way: Way, features: Sequence[Feature], folder: Path) -> list[Outcome]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.extend(phalanx.simulate(lambda b: on_rank(way, features, folder, b), way.ranks))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    if thread.is_alive():
        raise TimeoutError("hangs")
    if isinstance(found[0], BaseException):
        raise found[0]
    return found


@lru_cache(maxsize=100)
def alone(way: Way, features: tuple[Feature, ...]) -> list[Job]:
    """For each part the job that its ranks are compared with."""
    with tempfile.TemporaryDirectory() as folder:
        if not way.local:
            job = Job(way, features, Path(folder))
            for _ in job.train():
                pass
            return [job] * way.parts
        jobs = [Job(way, features, Path(folder), part=part) for part in range(way.parts)]
        trainings = [job.train() for job in jobs]
        sync: Any = None
        over = [False] * len(jobs)
        while not all(over):
            over = [next(training, "over") == "over" for training in trainings]
            if any(over):
                continue
            sync = sync or Syncs(way, jobs)
            sync.after_step()
        return jobs


class Syncs:
    """What LocalSGD and DiLoCo do with ranks that train by themselves, written out."""

    def __init__(self, way: Way, jobs: list[Job]) -> None:
        self.jobs, self.since = jobs, 0
        self.trained = [job.kept["trained"][0] for job in jobs]
        self.center = [value.clone().requires_grad_() for value in jobs[0].kept["trained"][1]]
        self.outer = outer(self.center) if way.name == "DiLoCo" else None
        self.taken = 0

    @torch.no_grad()
    def after_step(self) -> None:
        ended = self.jobs[0].number == self.jobs[0].steps and self.jobs[0].kept.setdefault(
            "ends", 0
        )
        self.jobs[0].kept["ends"] = int(self.jobs[0].number == self.jobs[0].steps)
        self.since += self.jobs[0].taken - self.taken
        self.taken = self.jobs[0].taken
        if not (self.since >= EVERY or (ended and self.since)):
            return
        self.since = 0
        for at, middle in enumerate(self.center):
            mean = torch.stack([own[at] for own in self.trained]).mean(0)
            middle.grad = middle - mean
            if self.outer is None:
                middle.copy_(mean)
        if self.outer is not None:
            self.outer.step()
        for own in self.trained:
            for mine, middle in zip(own, self.center, strict=True):
                mine.copy_(middle)
        for buffers in zip(*(job.model.buffers() for job in self.jobs), strict=True):
            if buffers[0].is_floating_point():
                mean = torch.stack(list(buffers)).mean(0)
                for buffer in buffers:
                    buffer.copy_(mean)


def judge(way: Way, features: Sequence[Feature], outcomes: list[Outcome]) -> str:
    """'' if all is right, else what is wrong or refused."""
    failed = [o for o in outcomes if o.error]
    if failed:
        words = "; ".join(f"rank {o.rank} {o.error}: {o.text}" for o in failed[:2])
        more = "" if len(failed) == len(outcomes) else f" [only on {[o.rank for o in failed]}]"
        more += "" if all(o.unchanged for o in outcomes) else " [parameters changed]"
        more += (
            ""
            if not any(o.goes_on for o in outcomes)
            else f" [group broken: {[o.goes_on[:80] for o in outcomes if o.goes_on][0]}]"
        )
        return f"{words}{more}"
    expected = alone(way, tuple(features))
    rtol = max(f.tolerance[0] for f in features)
    atol = max(f.tolerance[1] for f in features)
    for kind in expected[0].states:
        seen: set[str] = set()
        for o in outcomes:
            right = expected[o.part].states[kind]
            for name, value in o.states[kind].items():
                seen.add(name)
                if name not in right:
                    return f"{kind} {name} is not in the plain model"
                if not torch.allclose(value, right[name], rtol=rtol, atol=atol):
                    off = (value - right[name]).abs().max().item()
                    return f"rank {o.rank}: {kind} {name} is off by {off:.2g}"
        missing = expected[0].states[kind].keys() - seen
        if missing:
            return f"no rank has {missing}"
    for o in outcomes:
        right_notes = expected[o.part].notes
        if [n.label for n in o.notes] != [n.label for n in right_notes]:
            return f"rank {o.rank}: noted {[n.label for n in o.notes]}, not {[n.label for n in right_notes]}"
        for mine, other in zip(o.notes, right_notes, strict=True):
            if not torch.allclose(mine.value, other.value, rtol=rtol, atol=atol):
                return f"rank {o.rank}: {mine.label} is {mine.value}, not {other.value}"
    return ""


def run_cell(way: Way, features: Sequence[Feature]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcomes = simulated(way, features, Path(folder))
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
    try:
        return judge(way, features, outcomes)
    except Exception:
        return "ORACLE: " + traceback.format_exc()[-600:]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--features", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ways = [w for w in WAYS if not options.only or w.name in options.only.split(",")]
    features = [
        f for f in FEATURES if not options.features or f.name in options.features.split(",")
    ]
    for way in ways:
        for f in features:
            if f.lacks(way):
                continue
            began = monotonic()
            found = run_cell(way, (f,))
            if found or monotonic() - began > 1:
                print(f"{way} x {f}: {found[:300]}  ({monotonic() - began:.2f} s)", flush=True)
        print(f"--- {way}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
