"""A cell of the table: what a program with some features comes to on ranks; is it right?

right      every rank has the values of one process, or raises what that raises
refused    every rank raises the error that `expected.py` has, before a parameter has changed,
           and the group goes on
wrong      anything else
"""

from __future__ import annotations

import re
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from expected import refusal_of
from feature import Feature
from job import Job, Note, State
from torch import Tensor
from wrappers import EVERY, Way, outer

import phalanx

RIGHT, REFUSED, WRONG = "right", "refused", "wrong"


class Verdict(NamedTuple):
    """What came of a cell; `words` say what was refused, or what is wrong."""

    status: str
    words: str = ""


@dataclass
class Outcome:
    """What came of a cell on one rank.

    ours       the error is one of Phalanx's
    unchanged  no parameter has changed in the step that raised
    after      what went wrong in a collective after the error; "" if nothing did
    """

    rank: int
    part: int = 0
    states: dict[str, State] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    buffers: set[str] = field(default_factory=set)
    error: str = ""
    text: str = ""
    trace: str = ""
    ours: bool = False
    unchanged: bool = True
    after: str = ""


def on_rank(way: Way, features: Sequence[Feature], folder: Path, backend: Any) -> Outcome:
    """Run the program on one rank."""
    job = Job(way, features, folder, backend=backend)
    outcome = Outcome(backend.rank)
    try:
        for _ in job.train():
            pass
    except Exception as error:
        outcome.error, outcome.text = type(error).__name__, str(error)
        outcome.trace = traceback.format_exc()
        outcome.ours = isinstance(error, phalanx.DistributedError)
    outcome.part, outcome.states, outcome.notes = job.part, job.states, job.notes
    outcome.buffers = {name for name, _ in job.plain.named_buffers()} if job.plain else set()
    if outcome.error and any(one.fails for one in features):
        backend.abort()  # as where a program ends
    elif outcome.error:
        now = job.values() if job.before else {}
        outcome.unchanged = all(
            torch.equal(now[name], value) for name, value in job.before.items() if name in now
        )
        outcome.after = _goes_on(backend)
    return outcome


def _goes_on(backend: Any) -> str:
    try:
        total = phalanx.all_reduce(torch.ones(3), backend)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if total.tolist() == [backend.world_size] * 3 else f"all_reduce gives {total}"


# ------------------------------------------------------------------------------
# One process.


@lru_cache(maxsize=50)
def alone(way: Way, features: tuple[Feature, ...], *, exact: bool = False) -> list[Job]:
    """For each part of a batch the job that its ranks are compared with."""
    with tempfile.TemporaryDirectory() as folder:
        if not way.local:
            job = Job(way, features, Path(folder), exact=exact)
            for _ in job.train():
                pass
            return [job] * way.parts
        jobs = [
            Job(way, features, Path(folder), part=part, exact=exact) for part in range(way.parts)
        ]
        trainings = [job.train() for job in jobs]
        sync, running = None, True
        while running:
            over = [next(training, True) for training in trainings]
            running = not any(over)
            if running:
                sync = sync or _Syncs(way, jobs)
                sync.after_step()
        return jobs


class _Syncs:
    """What LocalSGD and DiLoCo do with ranks that train by themselves, written out."""

    def __init__(self, way: Way, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.trained = [job.kept["trained"][0] for job in jobs]
        self.center = [value.clone().requires_grad_() for value in jobs[0].kept["trained"][1]]
        momentum = jobs[0].outer_momentum
        self.outer = outer(self.center, momentum=momentum) if way.name == "DiLoCo" else None
        self.calls = self.synced = 0

    @torch.no_grad()
    def after_step(self) -> None:
        """Called after each step, and once more at the end."""
        first = self.jobs[0]
        self.calls += 1
        since = first.taken - self.synced
        if since < EVERY and (since == 0 or self.calls <= first.steps):
            return
        self.synced = first.taken
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


# ------------------------------------------------------------------------------
# Is it right?


def judge(way: Way, features: Sequence[Feature], outcomes: Sequence[Outcome]) -> Verdict:
    """Compare what ranks have with one process, or their errors with the one that is expected."""
    if any(one.fails for one in features):
        problem = _not_told(way, outcomes)
    elif any(outcome.error for outcome in outcomes):
        return _refused(way, features, outcomes)
    elif (refusal := refusal_of(way, features)) is not None and refusal.always:
        problem = f"nothing was refused, and {refusal.text!r} is expected: is it right now?"
    else:
        problem = _no_error_but(way, features, outcomes)
    return Verdict(WRONG, problem) if problem else Verdict(RIGHT)


def _no_error_but(way: Way, features: Sequence[Feature], outcomes: Sequence[Outcome]) -> str:
    """Return in what ranks without an error differ from one process, or ""."""
    if (error := _error_alone(way, features)) is not None:
        return f"one process raises {error!r}, and no rank: does torch refuse it?"
    return _differs(features, outcomes, alone(way, tuple(features)), way)


def _refused(way: Way, features: Sequence[Feature], outcomes: Sequence[Outcome]) -> Verdict:
    failed = [outcome for outcome in outcomes if outcome.error]
    first = next((o for o in failed if "the group is broken" not in o.text), failed[0])
    said = f"rank {first.rank}: {first.error}: {first.text}"
    refusal = refusal_of(way, features)
    if refusal is None and {o.error for o in outcomes} == {
        type(_error_alone(way, features)).__name__
    }:
        return Verdict(RIGHT)  # as torch has it
    if refusal is None:
        return Verdict(WRONG, _with_more(said, outcomes))
    if not all(re.search(refusal.text, o.text, re.DOTALL) for o in outcomes):
        return Verdict(WRONG, f"not refused by {refusal.text!r} on every rank: {said}")
    if len({o.error for o in outcomes}) > 1:
        return Verdict(WRONG, f"other errors on other ranks: {[o.error for o in outcomes]}: {said}")
    goes_on = refusal.ends or not any(o.after for o in outcomes)
    if not (goes_on and all(o.unchanged for o in outcomes)):
        return Verdict(WRONG, _with_more(said, outcomes))
    return Verdict(REFUSED, re.sub(r"^(rank \d+( \(.*?\))?: )+", "", first.text))


def _error_alone(way: Way, features: Sequence[Feature]) -> Exception | None:
    """The error that the program raises in one process, if it raises one."""
    try:
        alone(way, tuple(features))
    except Exception as error:
        return error
    return None


def _with_more(said: str, outcomes: Sequence[Outcome]) -> str:
    more = []
    others = [o.rank for o in outcomes if not o.error]
    if others:
        more.append(f"ranks {others} raise nothing")
    if not all(o.unchanged for o in outcomes):
        more.append("parameters have changed")
    after = [o.after for o in outcomes if o.after]
    if after:
        more.append(f"the group does not go on: {after[0][:100]}")
    return "; ".join([said, *more])


def _not_told(way: Way, outcomes: Sequence[Outcome]) -> str:
    """One rank has its own error, the others one that names it."""
    last = way.ranks - 1
    for outcome in outcomes:
        said = f"rank {outcome.rank} got {outcome.error or 'no error'}: {outcome.text}"
        if outcome.rank == last and outcome.error != "ArithmeticError":
            return f"not its own error: {said}"
        # Among four ranks, one may hear first of another that has ended for that reason.
        named = f"rank {last}" if way.ranks == 2 else "rank "
        if outcome.rank != last and not (outcome.ours and named in outcome.text):
            return f"not told of rank {last}: {said}"
    return ""


def _moved_by_rounding(jobs: Sequence[Job], exact: Sequence[Job]) -> float:
    """By how much one process is off from the same without rounding, at most."""
    off = [0.0]
    for job, other in zip(jobs, exact, strict=True):
        for kind, state in job.states.items():
            off += [(v - other.states[kind][n]).abs().max().item() for n, v in state.items()]
        pairs = zip(job.notes, other.notes, strict=True)
        off += [(mine.value - right.value).abs().max().item() for mine, right in pairs]
    return max(off)


def _differs(
    features: Sequence[Feature], outcomes: Sequence[Outcome], jobs: Sequence[Job], way: Way
) -> str:
    rtol, atol = (max(one.tolerance[n] for one in features) for n in (0, 1))
    share = max(one.of_change for one in features)
    if share:
        moved = [(jobs[0].states[""][n] - v).abs().max().item() for n, v in jobs[0].first.items()]
        rtol, atol = 0.0, share * max(moved)
    if any(one.rounds for one in features):
        atol += 4 * _moved_by_rounding(jobs, alone(way, tuple(features), exact=True))

    def off(value: Tensor, right: Tensor) -> str:
        if value.shape != right.shape or value.dtype != right.dtype:
            return f"{value.dtype} {list(value.shape)}, not {right.dtype} {list(right.shape)}"
        if torch.allclose(value, right, rtol=rtol, atol=atol):
            return ""
        by = (value - right).abs().max().item()
        return f"off by {by:.2g} (of {right.abs().max().item():.2g})"

    for kind in jobs[0].states:
        seen: set[str] = set()
        for outcome in outcomes:
            expected = jobs[outcome.part].states[kind]
            for name, value in outcome.states.get(kind, {}).items():
                seen.add(name)
                if way.buffers == "rank 0" and name in outcome.buffers and outcome.part:
                    continue
                problem = off(value, expected[name]) if name in expected else "not in the model"
                if problem:
                    return f"rank {outcome.rank}: {kind or 'at the end'}: {name} is {problem}"
        if missing := jobs[0].states[kind].keys() - seen:
            return f"no rank has {', '.join(missing)}"
    for outcome in outcomes:
        notes = jobs[outcome.part].notes
        if [note.label for note in outcome.notes] != [note.label for note in notes]:
            return f"rank {outcome.rank}: other notes: {[note.label for note in outcome.notes]}"
        for mine, right in zip(outcome.notes, notes, strict=True):
            if problem := off(mine.value, right.value):
                return f"rank {outcome.rank}: {mine.label} is {problem}"
    return ""
